from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from holdfast.checkpoint import checkpoint as module
from holdfast.checkpoint.checkpoint import MANIFEST, METADATA, METADATA_UNFINISHED, Checkpoint
from holdfast.errors import CheckpointError, CheckpointForgotten, ConfigError, StorageError

DEADLINE_S = 30
spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "deep" / "deeper").mkdir(parents=True)
    (directory / "weights.bin").write_bytes(b"weights" * 1000)
    (directory / "deep" / "deeper" / "empty").write_bytes(b"")
    (directory / "hollow").mkdir()
    return directory


@pytest.fixture
def committed(files: Path) -> Path:
    (files / MANIFEST).write_text("{}")
    return files


def listing(directory: str | Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in Path(directory).rglob("*")
    }


# What it is


def test_it_refers_to_a_directory_given_as_text_or_path(files: Path) -> None:
    assert Checkpoint(files).path == Checkpoint(str(files)).path == Checkpoint.from_directory(files).path == str(files)


def test_the_directory_may_be_written_later(tmp_path: Path) -> None:
    assert Checkpoint.from_directory(tmp_path / "later").path == str(tmp_path / "later")


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        ("/a//./x/../b", "/a/b"),
        ("//a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("FILE://localhost/a/b", "/a/b"),
        ("file:///a%20b", "/a b"),
        ("file:///a?b#c", "/a?b#c"),
        ("/a%20b", "/a%20b"),
    ],
)
def test_its_path_is_absolute_and_normalised(given: str, path: str) -> None:
    assert Checkpoint(given).path == path


def test_a_relative_path_starts_where_the_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpoint("model").path == str(tmp_path / "model")


@pytest.mark.parametrize("path", ["s3://bucket/model", "gs://b", "file://other-host/a", "memory://x", "hdfs://n:1/a"])
def test_a_remote_url_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="later version"):
        Checkpoint(path)


