"""Files from here to there: how a rank's directory becomes a staged part, and how staged bytes become durable.

Staging takes the bytes; when `stage` returns, the caller may do with its own files what it likes. Making durable is
slower and happens elsewhere (`keeper.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import TypeVar

import xxhash

from holdfast.checkpoint.checkpoint import MANIFEST, METADATA_UNFINISHED
from holdfast.checkpoint.manifest import File, Part
from holdfast.errors import CheckpointFailed
from holdfast.storage.local import (
    begin_to_write_back,
    boot_id,
    check_written_back,
    share_blocks,
    storage_error,
    sync_directory,
    sync_filesystem,
    write_all,
)

PART = "part.json"
DURABLE = "durable.json"
UNSYNCED = "unsynced.json"
FILES = "files"
_ANEW = "anew"  # not among the user's files, where any name can be theirs

_BLOCK_BYTES = 1 << 20  # stays in the processor's cache between being read, hashed and written
_SENT_AT_ONCE_BYTES = 16 << 20
_MANY_FILES = 32  # from here on one syncfs is faster than an fsync for each
_THREADS = 2
_WORTH_A_THREAD_BYTES = 8 << 20  # of less work, the start of a thread is the greater part
_Item = TypeVar("_Item")
_Done = TypeVar("_Done")
_LEFT_OUT = frozenset({MANIFEST, METADATA_UNFINISHED})  # of the checkpoint that a directory was once taken from


def stage(source: Path, part: Path, *, give: bool) -> Part:
    """Takes the directory `source` as the staged part `part`; `source` keeps its files unless it is given away.

    Args:
        source: the user's directory.
        part: where the part is to be; must not exist, its parent may.
        give: the caller gives `source` away: it is renamed where that is possible.

    Raises:
        CheckpointFailed: a file changed while it was read, or cannot be part of a checkpoint; names it.
        OSError: as the file system says (no space, ...); nothing of the part is left behind.
    """
    part.mkdir(parents=True)
    try:
        found = list(_walk(source, above=(os.stat(source),)))
        if give and _can_be_taken(source, found):
            staged = _described(found)
            _write_note(part / PART, staged)
            if _take(source, part / FILES):  # last: from here on `source` is no more, and nothing may fail
                return staged
        staged = _copied(source, found, part / FILES)
        _write_note(part / PART, staged)
    except BaseException:
        if not os.path.lexists(source) and os.path.lexists(part / FILES):  # interrupted just after it was taken
            os.rename(part / FILES, source)
        shutil.rmtree(part, ignore_errors=True)
        raise
    return staged


@dataclass(frozen=True)
class _Found:
    """A file, or a directory that holds none, of a user's directory."""

    name: str
    status: os.stat_result
    is_link: bool

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.status.st_mode)

    @property
    def is_shared(self) -> bool:
        # Taken by rename, a link would let a later edit of another file reach into the checkpoint.
        return self.is_link or (self.is_file and self.status.st_nlink > 1)


def _walk(folder: Path, prefix: str = "", *, above: tuple[os.stat_result, ...]) -> Iterator[_Found]:
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        name = prefix + entry.name
        if name in _LEFT_OUT:
            continue
        status = _status(entry)
        if stat.S_ISDIR(status.st_mode):
            if entry.is_symlink() and any(os.path.samestat(status, upper) for upper in above):
                raise CheckpointFailed(f"{entry.path} leads back to a directory that holds it; remove that link")
            below = list(_walk(Path(entry.path), name + "/", above=(*above, status)))
            yield from below
            if not below or entry.is_symlink():
                yield _Found(name, status, entry.is_symlink())
        elif stat.S_ISREG(status.st_mode):
            yield _Found(name, status, entry.is_symlink())
        else:
            raise CheckpointFailed(f"{entry.path} is neither a file nor a directory: it cannot be kept; remove it")


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        raise CheckpointFailed(f"{entry.path} leads nowhere: it is a broken link, or was just removed") from error


def _can_be_taken(source: Path, found: Iterable[_Found]) -> bool:
    if os.path.islink(source) or any(os.path.lexists(source / name) for name in _LEFT_OUT):
        return False
    return not any(entry.is_shared for entry in found)


