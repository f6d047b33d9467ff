from __future__ import annotations

import builtins
import contextlib
import errno
import itertools
import os
import random
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from holdfast.checkpoint import keeper as keeper_module
from holdfast.checkpoint import transfer
from holdfast.checkpoint.checkpoint import MANIFEST, METADATA, METADATA_UNFINISHED
from holdfast.checkpoint.keeper import Keeper, PersistFailure
from holdfast.checkpoint.manifest import Part
from holdfast.checkpoint.transfer import (
    DURABLE,
    FILES,
    PART,
    UNSYNCED,
    Tries,
    damage,
    hash_file,
    make_durable,
    read_durable,
    stage,
)
from holdfast.errors import CheckpointFailed, StorageError
from holdfast.storage.local import boot_id
from tests.checkpoint.faults import Died, failing_calls, io_error, no_space

DEADLINE_S = 30


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return directory(tmp_path / "model")


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "staging" / "1" / "0"


@pytest.fixture
def without_reflinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "share_blocks", lambda source, target: False)


def directory(at: Path) -> Path:
    (at / "deep" / "deeper").mkdir(parents=True)
    (at / "hollow" / "inner").mkdir(parents=True)
    (at / "weights.bin").write_bytes(b"weights" * 1000)
    (at / "deep" / "deeper" / "empty").write_bytes(b"")
    (at / "deep" / "config.json").write_bytes(b"{}")
    (at / METADATA).write_bytes(b'{"epoch": 1}')
    return at


def listing(at: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(at)): path.read_bytes() if path.is_file() else None for path in at.rglob("*")}


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"!")


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def made_durable(part: Path, tries: Tries | None = None) -> Part:
    return make_durable(part, tries or Tries())


# Staging


@pytest.mark.parametrize("give", [False, True])
def test_a_staged_part_is_the_directory_and_a_note_of_it(source: Path, part: Path, give: bool) -> None:
    before = listing(source)
    staged = stage(source, part, give=give)
    assert listing(part / FILES) == before
    assert Part.unseal((part / PART).read_bytes()) == staged
    assert sorted(os.listdir(part)) == [FILES, PART]
    assert {file.path: file.size_bytes for file in staged.files} == {
        path: len(data) for path, data in before.items() if data is not None
    }
    assert staged.directories == ("hollow/inner",)
    assert all(os.stat(part / FILES / file.path).st_mtime_ns == file.mtime_ns for file in staged.files)


def test_a_copy_leaves_the_source_as_it_is(source: Path, part: Path) -> None:
    before = listing(source)
    inode = os.stat(source / "weights.bin").st_ino
    stage(source, part, give=False)
    assert listing(source) == before
    assert os.stat(source / "weights.bin").st_ino == inode != os.stat(part / FILES / "weights.bin").st_ino


def test_a_later_edit_of_the_source_does_not_reach_a_copy(source: Path, part: Path) -> None:
    stage(source, part, give=False)
    with open(source / "weights.bin", "r+b") as file:
        file.write(b"EDITED!")
    assert (part / FILES / "weights.bin").read_bytes() == b"weights" * 1000


def test_what_is_given_away_is_renamed(source: Path, part: Path) -> None:
    inode = os.stat(source / "weights.bin").st_ino
    staged = stage(source, part, give=True)
    assert not source.exists()
    assert os.stat(part / FILES / "weights.bin").st_ino == inode
    assert all(file.hash == "" for file in staged.files)


