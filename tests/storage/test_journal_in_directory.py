from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from holdfast.errors import DriverAlive, JournalDamaged, OwnershipLost, StorageError
from holdfast.storage import local
from holdfast.storage.base import Storage
from holdfast.storage.journal import Driver, Journal, read
from holdfast.storage.local import LocalStorage
from tests.storage.journal_contract import (
    DEAD,
    JournalContract,
    OpenJournal,
    contents,
    numbered,
    open_journal,
    written,
)

__all__ = ["open_journal"]

WAIT_S = 20


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "experiment")


class TestJournalInDirectory(JournalContract):
    def replace(self, storage: Storage, path: str, data: bytes) -> None:
        assert isinstance(storage, LocalStorage)
        (storage.root / path).write_bytes(data)  # `put` syncs, which thousands of flips need not


# Torn tails


def test_a_journal_cut_at_any_byte_keeps_every_whole_record_before_the_cut(tmp_path: Path) -> None:
    whole = LocalStorage(tmp_path / "whole")
    owner = Journal.open(whole, driver=DEAD)
    written(owner, 1, 2, 3)
    path, data = next(iter(contents(whole).items()))
    owner.close()
    for end in range(len(data) + 1):
        cut = LocalStorage(tmp_path / str(end))
        (cut.root / path).parent.mkdir(parents=True)
        (cut.root / path).write_bytes(data[:end])
        kept = numbered(*range(1, data[:end].count(b"\n") - 1))
        assert read(cut) == kept
        if end % 7 == 0 or end > len(data) - 5:
            owner = Journal.open(cut, driver=DEAD)
            assert owner.earlier == kept
            written(owner, 9)
            owner.close()
            assert read(cut) == kept + numbered(9)


def test_records_that_a_later_owner_has_counted_cannot_be_cut(storage: LocalStorage, open_journal: OpenJournal) -> None:
    written(open_journal(), 1)
    open_journal()
    first = storage.root / "journal" / "00000001.jsonl"
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalDamaged, match=r"00000001.jsonl has \d+ bytes"):
        read(storage)
    first.unlink()
    with pytest.raises(JournalDamaged, match=r"00000001.jsonl is missing"):
        read(storage)


def test_a_torn_tail_of_a_dead_owner_is_void_for_ever(storage: LocalStorage, open_journal: OpenJournal) -> None:
    written(open_journal(), 1)
    with open(storage.root / "journal" / "00000001.jsonl", "ab") as tail:
        tail.write(b'[30, "4bcaafef9c14')
    written(open_journal(), 2)
    written(open_journal(), 3)
    assert read(storage) == numbered(1, 2, 3)


def test_a_take_over_removes_what_dead_claimers_left(storage: LocalStorage, open_journal: OpenJournal) -> None:
    open_journal()
    left = storage.root / "journal" / ".tmp-4194305-0123456789abcdef"
    left.touch()
    open_journal()
    assert not left.exists()


# Calls of the system that fail


def raising(number: int, called: threading.Event | None = None) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        if called:
            called.set()
        raise OSError(number, os.strerror(number))

    return call