def _take(source: Path, target: Path) -> bool:
    try:
        os.rename(source, target)
    except OSError:  # another file system, a mount point, ...: a copy will do, or say what is wrong
        return os.path.lexists(target)  # NFS reports a repeated call as failed
    return True


def _write_note(path: Path, note: Part) -> None:
    try:
        line = note.seal()
    except UnicodeEncodeError as error:
        raise CheckpointFailed(f"{error.object!r} is not a name in UTF-8: it cannot be kept; rename it") from None
    with open(path, "wb", buffering=0) as file:
        write_all(file.fileno(), line)


def _described(found: Iterable[_Found]) -> Part:
    entries = list(found)
    files = tuple(File(e.name, e.status.st_size, "", e.status.st_mtime_ns) for e in entries if e.is_file)
    return Part(files, tuple(e.name for e in entries if not e.is_file), boot_id())


def _copied(source: Path, found: Sequence[_Found], target: Path) -> Part:
    target.mkdir()
    for folder in sorted({os.path.dirname(e.name) for e in found} | {e.name for e in found if not e.is_file}):
        (target / folder).mkdir(parents=True, exist_ok=True)
    files = [entry for entry in found if entry.is_file]
    size_bytes = sum(entry.status.st_size for entry in files)
    copies = _in_threads(
        lambda file: _copy_file(f"{source}/{file.name}", f"{target}/{file.name}", file.name), files, size_bytes
    )
    empty = tuple(e.name for e in found if not e.is_file and not any((target / e.name).iterdir()))
    return Part(tuple(copies), empty, boot_id())


def _in_threads(work: Callable[[_Item], _Done], items: Sequence[_Item], size_bytes: int) -> list[_Done]:
    if len(items) < 2 or size_bytes < _WORTH_A_THREAD_BYTES:
        return [work(item) for item in items]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, items))


