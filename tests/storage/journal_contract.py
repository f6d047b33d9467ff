"""What a journal keeps to on every storage. A member's test class inherits this and offers a fixture `storage`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

import pytest

from holdfast.errors import DriverAlive, HoldfastError, JournalDamaged, OwnershipLost, StorageError
from holdfast.storage import journal
from holdfast.storage.base import Storage
from holdfast.storage.journal import Driver, Journal, Record, read

DEAD = Driver(host="elsewhere", boot_id="another boot", pid=1, start_time=1)


class OpenJournal(Protocol):
    def __call__(self, *, takeover: bool = False, driver: Driver | None = DEAD) -> Journal: ...


def numbered(*numbers: int) -> list[Record]:
    return [{"kind": "report", "number": number} for number in numbers]


def written(journal: Journal, *numbers: int) -> Journal:
    journal.append(numbered(*numbers))
    journal.sync()
    return journal


def contents(storage: Storage) -> dict[str, bytes]:
    return {entry.path: storage.get(entry.path) for entry in storage.list()}


def is_prefix(records: list[Record], of: list[Record]) -> bool:
    return records == of[: len(records)]


def read_undamaged(storage: Storage, damaged: str) -> list[Record]:
    """Reads what a damage has not reached; no records if that is found and named."""
    try:
        return read(storage)
    except JournalDamaged as error:
        if damaged not in str(error):
            raise
        return []


@pytest.fixture
def open_journal(storage: Storage) -> Iterator[OpenJournal]:
    """Opens journals of drivers that are dead by the time another one looks."""
    opened: list[Journal] = []

    def open_(*, takeover: bool = False, driver: Driver | None = DEAD) -> Journal:
        opened.append(Journal.open(storage, takeover=takeover, driver=driver))
        return opened[-1]

    yield open_
    for one in opened:
        with suppress(HoldfastError):
            one.close()


class JournalContract:
    def test_a_new_journal_is_empty(self, storage: Storage, open_journal: OpenJournal) -> None:
        assert read(storage) == []
        first = open_journal()
        assert (first.epoch, first.earlier, read(storage)) == (1, [], [])

    def test_every_owner_finds_the_records_of_all_before_it(self, storage: Storage, open_journal: OpenJournal) -> None:
        for epoch in range(1, 5):
            owner = open_journal()
            assert owner.epoch == epoch
            assert owner.earlier == numbered(*range(epoch * 10 - 10))
            for start in (epoch * 10 - 10, epoch * 10 - 5):
                written(owner, *range(start, start + 5))
            assert read(storage) == numbered(*range(epoch * 10))

    def test_plain_data_come_back_as_they_were(self, storage: Storage, open_journal: OpenJournal) -> None:
        values: list[object] = [float("inf"), 1 << 70, 0.1, None, True, "é\n\u2028", {"$x": []}, ['", ', "[1]"]]
        records: list[Record] = [{"value": value} for value in values]
        owner = open_journal()
        owner.append(records)
        owner.append([])
        owner.sync()
        assert open_journal().earlier == read(storage) == records

    def test_a_reader_writes_nothing(self, storage: Storage, open_journal: OpenJournal) -> None:
        written(open_journal(), 1)
        before = contents(storage)
        assert read(storage) == numbered(1)
        assert contents(storage) == before

    def test_the_kinds_of_the_journal_itself_are_not_for_others(self, open_journal: OpenJournal) -> None:
        with pytest.raises(AssertionError, match="the journal's own"):
            open_journal().append([{"kind": "closed"}])

    def test_an_owner_that_is_alive_is_named_and_not_shut_out(
        self, storage: Storage, open_journal: OpenJournal
    ) -> None:
        owner = open_journal(driver=None)
        before = contents(storage)
        with pytest.raises(DriverAlive, match=str(Driver.here().pid)):
            open_journal()
        assert contents(storage) == before
        written(owner, 1)

    def test_a_takeover_shuts_out_even_an_owner_that_is_alive(self, open_journal: OpenJournal) -> None:
        owner = written(open_journal(driver=None), 1)
        assert open_journal(takeover=True).earlier == numbered(1)
        with pytest.raises(OwnershipLost):
            owner.look()

    def test_a_journal_that_was_closed_can_be_opened_again(self, storage: Storage, open_journal: OpenJournal) -> None:
        owner = open_journal(driver=None)
        owner.append(numbered(1))
        owner.close()
        owner.close()
        assert read(storage) == numbered(1)
        again = open_journal(driver=None)
        assert (again.epoch, again.earlier) == (2, numbered(1))

    def test_nothing_can_be_done_with_a_closed_journal(self, open_journal: OpenJournal) -> None:
        owner = open_journal()
        owner.close()
        calls: list[Callable[[], None]] = [lambda: owner.append(numbered(1)), owner.sync, owner.look]
        for call in calls:
            with pytest.raises(StorageError, match="closed"):
                call()

    def test_a_stale_owner_is_told_and_its_late_records_are_void(
        self, storage: Storage, open_journal: OpenJournal
    ) -> None:
        stale = written(open_journal(), 1)
        owner = written(open_journal(), 2)
        with pytest.raises(OwnershipLost):
            written(stale, 100)
        calls: list[Callable[[], None]] = [lambda: stale.append(numbered(101)), stale.sync, stale.look, stale.close]
        for call in calls:
            with pytest.raises(OwnershipLost):
                call()
        assert any(b"100" in data for data in contents(storage).values())
        assert read(storage) == numbered(1, 2)
        written(owner, 3)
        assert open_journal().earlier == numbered(1, 2, 3)

    def test_an_owner_that_died_before_it_read_on_carries_nothing(
        self, storage: Storage, open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def die(*arguments: object) -> None:
            raise KeyboardInterrupt

        stale = written(open_journal(), 1)
        for _ in range(2):
            with monkeypatch.context() as dying:
                dying.setattr(journal, "_read_chain", die)
                with pytest.raises(KeyboardInterrupt):
                    open_journal()
        with pytest.raises(OwnershipLost):
            stale.look()
        assert read(storage) == numbered(1)
        owner = written(open_journal(), 2)
        assert (owner.epoch, owner.earlier) == (4, numbered(1))
        assert read(storage) == numbered(1, 2)
        assert open_journal().earlier == numbered(1, 2)

    def test_this_process_may_open_what_it_failed_to_open(
        self, open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: object) -> None:
            raise StorageError("the storage is away", transient=True)

        with monkeypatch.context() as broken:
            broken.setattr(journal, "_read_chain", fail)
            with pytest.raises(StorageError, match="away"):
                open_journal(driver=None)
        assert open_journal(driver=None).epoch == 2

    def test_of_two_that_claim_at_once_the_slower_one_starts_over(
        self, open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real_refusal = journal._refuse_if_alive
        faster: list[Journal] = []

        def let_another_one_claim(segments: journal._Segments, epoch: int) -> None:
            real_refusal(segments, epoch)
            monkeypatch.setattr(journal, "_refuse_if_alive", real_refusal)
            faster.append(open_journal(driver=None))

        open_journal()
        monkeypatch.setattr(journal, "_refuse_if_alive", let_another_one_claim)
        with pytest.raises(DriverAlive):
            open_journal()
        faster[0].look()

    def test_what_was_appended_becomes_durable_without_a_sync(
        self, storage: Storage, open_journal: OpenJournal
    ) -> None:
        owner = open_journal()
        owner.append(numbered(1))
        assert owner._durable < owner._written
        deadline = 200
        while owner._durable < owner._written and deadline:
            owner._closing.wait(0.05)
            deadline -= 1
        assert read(storage) == numbered(1)

    def test_a_flipped_byte_is_found_or_cuts_the_tail_and_never_gives_a_wrong_record(
        self, storage: Storage, open_journal: OpenJournal
    ) -> None:
        written(open_journal(), 1, 2)
        written(open_journal(), 3)
        owner = written(open_journal(), 4)
        owner.close()
        expected = read(storage)
        assert expected == numbered(1, 2, 3, 4)
        for path, data in contents(storage).items():
            for position in range(len(data)):
                flipped = bytearray(data)
                flipped[position] ^= 1 << position % 8
                self.replace(storage, path, bytes(flipped))
                assert is_prefix(read_undamaged(storage, path), expected), (path, position)
            self.replace(storage, path, data)
        assert read(storage) == expected

    def test_damage_before_a_valid_record_names_file_and_line(
        self, storage: Storage, open_journal: OpenJournal
    ) -> None:
        written(open_journal(), 1, 2, 3)
        (path, data), *_ = [(path, data) for path, data in contents(storage).items() if b'"number":2' in data]
        self.replace(storage, path, data.replace(b'"number":2', b'"number":7'))
        line = data[: data.index(b'"number":2')].count(b"\n") + 1
        for look_at in (lambda: read(storage), open_journal):
            with pytest.raises(JournalDamaged, match=f"line {line} of .*{path}"):
                look_at()

    def replace(self, storage: Storage, path: str, data: bytes) -> None:
        storage.put(path, data)