@pytest.mark.parametrize("path", ["", "a\0b", "file://"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="not the path"):
        Checkpoint(path)


def test_a_local_file_system_is_kept() -> None:
    filesystem = SimpleNamespace(type_name="local")
    assert Checkpoint("/a", filesystem).filesystem is filesystem
    assert Checkpoint("/a").filesystem is None


@pytest.mark.parametrize("filesystem", [SimpleNamespace(type_name="s3"), object()])
def test_another_file_system_is_refused(filesystem: Any) -> None:
    with pytest.raises(ConfigError, match="later version"):
        Checkpoint("bucket/model", filesystem=filesystem)


def test_two_of_the_same_place_are_equal() -> None:
    assert Checkpoint("/a/b") == Checkpoint("/a/./b/", SimpleNamespace(type_name="local"))
    assert len({Checkpoint("/a/b"), Checkpoint("file:///a/b"), Checkpoint("/a/c")}) == 2
    assert Checkpoint("/a/b") != Checkpoint("/a/c")
    assert Checkpoint("/a/b") != "/a/b"


def test_it_shows_its_place() -> None:
    assert repr(Checkpoint("/x/y")) == "Checkpoint('/x/y')"


@pytest.mark.parametrize("name", ["path", "filesystem", "note"])
def test_it_never_changes(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(Checkpoint("/a"), name, "/b")


def test_it_is_no_path_and_says_how_it_is_opened() -> None:
    with pytest.raises(TypeError, match="as_directory"):
        os.path.join(Checkpoint("/a"), "model.pt")


def test_it_pickles_to_a_plain_reference() -> None:
    with_filesystem = pickle.loads(pickle.dumps(Checkpoint("/a", SimpleNamespace(type_name="local"))))
    assert pickle.loads(pickle.dumps(Checkpoint("/a/b"))) == Checkpoint("/a/b")
    assert with_filesystem.filesystem.type_name == "local"


# Opening


def test_it_opens_as_the_directory_itself(files: Path) -> None:
    with Checkpoint(files).as_directory() as directory:
        assert directory == str(files)
    assert (files / "weights.bin").exists()


def test_opening_writes_nothing(committed: Path) -> None:
    before = listing(committed)
    with Checkpoint(committed).as_directory():
        assert listing(committed) == before
    assert listing(committed) == before


@pytest.mark.parametrize("open_it", [lambda c: c.as_directory().__enter__(), Checkpoint.get_metadata])
def test_opening_a_missing_directory_says_that_it_is_missing(
    tmp_path: Path, open_it: Callable[[Checkpoint], object]
) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_it(Checkpoint(tmp_path / "missing"))


@pytest.mark.parametrize(
    "open_it",
    [
        lambda c: c.as_directory().__enter__(),
        Checkpoint.to_directory,
        Checkpoint.get_metadata,
        lambda c: c.set_metadata({}),
    ],
)
def test_opening_a_file_says_that_a_checkpoint_is_a_directory(
    tmp_path: Path, open_it: Callable[[Checkpoint], object]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a directory, and this is not one"):
        open_it(Checkpoint(tmp_path / "file"))


def lockable(manifest: str) -> bool:
    """Whether another process can lock the manifest for itself alone."""
    program = (
        "import fcntl, sys\n"
        "try: fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: sys.exit(3)\n"
    )
    status = subprocess.run([sys.executable, "-S", "-c", program, manifest], timeout=DEADLINE_S).returncode
    assert status in (0, 3)
    return status == 0


def test_nobody_can_lock_it_for_himself_while_it_is_open(committed: Path) -> None:
    manifest = str(committed / MANIFEST)
    with Checkpoint(committed).as_directory():
        with Checkpoint(committed).as_directory():
            assert not lockable(manifest)
        assert not lockable(manifest)
    assert lockable(manifest)


def test_the_lock_is_released_when_the_reader_fails(committed: Path) -> None:
    with pytest.raises(ZeroDivisionError), Checkpoint(committed).as_directory():
        raise ZeroDivisionError
    assert lockable(str(committed / MANIFEST))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_inside_neither_keeps_nor_takes_the_lock(committed: Path) -> None:
    manifest, (blocked, release) = str(committed / MANIFEST), os.pipe()
    with Checkpoint(committed).as_directory():
        opened = Checkpoint(committed).as_directory()
        opened.__enter__()
        leaver = os.fork()
        if leaver == 0:
            opened.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(leaver, 0)[1] == 0
        assert not lockable(manifest)
        opened.__exit__(None, None, None)
        stayer = os.fork()
        if stayer == 0:
            os.close(release)
            os.read(blocked, 1)
            os._exit(0)
    try:
        assert lockable(manifest)
    finally:
        os.close(release)
        os.close(blocked)
        os.waitpid(stayer, 0)


def forgetting(directory: Path, do: Callable[[Path], None]) -> Callable[[int, int], None]:
    """A flock before which the directory is forgotten."""
    flock = fcntl.flock

    def after(descriptor: int, how: int) -> None:
        if how == fcntl.LOCK_SH:
            do(directory)
        flock(descriptor, how)

    return after


def renamed_away(directory: Path) -> None:
    directory.rename(directory.with_name("forgotten"))


def made_anew(directory: Path) -> None:
    renamed_away(directory)
    directory.mkdir()
    (directory / MANIFEST).write_text("{}")


@pytest.mark.parametrize("do", [renamed_away, made_anew])
def test_one_that_is_forgotten_while_it_is_opened_says_so(
    committed: Path, monkeypatch: pytest.MonkeyPatch, do: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(fcntl, "flock", forgetting(committed, do))
    descriptors = len(os.listdir("/dev/fd"))
    with pytest.raises(CheckpointForgotten, match="is gone"), Checkpoint(committed).as_directory():
        pass
    assert len(os.listdir("/dev/fd")) == descriptors


def test_who_waits_for_the_one_that_forgets_it_learns_that_it_is_gone(committed: Path) -> None:
    forgetter = os.open(committed / MANIFEST, os.O_RDONLY)
    fcntl.flock(forgetter, fcntl.LOCK_EX)
    seen: list[BaseException] = []

    def read() -> None:
        try:
            with Checkpoint(committed).as_directory():
                pass
        except CheckpointError as error:
            seen.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    renamed_away(committed)
    os.close(forgetter)
    reader.join(DEADLINE_S)
    assert len(seen) == 1  # forgotten if it waited, missing if it came later: both in plain words


def test_where_nothing_can_be_locked_it_opens_with_a_warning(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="no file locks"), Checkpoint(committed).as_directory() as directory:
        assert directory == str(committed)


def test_one_without_write_permission_opens_and_copies(committed: Path, tmp_path: Path) -> None:
    for path in [committed / MANIFEST, committed / "weights.bin", committed]:
        path.chmod(path.stat().st_mode & ~0o222)
    with Checkpoint(committed).as_directory() as directory:
        assert os.listdir(directory)
    copy = Path(Checkpoint(committed).to_directory(tmp_path / "copy"))
    assert (copy / "weights.bin").read_bytes() == b"weights" * 1000
    for path in [committed, copy]:
        path.chmod(0o755)


# Copying


def test_a_copy_holds_the_files_of_the_user_and_not_the_manifest(committed: Path, tmp_path: Path) -> None:
    expected = listing(committed)
    del expected[MANIFEST]
    assert Checkpoint(committed).to_directory(tmp_path / "new" / "copy") == str(tmp_path / "new" / "copy")
    assert listing(tmp_path / "new" / "copy") == expected


def test_a_manifest_deeper_down_is_a_file_of_the_user(files: Path, tmp_path: Path) -> None:
    (files / "deep" / MANIFEST).write_text("mine")
    assert listing(Checkpoint(files).to_directory(tmp_path / "copy")) == listing(files)


def test_notes_are_copied_and_unfinished_ones_are_not(files: Path, tmp_path: Path) -> None:
    Checkpoint(files).set_metadata({"a": 1})
    (files / METADATA_UNFINISHED).write_text("torn")
    copy = Checkpoint(files).to_directory(tmp_path / "copy")
    assert Checkpoint(copy).get_metadata() == {"a": 1}
    assert METADATA_UNFINISHED not in os.listdir(copy)


def test_without_a_path_each_copy_is_a_directory_of_its_own(files: Path) -> None:
    copies = [Checkpoint(files).to_directory() for _ in range(2)]
    try:
        assert copies[0] != copies[1]
        assert all(listing(copy) == listing(files) for copy in copies)
    finally:
        for copy in copies:
            shutil.rmtree(copy)


def test_the_target_may_exist_and_keeps_its_other_files(files: Path, tmp_path: Path) -> None:
    (tmp_path / "target" / "deep").mkdir(parents=True)
    (tmp_path / "target" / "other").write_text("mine")
    (tmp_path / "target" / "weights.bin").write_text("old")
    Checkpoint(files).to_directory(tmp_path / "target")
    assert listing(tmp_path / "target") == {**listing(files), "other": b"mine"}


def test_copying_over_links_to_the_checkpoint_leaves_it_whole(files: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    os.link(files / "weights.bin", target / "weights.bin")
    Checkpoint(files).to_directory(target)
    (target / "weights.bin").write_bytes(b"changed")
    assert (files / "weights.bin").read_bytes() == b"weights" * 1000


def test_an_edit_of_the_copy_does_not_reach_the_checkpoint(files: Path, tmp_path: Path) -> None:
    copy = Path(Checkpoint(files).to_directory(tmp_path / "copy"))
    with open(copy / "weights.bin", "r+b") as file:
        file.write(b"edited")
    assert (files / "weights.bin").read_bytes() == b"weights" * 1000


def test_a_copy_keeps_the_times_and_permissions(files: Path, tmp_path: Path) -> None:
    os.utime(files / "weights.bin", ns=(10**18, 10**18))
    (files / "weights.bin").chmod(0o640)
    copied = os.stat(Path(Checkpoint(files).to_directory(tmp_path / "copy")) / "weights.bin")
    assert (copied.st_mtime_ns, copied.st_mode & 0o777) == (10**18, 0o640)


@pytest.mark.parametrize("inside", ["", "deep", "deep/new", "../model/new"])
def test_it_is_not_copied_into_itself(files: Path, inside: str) -> None:
    before = listing(files)
    with pytest.raises(ConfigError, match="inside itself"):
        Checkpoint(files).to_directory(files / inside)
    assert listing(files) == before


def test_it_is_not_copied_over_a_committed_checkpoint(files: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="committed checkpoint"):
        Checkpoint(files).to_directory(tmp_path / "other")
    assert os.listdir(tmp_path / "other") == [MANIFEST]


def test_it_is_not_copied_over_a_file(files: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="not a directory"):
        Checkpoint(files).to_directory(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_copying_one_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointForgotten, match="is gone"):
        Checkpoint(tmp_path / "gone").to_directory(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("when", ["at the first file", "after the last file"])
def test_one_that_goes_while_it_is_copied_says_so_and_leaves_nothing(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def copy_and_lose(source: str, target: str) -> None:
        if when == "after the last file":
            shutil.copyfile(source, target)
        renamed_away(files)
        if when == "at the first file":
            shutil.copyfile(source, target)

    shutil.rmtree(files / "deep")
    shutil.rmtree(files / "hollow")
    monkeypatch.setattr(module, "_copy_file", copy_and_lose)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(CheckpointForgotten, match="is gone"):
        Checkpoint(files).to_directory()
    assert os.listdir(tmp_path / "temporary") == []


def test_what_is_no_file_cannot_be_copied_and_does_not_hang(files: Path, tmp_path: Path) -> None:
    os.mkfifo(files / "pipe")
    with pytest.raises(StorageError, match="pipe is not a file"):
        Checkpoint(files).to_directory(tmp_path / "copy")


def test_a_socket_cannot_be_copied(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind("socket")
        with pytest.raises(StorageError, match="socket is not a file"):
            Checkpoint(files).to_directory(tmp_path / "copy")


def test_a_full_disk_is_said_to_pass(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", target)

    monkeypatch.setattr(module, "_copy_file", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        Checkpoint(files).to_directory(tmp_path / "copy")
    assert caught.value.transient


def test_links_are_followed(files: Path, tmp_path: Path) -> None:
    (files / "link").symlink_to("weights.bin")
    (files / "folder").symlink_to("deep")
    copy = Path(Checkpoint(files).to_directory(tmp_path / "copy"))
    assert not (copy / "link").is_symlink()
    assert listing(copy)["link"] == b"weights" * 1000
    assert (copy / "folder" / "deeper" / "empty").exists()


# Notes


def test_there_are_no_notes_at_first_and_reading_makes_none(files: Path) -> None:
    assert Checkpoint(files).get_metadata() == {}
    assert not (files / METADATA).exists()


def test_notes_are_kept_replaced_and_added_to(files: Path) -> None:
    checkpoint = Checkpoint(files)
    checkpoint.set_metadata({"a": 1, "b": {"c": [None, True, "x"]}})
    assert checkpoint.get_metadata() == {"a": 1, "b": {"c": [None, True, "x"]}}
    checkpoint.set_metadata({"d": 2, "e": 3})
    checkpoint.update_metadata({"e": 4, "f": 5})
    assert Checkpoint(files).get_metadata() == {"d": 2, "e": 4, "f": 5}
    checkpoint.set_metadata({})
    assert checkpoint.get_metadata() == {}


def test_numbers_of_numpy_and_infinities_are_kept(files: Path) -> None:
    Checkpoint(files).update_metadata({"loss": np.float32(0.5), "epoch": np.int64(3), "best": float("inf"), "$": 1})
    assert Checkpoint(files).get_metadata() == {"loss": 0.5, "epoch": 3, "best": float("inf"), "$": 1}


@pytest.mark.parametrize(
    ("metadata", "named"),
    [({"model": {"layers": [1, object()]}}, r"metadata\['model'\]\['layers'\]\[1\]"), ({1: 2}, "key 1"), ([1], "dict")],
)
def test_what_cannot_be_kept_is_named_and_changes_nothing(files: Path, metadata: Any, named: str) -> None:
    Checkpoint(files).set_metadata({"a": 1})
    for keep in (Checkpoint(files).set_metadata, Checkpoint(files).update_metadata):
        with pytest.raises(TypeError, match=named):
            keep(metadata)
    assert Checkpoint(files).get_metadata() == {"a": 1}


@pytest.mark.parametrize(("content", "said"), [(b"{torn", "not JSON"), (b"[1]", "not a dict")])
def test_notes_that_are_none_are_said_to_be(files: Path, content: bytes, said: str) -> None:
    (files / METADATA).write_bytes(content)
    for read in (Checkpoint(files).get_metadata, lambda: Checkpoint(files).update_metadata({"a": 1})):
        with pytest.raises(CheckpointError, match=said):
            read()
    assert (files / METADATA).read_bytes() == content


def test_an_empty_file_of_notes_is_no_notes(files: Path) -> None:
    (files / METADATA).write_bytes(b"")
    assert Checkpoint(files).get_metadata() == {}


def test_notes_cannot_be_written_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint(tmp_path / "missing").set_metadata({"a": 1})
    assert not (tmp_path / "missing").exists()


def test_notes_that_cannot_be_written_leave_the_old_ones(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoint(files).set_metadata({"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        Checkpoint(files).update_metadata({"b": 2})
    assert caught.value.transient
    assert Checkpoint(files).get_metadata() == {"a": 1}
    monkeypatch.undo()
    Checkpoint(files).update_metadata({"c": 3})
    assert Checkpoint(files).get_metadata() == {"a": 1, "c": 3}
    assert METADATA_UNFINISHED not in os.listdir(files)


@pytest.mark.parametrize("name", [METADATA, METADATA_UNFINISHED])
def test_notes_are_never_written_through_a_link(files: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    (files / name).symlink_to(tmp_path / "elsewhere")
    with contextlib.suppress(StorageError):
        Checkpoint(files).set_metadata({"a": 1})
    assert (tmp_path / "elsewhere").read_text() == "mine"


def add_notes(directory: str, writer: int, count: int) -> None:
    for index in range(count):
        Checkpoint(directory).update_metadata({f"{writer}/{index}": index})


def test_notes_of_two_processes_are_all_kept(files: Path) -> None:
    count = 100
    writers = [spawn.Process(target=add_notes, args=(str(files), writer, count)) for writer in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(DEADLINE_S)
        if writer.is_alive():
            writer.kill()
    assert [writer.exitcode for writer in writers] == [0, 0]
    expected = {f"{writer}/{index}": index for writer in range(2) for index in range(count)}
    assert Checkpoint(files).get_metadata() == expected


def test_notes_of_two_threads_are_all_kept_and_readers_see_whole_ones(files: Path) -> None:
    writers = [threading.Thread(target=add_notes, args=(str(files), writer, 50)) for writer in range(2)]
    for writer in writers:
        writer.start()
    sizes = [0]
    while any(writer.is_alive() for writer in writers):
        sizes.append(len(Checkpoint(files).get_metadata()))
    assert sizes == sorted(sizes)
    assert len(Checkpoint(files).get_metadata()) == 100