def test_a_failed_sync_ends_the_journal_and_is_never_repeated(
    open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = open_journal()
    with monkeypatch.context() as broken:
        broken.setattr(local, "sync_data", raising(errno.EIO))
        owner.append(numbered(1))
        with pytest.raises(StorageError, match=r"EIO.*takes no more records") as raised:
            owner.sync()
    assert not raised.value.transient
    calls: list[Callable[[], None]] = [owner.sync, lambda: owner.append(numbered(2)), owner.close]
    for call in calls:
        with pytest.raises(StorageError, match="EIO"):
            call()


def test_what_a_take_over_read_is_made_durable_before_its_length_is_written_down(
    storage: LocalStorage, open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_journal().append(numbered(1))
    before = contents(storage)
    with monkeypatch.context() as broken:
        broken.setattr(local, "sync_file", raising(errno.EIO))
        with pytest.raises(StorageError, match=r"could not sync .*00000001.jsonl"):
            open_journal()
    claimed = contents(storage)
    assert len(claimed) == 2
    assert before.items() <= claimed.items()
    assert b"previous" not in claimed["journal/00000002.jsonl"]


def test_a_sync_that_fails_in_the_background_is_raised_by_the_next_append(
    open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = open_journal()
    called = threading.Event()
    monkeypatch.setattr(local, "sync_data", raising(errno.ENOSPC, called))
    owner.append(numbered(1))
    assert called.wait(WAIT_S)
    owner._flusher.join(WAIT_S)
    with pytest.raises(StorageError, match="ENOSPC"):
        owner.append(numbered(2))


def test_an_append_that_was_cut_short_writes_nothing_and_may_be_repeated(
    storage: LocalStorage, open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_half(file: int, data: bytes) -> None:
        os.write(file, data[: len(data) // 2 + 5])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = written(open_journal(), 1)
    with monkeypatch.context() as full:
        full.setattr(local, "write_all", write_half)
        with pytest.raises(StorageError, match="free some space") as raised:
            owner.append(numbered(2, 3))
    assert raised.value.transient
    assert read(storage) == numbered(1)
    written(owner, 2, 3)
    assert read(storage) == open_journal().earlier == numbered(1, 2, 3)


def test_a_torn_append_that_cannot_be_undone_ends_the_journal(
    storage: LocalStorage, open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = written(open_journal(), 1)
    with monkeypatch.context() as broken:
        broken.setattr(local, "write_all", raising(errno.EIO))
        broken.setattr(os, "ftruncate", raising(errno.EIO))
        with pytest.raises(StorageError, match="torn record") as raised:
            owner.append(numbered(2))
    assert not raised.value.transient
    with pytest.raises(StorageError, match="torn record"):
        owner.append(numbered(2))
    assert read(storage) == numbered(1)


def test_an_append_that_cannot_look_is_not_to_be_repeated(
    open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = open_journal()
    with monkeypatch.context() as away:
        away.setattr(os, "stat", raising(errno.ESTALE))
        with pytest.raises(StorageError, match="whether the last records count is unknown") as raised:
            owner.append(numbered(1))
    assert not raised.value.transient
    with pytest.raises(StorageError, match="unknown"):
        owner.append(numbered(1))


def test_a_batch_is_one_write(open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = open_journal()
    batches: list[bytes] = []
    monkeypatch.setattr(local, "write_all", lambda file, data: batches.append(data))
    owner.append(numbered(1, 2, 3))
    assert [batch.count(b"\n") for batch in batches] == [3]


# Other processes

OWNER = """
import sys
from holdfast.storage.journal import Journal
from holdfast.storage.local import LocalStorage

journal = Journal.open(LocalStorage(sys.argv[1]))
journal.append([{"kind": "report", "number": 1}])
if sys.argv[2] == "closes":
    journal.close()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(storage: LocalStorage, does: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", OWNER, str(storage.root), does]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_another_process_that_is_alive_is_named_and_once_killed_its_records_are_there(
    storage: LocalStorage, open_journal: OpenJournal
) -> None:
    with another_process(storage, "holds") as process:
        with pytest.raises(DriverAlive, match=f"process {process.pid} is alive"):
            open_journal(driver=None)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: killed, but nobody has asked for it
        assert open_journal(driver=None).earlier == numbered(1)


def test_another_process_that_is_alive_but_closed_the_journal_is_no_owner(
    storage: LocalStorage, open_journal: OpenJournal
) -> None:
    with another_process(storage, "closes"):
        assert open_journal(driver=None).earlier == numbered(1)


def test_another_process_that_was_taken_over_is_stale(storage: LocalStorage, open_journal: OpenJournal) -> None:
    with another_process(storage, "holds") as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(DriverAlive):
            open_journal(driver=None)
        assert open_journal(takeover=True).earlier == numbered(1)


def test_a_driver_is_alive_only_as_the_very_same_process_of_the_same_boot() -> None:
    here = Driver.here()
    assert here.is_alive_here()
    assert not Driver(here.host, here.boot_id, here.pid, here.start_time + 1).is_alive_here()
    assert not Driver(here.host, "another boot", here.pid, here.start_time).is_alive_here()
    assert not Driver(here.host, here.boot_id, 4194305, here.start_time).is_alive_here()
    assert not DEAD.is_alive_here()


def test_a_process_with_a_name_made_to_confuse_is_read_right(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), str(WAIT_S)]) as process:
        try:
            start_time = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
            here = Driver.here()
            assert Driver(here.host, here.boot_id, process.pid, start_time).is_alive_here()
        finally:
            process.kill()
    assert not Driver(here.host, here.boot_id, process.pid, start_time).is_alive_here()


def test_threads_may_append_together(storage: LocalStorage, open_journal: OpenJournal) -> None:
    owner = open_journal()

    def append(thread: int) -> None:
        for number in range(50):
            owner.append(numbered(thread * 100 + number))
            if number % 10 == 0:
                owner.sync()

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owner.sync()
    numbers = [record["number"] for record in read(storage)]
    for thread_number in range(4):
        mine = [number for number in numbers if number // 100 == thread_number]
        assert mine == list(range(thread_number * 100, thread_number * 100 + 50))


def test_owners_that_shut_each_other_out_lose_no_record_that_counted(storage: LocalStorage) -> None:
    accepted: list[int] = []
    tried: list[int] = []

    def own(first: int) -> None:
        for start in range(first, first + 300, 10):
            with suppress(OwnershipLost):
                owner = Journal.open(storage, takeover=True, driver=DEAD)
                with closing(owner):
                    for number in range(start, start + 10):
                        tried.append(number)
                        owner.append(numbered(number))
                        accepted.append(number)

    threads = [threading.Thread(target=own, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    there = [record["number"] for record in read(storage)]
    assert len(there) == len(set(there))
    assert set(accepted) <= set(there) <= set(tried)