def _copy_file(source: str, target: str, name: str) -> File:
    """Copies one file, by sharing its blocks where the file system can. The keeper hashes it: nobody waits for that."""
    with _open_user_file(source) as reading, open(target, "xb", buffering=0) as writing:
        before = os.fstat(reading.fileno())
        os.fchmod(writing.fileno(), stat.S_IMODE(before.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        if not share_blocks(reading.fileno(), writing.fileno()):
            _copy_bytes(reading.fileno(), writing.fileno())
        after, copy = os.fstat(reading.fileno()), os.fstat(writing.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or copy.st_size != after.st_size:
        raise CheckpointFailed(f"{name} changed while it was read: close every file before you report its directory")
    return File(name, copy.st_size, mtime_ns=copy.st_mtime_ns)


def _open_user_file(path: str) -> FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointFailed(f"{path} cannot be read: {error.strerror}") from error


def _copy_bytes(source: int, target: int) -> None:
    """Copies all bytes of an open file; inside the kernel where it can, which copies them once instead of twice."""
    if sys.platform != "linux":
        _pour(source, target)
        return
    try:
        while os.sendfile(target, source, None, _SENT_AT_ONCE_BYTES):
            pass
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        _pour(source, target)


def _pour(source: int, target: int) -> str:
    """Copies from one open file to another in one pass; returns the hash of what went through."""
    digest = xxhash.xxh3_128()
    for data in _blocks(source):
        digest.update(data)
        write_all(target, data)
    return digest.hexdigest()


def hash_file(path: str | Path) -> str:
    """Returns the xxh3-128 of a file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as reading:
        for data in _blocks(reading.fileno()):
            digest.update(data)
    return digest.hexdigest()


def _blocks(file: int) -> Iterator[memoryview]:
    """Yields the bytes of an open file, each time in the same buffer, made no larger than the file."""
    block = memoryview(bytearray(min(os.fstat(file).st_size + 1, _BLOCK_BYTES)))
    while count := os.readv(file, [block]):
        yield block[:count]


@dataclass(frozen=True)
class Tries:
    """What one try to make a part durable leaves to the next, by the names of files."""

    hashes: dict[str, str] = field(default_factory=dict)
    unsynced: set[str] = field(default_factory=set)  # their fsync failed


def make_durable(part: Path, tries: Tries) -> Part:
    """Makes the bytes of a staged part survive the machine, and writes down their hashes in `durable.json`.

    Their names become durable in the commit, which syncs every directory.

    After a failed fsync the kernel, which says it once, calls a file clean: it is never synced again but written anew,
    and its hash compared. That a file is such a one is kept in `tries`, and in the part for the next keeper.

    Raises:
        CheckpointFailed: a file is not what was staged.
        OSError: as the file system says; the caller may try again with the same `tries`.
    """
    with contextlib.suppress(CheckpointFailed):
        return read_durable(part)
    staged = _read_note(part / PART)
    if staged.boot != boot_id():
        staged = _outlived(part / FILES, staged)
    _recall(part, staged, tries)
    with _expected_in(part / FILES):
        for file in staged.files:
            if file.path in tries.unsynced:
                _write_anew(part, file, tries.hashes.get(file.path))
        _hash_and_sync(part, staged, tries)
        _check_unchanged(part / FILES, staged)
    durable = Part(
        tuple(File(file.path, file.size_bytes, tries.hashes[file.path]) for file in staged.files), staged.directories
    )
    _write_note(part / DURABLE, durable)
    with contextlib.suppress(OSError):
        os.unlink(part / UNSYNCED)
    return durable


def read_durable(part: Path) -> Part:
    """Returns what the keeper wrote down about a part.

    Raises:
        CheckpointFailed: the note is torn, or there is none.
    """
    return _read_note(part / DURABLE)


def _read_note(path: Path) -> Part:
    try:
        return Part.unseal(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        raise CheckpointFailed(f"the staged part {path.parent} is not whole: {path.name}: {error}") from error


def _outlived(files: Path, staged: Part) -> Part:
    """Returns the part as it lies there now, after its machine went down with what was not yet on the disk.

    Raises:
        CheckpointFailed: it is not what was staged, or nobody can say.
    """
    unknown = [f"{file.path} has no hash" for file in staged.files if not file.hash]
    problems = unknown or damage(files, staged.files, full=True)
    if problems:
        reason = "its bytes cannot be verified" if unknown else "not all of its bytes were on the disk"
        raise CheckpointFailed(f"{files.parent} was staged before the machine went down, and {reason}: {problems[0]}")
    # The times of files may be older than their bytes.
    now = [replace(file, mtime_ns=os.stat(f"{files}/{file.path}").st_mtime_ns) for file in staged.files]
    return replace(staged, files=tuple(now))


def _recall(part: Path, staged: Part, tries: Tries) -> None:
    """Takes over what an earlier keeper, now dead, has left to the next try."""
    tries.hashes.update({file.path: file.hash for file in staged.files if file.hash})
    try:
        unsynced = Part.unseal((part / UNSYNCED).read_bytes()).files
    except FileNotFoundError:
        return
    except ValueError:  # torn: it may be any of them
        unsynced = staged.files
    tries.unsynced.update(file.path for file in unsynced)
    for file in unsynced:
        if file.hash:
            tries.hashes.setdefault(file.path, file.hash)


def _remember(part: Path, staged: Part, tries: Tries) -> None:
    """Leaves to the next keeper, if the disk still takes it, which files are not to be synced again."""
    unsynced = [replace(f, hash=tries.hashes.get(f.path, "")) for f in staged.files if f.path in tries.unsynced]
    with contextlib.suppress(OSError):
        _write_note(part / UNSYNCED, Part(tuple(unsynced)))


def _hash_and_sync(part: Path, staged: Part, tries: Tries) -> None:
    """Hashes and syncs what has not been written anew.

    Every hash is known before the first fsync: what a file system shows of a file afterwards, if that fails, may be
    something else. Meanwhile the disk is already at work.
    """
    files = [file for file in staged.files if file.path not in tries.unsynced]
    paths = [f"{part}/{FILES}/{file.path}" for file in files]
    if staged.size_bytes < _WORTH_A_THREAD_BYTES:
        _hash_all(files, paths, tries.hashes)
        sync = _begin_to_sync(part, paths) if len(paths) >= _MANY_FILES else os.fsync
    else:
        with ThreadPoolExecutor(1) as pool:
            beginning = pool.submit(_begin_to_sync, part, paths)
            _hash_all(files, paths, tries.hashes)
            sync = beginning.result()
    for file, path in zip(files, paths, strict=True):
        opened = os.open(path, os.O_RDONLY)
        try:
            sync(opened)
        except OSError:
            tries.unsynced.add(file.path)
            _remember(part, staged, tries)
            raise
        finally:
            os.close(opened)


def _hash_all(files: Sequence[File], paths: Sequence[str], hashes: dict[str, str]) -> None:
    for file, path in zip(files, paths, strict=True):
        if file.path not in hashes:
            hashes[file.path] = hash_file(path)


def _begin_to_sync(part: Path, paths: Sequence[str]) -> Callable[[int], None]:
    """Has the system write files; returns what to call for each then: it waits for the file, and says how it went."""
    if len(paths) >= _MANY_FILES and sys.platform == "linux":
        with contextlib.suppress(OSError):  # about some file, perhaps not ours: each is asked by itself
            sync_filesystem(part)
            return check_written_back
    else:
        for path in paths:
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                begin_to_write_back(file.fileno())
    return os.fsync


def _check_unchanged(files: Path, staged: Part) -> None:
    """Raises CheckpointFailed for what was changed, added or removed since the part was staged."""
    for file in staged.files:
        _require_unchanged(file, os.stat(f"{files}/{file.path}"))
    added = _names_below(files).difference(file.path for file in staged.files)
    if added:
        raise CheckpointFailed(f"{min(added)} was added after its directory had been reported: write it before")


def _require_unchanged(file: File, status: os.stat_result) -> None:
    if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise CheckpointFailed(
            f"{file.path} was still written to after it had been reported: close every file before you call report"
        )


@contextlib.contextmanager
def _expected_in(files: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        name = os.path.relpath(error.filename, files)
        raise CheckpointFailed(f"{name} was removed after it had been reported") from error


def _names_below(folder: Path) -> set[str]:
    cut = len(str(folder)) + 1
    return {f"{at}/{name}"[cut:] for at, _, names in os.walk(folder) for name in names}


def _write_anew(part: Path, file: File, digest: str | None) -> None:
    """Writes a file a second time, beside the user's files, and puts it in the first one's place."""
    if digest is None:
        raise CheckpointFailed(
            f"{file.path} could not be written, and what it was before is not known: its fsync failed"
        )
    path, fresh = part / FILES / file.path, part / _ANEW
    fresh.unlink(missing_ok=True)
    with open(path, "rb", buffering=0) as reading, open(fresh, "xb", buffering=0) as writing:
        status = os.fstat(reading.fileno())
        _require_unchanged(file, status)
        os.fchmod(writing.fileno(), stat.S_IMODE(status.st_mode))
        if _pour(reading.fileno(), writing.fileno()) != digest:
            raise CheckpointFailed(f"{file.path} could not be written: after a failed fsync its bytes are not the same")
        os.utime(writing.fileno(), ns=(status.st_atime_ns, file.mtime_ns))  # else its owner would be blamed
        os.fsync(writing.fileno())
    os.replace(fresh, path)
    sync_directory(path.parent)  # not left to the commit: the old file must never come back under a durable note


def damage(directory: Path, files: Sequence[File], *, full: bool) -> list[str]:
    """Compares files with what a manifest says of them; returns what is wrong, in words, nothing if they are whole.

    Args:
        full: compare hashes too, not only sizes.

    Raises:
        StorageError: a file is there and cannot be read now: nobody knows whether it is whole.
    """

    def look(file: File) -> str | None:
        path = f"{directory}/{file.path}"
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return f"{file.path} is not a file"
            if status.st_size != file.size_bytes:
                return f"{file.path} has {status.st_size} bytes, not {file.size_bytes}"
            if full and hash_file(path) != file.hash:
                return f"{file.path} has other bytes than were committed"
        except (FileNotFoundError, NotADirectoryError):
            return f"{file.path} is missing"
        except OSError as error:
            raise storage_error("read", path, error) from error
        return None

    size_bytes = sum(file.size_bytes for file in files) if full else 0
    return [problem for problem in _in_threads(look, files, size_bytes) if problem]