@pytest.mark.usefixtures("without_reflinks")
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_where_the_kernel_cannot_copy_it_is_done_by_hand(
    tmp_path: Path, part: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    sendfile, calls = os.sendfile, []

    def give_up(target: int, source: int, offset: None, count: int) -> int:
        calls.append(count)
        if len(calls) > fails_at:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return sendfile(target, source, offset, 1000)

    data = random.Random(0).randbytes(3_000_000)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(data)
    monkeypatch.setattr(os, "sendfile", give_up)
    stage(tmp_path / "model", part, give=False)
    assert (part / FILES / "weights").read_bytes() == data


@pytest.mark.parametrize("refusal", [errno.EXDEV, errno.EBUSY, errno.EACCES])
def test_what_cannot_be_renamed_is_copied(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise OSError(refusal, os.strerror(refusal))

    before = listing(source)
    monkeypatch.setattr(os, "rename", refuse)
    stage(source, part, give=True)
    assert listing(part / FILES) == before == listing(source)


def test_a_rename_whose_answer_was_lost_is_seen(source: Path, part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def answer_lost(source: Any, target: Any) -> None:
        rename(source, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    before = listing(source)
    monkeypatch.setattr(os, "rename", answer_lost)
    stage(source, part, give=True)
    assert listing(part / FILES) == before


def test_an_interrupt_just_after_the_rename_gives_the_directory_back(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, before = os.rename, listing(source)

    def interrupted(here: Any, there: Any) -> None:
        rename(here, there)
        monkeypatch.setattr(os, "rename", rename)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage(source, part, give=True)
    assert listing(source) == before
    assert not part.exists()


@pytest.mark.parametrize("give", [False, True])
def test_a_hard_linked_file_is_copied_never_shared(source: Path, part: Path, tmp_path: Path, give: bool) -> None:
    os.link(source / "weights.bin", tmp_path / "elsewhere")
    stage(source, part, give=give)
    (tmp_path / "elsewhere").write_bytes(b"edited")
    assert (part / FILES / "weights.bin").read_bytes() == b"weights" * 1000
    assert os.stat(part / FILES / "weights.bin").st_nlink == 1


@pytest.mark.parametrize("give", [False, True])
def test_what_links_lead_to_is_copied(source: Path, part: Path, tmp_path: Path, give: bool) -> None:
    other = directory(tmp_path / "other")
    (source / "file-link").symlink_to(other / "weights.bin")
    (source / "folder-link").symlink_to(other)
    (source / "hollow-link").symlink_to(other / "hollow" / "inner")
    staged = stage(source, part, give=give)
    assert not any(path.is_symlink() for path in (part / FILES).rglob("*"))
    assert (part / FILES / "file-link").read_bytes() == b"weights" * 1000
    assert listing(part / FILES / "folder-link") == listing(other)
    assert set(staged.directories) == {"hollow/inner", "hollow-link", "folder-link/hollow/inner"}
    assert source.exists()


def test_a_link_to_a_directory_that_is_given_away_is_not_taken_for_it(source: Path, part: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    before = listing(source)
    stage(tmp_path / "link", part, give=True)
    assert not (part / FILES).is_symlink()
    assert listing(source) == before == listing(part / FILES)


@pytest.mark.parametrize("give", [False, True])
@pytest.mark.parametrize("back_to", [".", "..", "../.."])
def test_a_link_that_leads_back_is_refused_by_name(source: Path, part: Path, give: bool, back_to: str) -> None:
    (source / "deep" / "deeper" / "loop").symlink_to(back_to)
    with pytest.raises(CheckpointFailed, match="deep/deeper/loop leads back to a directory that holds it"):
        stage(source, part, give=give)
    assert not part.exists()


def test_links_that_lead_to_each_other_are_refused_by_name(source: Path, part: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "back").symlink_to(source)
    (source / "out").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointFailed, match="out/back leads back"):
        stage(source, part, give=False)


def bind_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


SPECIAL: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "neither a file nor a directory"),
    "socket": (bind_socket, "neither a file nor a directory"),
    "device": (lambda path: path.symlink_to("/dev/null"), "neither a file nor a directory"),
    "broken": (lambda path: path.symlink_to("nowhere"), "broken link"),
    "circle": (lambda path: path.symlink_to(path), "broken link"),
    "no text \udcff": (lambda path: path.write_bytes(b""), "not a name in UTF-8"),
}


@pytest.mark.parametrize("give", [False, True])
@pytest.mark.parametrize("name", SPECIAL, ids=ascii)
def test_what_cannot_be_kept_is_refused_by_name(source: Path, part: Path, name: str, give: bool) -> None:
    make, why = SPECIAL[name]
    make(source / "deep" / name)
    with pytest.raises(CheckpointFailed, match=why) as refused:
        stage(source, part, give=give)
    assert f"deep/{name}" in str(refused.value) or repr(f"deep/{name}") in str(refused.value)
    assert not part.exists()
    assert (source / "weights.bin").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_named(source: Path, part: Path) -> None:
    (source / "weights.bin").chmod(0)
    with pytest.raises(CheckpointFailed, match=r"weights\.bin cannot be read: Permission denied"):
        stage(source, part, give=False)


@pytest.mark.usefixtures("without_reflinks")
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"shorter"),
        lambda path: os.utime(path, ns=(1, 1)),
        append,
    ],
)
def test_a_file_that_changes_while_it_is_copied_is_named(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any]
) -> None:
    copy_bytes = transfer._copy_bytes

    def copy_while_it_changes(reading: int, writing: int) -> None:
        copy_bytes(reading, writing)
        if os.readlink(f"/proc/self/fd/{reading}").endswith("weights.bin"):
            change(source / "weights.bin")

    monkeypatch.setattr(transfer, "_copy_bytes", copy_while_it_changes)
    with pytest.raises(CheckpointFailed, match=r"weights\.bin changed while it was read"):
        stage(source, part, give=False)
    assert not part.exists()


@pytest.mark.usefixtures("without_reflinks")
def test_a_copy_that_ends_too_early_is_no_copy(source: Path, part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sendfile", lambda *arguments: 0)
    with pytest.raises(CheckpointFailed, match="changed while it was read"):
        stage(source, part, give=False)


def test_a_file_that_is_removed_while_the_directory_is_copied_is_named(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = transfer._walk

    def walk_then_lose(folder: Path, *prefix: str, **options: Any) -> Iterator[Any]:
        yield from list(walk(folder, *prefix, **options))
        if folder == source:
            (source / "weights.bin").unlink()

    monkeypatch.setattr(transfer, "_walk", walk_then_lose)
    with pytest.raises(CheckpointFailed, match=r"weights\.bin cannot be read"):
        stage(source, part, give=False)
    assert not part.exists()


@pytest.mark.parametrize("give", [False, True])
def test_an_empty_directory_is_a_valid_part(tmp_path: Path, part: Path, give: bool) -> None:
    (tmp_path / "nothing").mkdir()
    assert stage(tmp_path / "nothing", part, give=give) == Part((), boot=boot_id())
    assert made_durable(part) == Part(())
    assert (part / FILES).is_dir()


@pytest.mark.parametrize("give", [False, True])
def test_names_of_every_kind_are_kept(tmp_path: Path, part: Path, give: bool) -> None:
    names = ["a b", "é", "-", "new\nline", "quote\"'", "back\\slash", "x" * 255, "model.pt.anew", "part.json", "~", "$"]
    (tmp_path / "names").mkdir()
    for name in names:
        (tmp_path / "names" / name).write_text(name)
    stage(tmp_path / "names", part, give=give)
    made_durable(part)
    assert {file.path: file.hash for file in read_durable(part).files} == {
        name: digest(name.encode()) for name in names
    }
    assert sorted(os.listdir(part / FILES)) == sorted(names)


@pytest.mark.parametrize("give", [False, True])
def test_modes_of_files_are_kept(source: Path, part: Path, give: bool) -> None:
    (source / "weights.bin").chmod(0o640)
    (source / "deep" / "config.json").chmod(0o755)
    stage(source, part, give=give)
    assert stat.S_IMODE(os.stat(part / FILES / "weights.bin").st_mode) == 0o640
    assert stat.S_IMODE(os.stat(part / FILES / "deep" / "config.json").st_mode) == 0o755


@pytest.mark.parametrize("give", [False, True])
def test_the_manifest_of_an_earlier_checkpoint_is_not_taken(source: Path, part: Path, give: bool) -> None:
    (source / MANIFEST).write_text("of another checkpoint")
    (source / METADATA_UNFINISHED).write_text("{")
    (source / "deep" / MANIFEST).write_text("only a file of the user's")
    staged = stage(source, part, give=give)
    names = {file.path for file in staged.files}
    assert f"deep/{MANIFEST}" in names
    assert METADATA in names
    assert names.isdisjoint({MANIFEST, METADATA_UNFINISHED})
    assert not (part / FILES / MANIFEST).exists()
    assert not (part / FILES / METADATA_UNFINISHED).exists()


def test_a_part_that_is_there_is_not_touched(source: Path, part: Path) -> None:
    stage(source, part, give=False)
    before = listing(part)
    with pytest.raises(FileExistsError):
        stage(source, part, give=True)
    assert listing(part) == before
    assert source.exists()


@pytest.mark.parametrize("missing", ["nothing", "model/weights.bin"])
def test_a_source_that_is_no_directory_leaves_no_part(source: Path, part: Path, missing: str) -> None:
    with pytest.raises(OSError):
        stage(source.parent / missing, part, give=True)
    assert not part.exists()


@pytest.mark.parametrize("error", [no_space, io_error, KeyboardInterrupt])
@pytest.mark.parametrize("give", [False, True])
@pytest.mark.parametrize("linked", [False, True])
def test_a_failure_of_any_system_call_leaves_the_source_whole_and_no_part(
    source: Path, tmp_path: Path, error: Callable[[], BaseException], give: bool, linked: bool
) -> None:
    if linked:  # copied although it is given away
        (source / "link").symlink_to(source / "weights.bin")
    before = listing(source)
    for number in itertools.count():
        part = tmp_path / "parts" / str(number)
        with failing_calls(number, error) as calls:
            try:
                stage(source, part, give=give)
            except (OSError, CheckpointFailed, KeyboardInterrupt):
                staged = False
            else:
                staged = True  # what failed could be done without
        if not calls.failed:
            break
        if staged:
            assert listing(part / FILES) == before, calls.names[number]
            if not source.exists():
                os.rename(part / FILES, source)
        else:
            assert not part.exists(), calls.names[number]
        assert listing(source) == before, calls.names[number]
    assert number > 10


@pytest.mark.parametrize("give", [False, True])
def test_a_disk_that_fails_for_good_leaves_the_source_whole(source: Path, tmp_path: Path, give: bool) -> None:
    before = listing(source)
    for number in itertools.count():
        part = tmp_path / "parts" / str(number)
        with (
            failing_calls(number, io_error, and_all_after=True) as calls,
            contextlib.suppress(OSError, CheckpointFailed),
        ):
            stage(source, part, give=give)
        if not calls.failed:
            break
        assert listing(source) == before, calls.names[number]


# Making durable


@pytest.mark.parametrize("give", [False, True])
def test_what_is_durable_is_noted_with_the_hash_of_each_file(source: Path, part: Path, give: bool) -> None:
    before = listing(source)
    stage(source, part, give=give)
    durable = made_durable(part)
    assert durable == read_durable(part)
    assert {file.path: file.hash for file in durable.files} == {
        path: digest(data) for path, data in before.items() if data is not None
    }
    assert durable.directories == ("hollow/inner",)
    assert sorted(os.listdir(part)) == [DURABLE, FILES, PART]
    assert damage(part / FILES, durable.files, full=True) == []


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, (8 << 20) - 1, (8 << 20) + 12345])
@pytest.mark.usefixtures("without_reflinks")
def test_files_of_every_size_are_hashed_right(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    for give in (False, True):
        folder = tmp_path / f"give-{give}"
        folder.mkdir()
        (folder / "model").write_bytes(data)
        (folder / "other").write_bytes(data[::-1])
        stage(folder, tmp_path / f"part-{give}", give=give)
        durable = made_durable(tmp_path / f"part-{give}")
        assert [file.hash for file in durable.files] == [digest(data), digest(data[::-1])]
        assert hash_file(tmp_path / f"part-{give}" / FILES / "model") == digest(data)


@pytest.mark.parametrize("give", [False, True])
def test_two_thousand_small_files(tmp_path: Path, part: Path, give: bool) -> None:
    folder = tmp_path / "many"
    for number in range(2000):
        (folder / f"layer{number % 7}").mkdir(parents=True, exist_ok=True)
        (folder / f"layer{number % 7}" / str(number)).write_bytes(b"%d" % number)
    stage(folder, part, give=give)
    durable = made_durable(part)
    assert {file.path: file.hash for file in durable.files} == {
        f"layer{number % 7}/{number}": digest(b"%d" % number) for number in range(2000)
    }


def test_making_durable_twice_is_harmless(source: Path, part: Path) -> None:
    stage(source, part, give=True)
    first = made_durable(part)
    assert made_durable(part) == first


def test_a_torn_note_of_durability_is_made_again(source: Path, part: Path) -> None:
    stage(source, part, give=True)
    durable = made_durable(part)
    whole = (part / DURABLE).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (part / DURABLE).write_bytes(whole[:length])
        with pytest.raises(CheckpointFailed, match="is not whole"):
            read_durable(part)
        assert made_durable(part) == durable


def test_a_torn_note_of_the_part_fails_by_name(source: Path, part: Path) -> None:
    stage(source, part, give=True)
    (part / PART).write_bytes((part / PART).read_bytes()[:-5])
    with pytest.raises(CheckpointFailed, match=r"is not whole: part\.json"):
        made_durable(part)
    (part / PART).unlink()
    with pytest.raises(CheckpointFailed, match=r"is not whole: part\.json"):
        made_durable(part)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "longer": (append, "weights.bin was still written to after it had been reported"),
    "touched": (touch, "weights.bin was still written to after it had been reported"),
    "removed": (os.unlink, "weights.bin was removed after it had been reported"),
    "added": (lambda path: path.with_name("more").touch(), "more was added after its directory had been reported"),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_after_it_was_given_away_is_named(
    source: Path, part: Path, change: str, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many:
        monkeypatch.setattr(transfer, "_MANY_FILES", 1)
    act, message = CHANGES[change]
    stage(source, part, give=True)
    act(part / FILES / "weights.bin")
    with pytest.raises(CheckpointFailed, match=message):
        made_durable(part)
    assert not (part / DURABLE).exists()


def test_a_file_that_changes_while_it_is_hashed_is_named(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(source, part, give=True)

    def hash_then_change(path: str) -> str:
        found = hash_file(path)
        if path.endswith("weights.bin"):
            append(Path(path))
        return found

    monkeypatch.setattr(transfer, "hash_file", hash_then_change)
    with pytest.raises(CheckpointFailed, match=r"weights\.bin was still written to"):
        made_durable(part)


class FailingSync:
    """An fsync that fails for some files, and remembers which files it was asked for."""

    def __init__(self, fails: Callable[[str], bool]) -> None:
        self.fsync = os.fsync
        self.fails = fails
        self.asked: list[tuple[int, str]] = []

    def __call__(self, file: int) -> None:
        status, path = os.fstat(file), os.readlink(f"/proc/self/fd/{file}")
        if stat.S_ISREG(status.st_mode):
            self.asked.append((status.st_ino, path))
            if self.fails(path):
                raise io_error()
        self.fsync(file)


KEEPERS = pytest.mark.parametrize("keeper", ["the same", "the next", "the same, which could write no note"])


def next_tries(keeper: str, part: Path, tries: Tries) -> Tries:
    if keeper == "the same, which could write no note":
        (part / UNSYNCED).unlink()
    return Tries() if keeper == "the next" else tries


@KEEPERS
def test_a_failed_fsync_is_never_repeated_the_file_is_written_anew(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, keeper: str
) -> None:
    (source / "weights.bin").chmod(0o751)
    (source / "weights.bin.anew").write_bytes(b"the user's own")
    before = listing(source)
    stage(source, part, give=True)
    kept_open = [os.open(path, os.O_RDONLY) for path in (part / FILES).rglob("*")]  # else their inodes come again
    failing = FailingSync(lambda path: path.endswith("weights.bin"))
    monkeypatch.setattr(os, "fsync", failing)
    tries = Tries()
    with pytest.raises(OSError):
        made_durable(part, tries)
    assert not (part / DURABLE).exists()
    (failed,) = [inode for inode, path in failing.asked if path.endswith("weights.bin")]

    failing.fails = lambda path: False
    failing.asked.clear()
    durable = made_durable(part, next_tries(keeper, part, tries))
    assert failed not in [inode for inode, _ in failing.asked]
    assert len(failing.asked) == len(durable.files)
    assert listing(part / FILES) == before
    assert damage(part / FILES, durable.files, full=True) == []
    assert stat.S_IMODE(os.stat(part / FILES / "weights.bin").st_mode) == 0o751
    assert sorted(os.listdir(part)) == [DURABLE, FILES, PART]
    for file in kept_open:
        os.close(file)


@KEEPERS
def test_of_large_files_too_a_failed_fsync_is_raised(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, keeper: str
) -> None:
    monkeypatch.setattr(transfer, "_WORTH_A_THREAD_BYTES", 0)
    stage(source, part, give=True)
    failing = FailingSync(lambda path: path.endswith("weights.bin"))
    monkeypatch.setattr(os, "fsync", failing)
    tries = Tries()
    with pytest.raises(OSError):
        made_durable(part, tries)
    failing.fails = lambda path: False
    assert made_durable(part, next_tries(keeper, part, tries)) == read_durable(part)


@KEEPERS
def test_an_fsync_that_fails_again_may_be_tried_again(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, keeper: str
) -> None:
    before = listing(source)
    stage(source, part, give=True)
    failing = FailingSync(lambda path: True)
    monkeypatch.setattr(os, "fsync", failing)
    tries = Tries()
    for _ in range(3):
        with pytest.raises(OSError):
            made_durable(part, tries)
    failing.fails = lambda path: False
    durable = made_durable(part, next_tries(keeper, part, tries))
    assert listing(part / FILES) == before
    assert damage(part / FILES, durable.files, full=True) == []
    assert sorted(os.listdir(part)) == [DURABLE, FILES, PART]


@pytest.mark.parametrize("write", ["_write_note", "hash_file"])
def test_only_after_a_failed_fsync_is_anything_written_anew(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    stage(source, part, give=True)
    inode = os.stat(part / FILES / "weights.bin").st_ino

    def fail(*arguments: Any) -> None:
        raise no_space()

    tries = Tries()
    with monkeypatch.context() as patch:
        patch.setattr(transfer, write, fail)
        with pytest.raises(OSError):
            made_durable(part, tries)
    made_durable(part, tries)
    assert os.stat(part / FILES / "weights.bin").st_ino == inode


@KEEPERS
def test_what_is_written_to_after_a_failed_fsync_is_not_taken(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, keeper: str
) -> None:
    stage(source, part, give=True)
    append(part / FILES / "weights.bin")  # hashed like this, and never looked at: the fsync fails before
    failing = FailingSync(lambda path: path.endswith("weights.bin"))
    monkeypatch.setattr(os, "fsync", failing)
    tries = Tries()
    with pytest.raises(OSError):
        made_durable(part, tries)
    failing.fails = lambda path: False
    with pytest.raises(CheckpointFailed, match=r"weights\.bin was still written to"):
        made_durable(part, next_tries(keeper, part, tries))


@KEEPERS
def test_bytes_that_a_failed_fsync_lost_fail_the_checkpoint(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, keeper: str
) -> None:
    stage(source, part, give=True)
    failing = FailingSync(lambda path: path.endswith("weights.bin"))
    tries = Tries()
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError):
        made_durable(part, tries)
    failing.fails = lambda path: False
    lost = part / FILES / "weights.bin"
    before = os.stat(lost)
    lost.write_bytes(b"\0" * 7000)
    os.utime(lost, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointFailed, match=r"weights\.bin could not be written: .* its bytes are not the same"):
        made_durable(part, next_tries(keeper, part, tries))


@pytest.mark.parametrize("torn", [b"", b"[1"])
def test_a_torn_note_of_failed_fsyncs_may_mean_any_file(source: Path, part: Path, torn: bytes) -> None:
    stage(source, part, give=True)
    (part / UNSYNCED).write_bytes(torn)
    with pytest.raises(CheckpointFailed, match="what it was before is not known"):
        made_durable(part)


def test_a_file_is_hashed_before_its_fsync_can_fail(
    tmp_path: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    for name in ("a", "b"):
        (tmp_path / "large" / name).write_bytes(bytes(transfer._WORTH_A_THREAD_BYTES))
    stage(tmp_path / "large", part, give=True)
    failing, tries = FailingSync(lambda path: True), Tries()
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError):
        made_durable(part, tries)
    assert tries.hashes.keys() == {"a", "b"}
    failing.fails = lambda path: False
    made_durable(part)


@pytest.mark.parametrize("syncfs", [True, False])
def test_of_many_files_a_lost_write_is_seen_for_each(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, syncfs: bool
) -> None:
    """Also where syncfs itself fails, were it for a file of somebody else's."""
    monkeypatch.setattr(transfer, "_MANY_FILES", 1)
    stage(source, part, give=True)
    looking = FailingSync(lambda path: path.endswith("weights.bin"))
    synced: list[Path] = []
    monkeypatch.setattr(transfer, "sync_filesystem", synced.append)

    def fail(path: Path) -> None:
        raise io_error()

    if syncfs:
        monkeypatch.setattr(transfer, "check_written_back", looking)
    else:
        monkeypatch.setattr(transfer, "sync_filesystem", fail)
        monkeypatch.setattr(os, "fsync", looking)
    tries = Tries()
    with pytest.raises(OSError):
        made_durable(part, tries)
    assert tries.unsynced == {"weights.bin"}
    assert syncfs == (synced == [part])
    assert not (part / DURABLE).exists()
    looking.fails = lambda path: False
    made_durable(part, tries)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("same_keeper", [False, True])
def test_a_failure_of_any_system_call_is_mended_by_the_next_try(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool, same_keeper: bool
) -> None:
    if many:
        monkeypatch.setattr(transfer, "_MANY_FILES", 1)
    more = [(transfer, "sync_filesystem"), (transfer, "check_written_back")]
    before = listing(source)
    for half in (False, True):
        for number in itertools.count():
            part, tries = tmp_path / f"part-{half}-{number}", Tries()
            stage(source, part, give=False)
            with failing_calls(number, io_error, more=more, half=half) as calls, contextlib.suppress(OSError):
                made_durable(part, tries)
            if not calls.failed:
                break
            durable = made_durable(part, tries if same_keeper else None)
            assert listing(part / FILES) == before, calls.names[number]
            assert damage(part / FILES, durable.files, full=True) == []
            assert sorted(os.listdir(part)) == [DURABLE, FILES, PART]


def test_a_death_at_any_system_call_is_finished_by_the_next_keeper(source: Path, tmp_path: Path) -> None:
    before = listing(source)
    for half in (False, True):
        for number in itertools.count():
            part = tmp_path / f"part-{half}-{number}"
            stage(source, part, give=False)
            with failing_calls(number, Died, half=half) as calls, contextlib.suppress(Died):
                made_durable(part)
            if not calls.failed:
                break
            durable = made_durable(part)
            assert listing(part / FILES) == before
            assert damage(part / FILES, durable.files, full=True) == []


def test_a_death_at_any_system_call_after_a_failed_fsync_is_finished_by_the_next_keeper(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(source)
    for number in itertools.count():
        part = tmp_path / f"part-{number}"
        stage(source, part, give=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", FailingSync(lambda path: path.endswith("weights.bin")))
            with pytest.raises(OSError):
                made_durable(part)
        with failing_calls(number, Died) as calls, contextlib.suppress(Died):
            made_durable(part)
        if not calls.failed:
            break
        durable = made_durable(part)
        assert listing(part / FILES) == before
        assert damage(part / FILES, durable.files, full=True) == []


# After the machine went down


def staged_before(part: Path, source: Path, monkeypatch: pytest.MonkeyPatch, *, hashed: bool = True) -> None:
    """Stages a part; from then on it is as if the machine had been started again."""
    stage(source, part, give=True)
    if hashed:
        staged = Part.unseal((part / PART).read_bytes())
        files = [replace(file, hash=hash_file(part / FILES / file.path)) for file in staged.files]
        (part / PART).write_bytes(replace(staged, files=tuple(files)).seal())
    monkeypatch.setattr(transfer, "boot_id", lambda: "the next start")


@pytest.mark.parametrize("lost", [lambda path: None, touch], ids=["nothing", "times"])
def test_what_was_staged_before_the_machine_went_down_and_is_all_there_is_made_durable(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, lost: Callable[[Path], object]
) -> None:
    before = listing(source)
    staged_before(part, source, monkeypatch)
    lost(part / FILES / "weights.bin")
    durable = made_durable(part)
    assert listing(part / FILES) == before
    assert damage(part / FILES, durable.files, full=True) == []


@pytest.mark.parametrize(
    ("lose", "what"),
    [
        (lambda path: path.write_bytes(bytes(7000)), "weights.bin has other bytes"),
        (lambda path: path.write_bytes(b""), "weights.bin has 0 bytes, not 7000"),
        (os.unlink, "weights.bin is missing"),
    ],
)
def test_bytes_that_went_down_with_the_machine_fail_the_checkpoint(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], object], what: str
) -> None:
    staged_before(part, source, monkeypatch)
    status = os.stat(part / FILES / "weights.bin")
    lose(part / FILES / "weights.bin")
    if (part / FILES / "weights.bin").exists():
        os.utime(part / FILES / "weights.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointFailed, match=f"was staged before the machine went down, .* on the disk: {what}"):
        made_durable(part)
    assert not (part / DURABLE).exists()


def test_bytes_that_nobody_can_verify_after_the_machine_went_down_fail_the_checkpoint(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged_before(part, source, monkeypatch, hashed=False)
    words = "was staged before the machine went down, and its bytes cannot be verified"
    with pytest.raises(CheckpointFailed, match=words):
        made_durable(part)
    failure = Keeper().persist(part)
    assert failure is not None
    assert not failure.passing
    assert words in failure.reason


def test_what_was_durable_before_the_machine_went_down_is_durable(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(source, part, give=True)
    durable = made_durable(part)
    monkeypatch.setattr(transfer, "boot_id", lambda: "the next start")
    assert made_durable(part) == durable


def test_a_disk_that_cannot_be_read_now_after_the_machine_went_down_is_waited_for(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise io_error()

    staged_before(part, source, monkeypatch)
    keeper = Keeper()
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "hash_file", fail)
        failure = keeper.persist(part)
    assert failure is not None
    assert failure.passing
    assert keeper.persist(part) is None


# The keeper


def test_the_keeper_says_nothing_when_a_part_is_durable(source: Path, part: Path) -> None:
    stage(source, part, give=True)
    assert Keeper().persist(part) is None
    assert read_durable(part).files


def test_the_keeper_remembers_the_hashes_of_a_try_that_failed(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(source, part, give=True)
    failing = FailingSync(lambda path: True)
    monkeypatch.setattr(os, "fsync", failing)
    keeper = Keeper()
    failure = keeper.persist(part)
    assert failure is not None
    assert failure.passing
    assert "EIO" in failure.reason
    failing.fails = lambda path: False
    assert keeper.persist(part) is None


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (no_space(), True),
        (OSError(errno.EACCES, "no"), False),
        (CheckpointFailed("x changed"), False),
        (KeyError(1), False),
    ],
)
def test_the_keeper_answers_whatever_goes_wrong(
    part: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, passing: bool
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(keeper_module, "make_durable", fail)
    failure = Keeper().persist(part)
    assert isinstance(failure, PersistFailure)
    assert failure.passing == passing
    assert failure.reason


def test_the_keeper_makes_a_part_durable_once_however_many_ask(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(source, part, give=True)
    keeper, begun, go_on, running = Keeper(), threading.Event(), threading.Event(), []

    def slow(part: Path, tries: Tries) -> Part:
        running.append(part)
        assert len(running) == 1 or (part / DURABLE).exists()
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return make_durable(part, tries)

    monkeypatch.setattr(keeper_module, "make_durable", slow)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(keeper.persist, part)
        assert begun.wait(DEADLINE_S)
        others = [pool.submit(keeper.persist, part) for _ in range(2)]
        go_on.set()
        assert [future.result(DEADLINE_S) for future in (first, *others)] == [None, None, None]
    assert read_durable(part).files


# What is damaged


def test_damage_is_named_file_by_file(source: Path, part: Path) -> None:
    stage(source, part, give=True)
    files = made_durable(part).files
    at = part / FILES
    (at / "weights.bin").write_bytes(b"Weights" * 1000)
    (at / "deep" / "config.json").write_bytes(b"{")
    (at / "deep" / "deeper" / "empty").unlink()
    os.mkfifo(at / "deep" / "deeper" / "empty")
    (at / METADATA).unlink()
    assert damage(at, files, full=False) == [
        f"{METADATA} is missing",
        "deep/config.json has 1 bytes, not 2",
        "deep/deeper/empty is not a file",
    ]
    assert damage(at, files, full=True) == [
        f"{METADATA} is missing",
        "deep/config.json has 1 bytes, not 2",
        "deep/deeper/empty is not a file",
        "weights.bin has other bytes than were committed",
    ]


@pytest.mark.parametrize(
    ("number", "transient"),
    [(errno.EIO, True), (errno.ESTALE, True), (errno.EMFILE, True), (errno.EACCES, False)],
)
@pytest.mark.parametrize("call", ["stat", "open"])
def test_a_file_that_cannot_be_read_now_is_not_damage(
    source: Path, part: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, transient: bool
) -> None:
    stage(source, part, give=True)
    files = made_durable(part).files

    def fail(path: str, *more: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os if call == "stat" else builtins, call, fail)
    with pytest.raises(StorageError, match=r"could not read .*\((EIO|ESTALE|EMFILE|EACCES)\)") as refused:
        damage(part / FILES, files, full=True)
    monkeypatch.undo()
    assert refused.value.transient == transient
    assert damage(part / FILES, files, full=True) == []
