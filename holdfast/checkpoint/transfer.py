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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast.checkpoint.checkpoint import MANIFEST
from holdfast.checkpoint.manifest import File, Part
from holdfast.errors import CheckpointFailed
from holdfast.storage.local import sync_directory, sync_file, sync_filesystem

PART = "part.json"
DURABLE = "durable.json"
FILES = "files"

_BLOCK_BYTES = 1 << 20  # stays in the processor's cache between being read, hashed and written
_MANY_FILES = 32  # from here on one syncfs is faster than an fsync for each
_THREADS = 2
_FICLONE = 0x40049409  # linux/fs.h: share the extents of another file, copy on write


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
        found = list(_walk(source))
        if give and not any(entry.is_shared for entry in found):
            staged = _described(found)
            (part / PART).write_bytes(staged.seal())
            if _take(source, part / FILES):  # last: from here on `source` is no more, and nothing may fail
                return staged
        staged = _copied(source, found, part / FILES)
        (part / PART).write_bytes(staged.seal())
    except BaseException:
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


def _walk(folder: Path, prefix: str = "") -> Iterator[_Found]:
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        name = prefix + entry.name
        if name == MANIFEST:
            continue  # of the checkpoint these files were once taken from
        status = entry.stat()
        if stat.S_ISDIR(status.st_mode):
            below = list(_walk(Path(entry.path), name + "/"))
            yield from below
            if not below or entry.is_symlink():
                yield _Found(name, status, entry.is_symlink())
        elif stat.S_ISREG(status.st_mode):
            yield _Found(name, status, entry.is_symlink())
        else:
            raise CheckpointFailed(f"{entry.path} is neither a file nor a directory: it cannot be kept; remove it")


def _take(source: Path, target: Path) -> bool:
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    with contextlib.suppress(OSError):
        (target / MANIFEST).unlink()  # of the checkpoint these files were once taken from; a commit would write over it
    return True


def _described(found: Iterable[_Found]) -> Part:
    entries = list(found)
    files = tuple(File(e.name, e.status.st_size, "", e.status.st_mtime_ns) for e in entries if e.is_file)
    return Part(files, tuple(e.name for e in entries if not e.is_file))


def _copied(source: Path, found: Sequence[_Found], target: Path) -> Part:
    target.mkdir()
    for folder in sorted({os.path.dirname(e.name) for e in found} | {e.name for e in found if not e.is_file}):
        (target / folder).mkdir(parents=True, exist_ok=True)
    names = [entry.name for entry in found if entry.is_file]
    copies = _in_threads(lambda name: _copy_file(source / name, target / name, name), names, _bytes_of(found))
    empty = tuple(e.name for e in found if not e.is_file and not any((target / e.name).iterdir()))
    return Part(tuple(copies), empty)


def _bytes_of(found: Iterable[_Found]) -> int:
    return sum(entry.status.st_size for entry in found if entry.is_file)


def _in_threads(work: Callable[[str], File], names: Sequence[str], size_bytes: int) -> list[File]:
    if len(names) < 2 or size_bytes < 64 * _BLOCK_BYTES:
        return [work(name) for name in names]  # a thread would cost more than it saves
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(work, names))


def _copy_file(source: Path, target: Path, name: str) -> File:
    """Copies one file; hashes it on the way unless the file system can share its blocks."""
    with open(source, "rb", buffering=0) as reading, open(target, "xb", buffering=0) as writing:
        before = os.fstat(reading.fileno())
        os.fchmod(writing.fileno(), stat.S_IMODE(before.st_mode) | stat.S_IRUSR | stat.S_IWUSR)
        digest = "" if _share_blocks(reading.fileno(), writing.fileno()) else _pour(reading.fileno(), writing.fileno())
        after, copy = os.fstat(reading.fileno()), os.fstat(writing.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or copy.st_size != after.st_size:
        raise CheckpointFailed(f"{name} changed while it was read: close every file before you report its directory")
    return File(name, copy.st_size, digest, copy.st_mtime_ns)


def _share_blocks(source: int, target: int) -> bool:
    import fcntl

    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:  # another file system, or one that cannot
        return False
    return True


def _pour(source: int, target: int) -> str:
    """Copies from one open file to another in one pass; returns the hash of what went through."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK_BYTES))
    while count := os.readv(source, [block]):
        digest.update(block[:count])
        written = 0
        while written < count:
            written += os.write(target, block[written:count])
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Returns the xxh3-128 of a file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with open(path, "rb", buffering=0) as reading:
        while count := reading.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def make_durable(part: Path, known: dict[str, str], *, anew: bool = False) -> Part:
    """Makes the files of a staged part survive the machine, and writes down their hashes in `durable.json`.

    Args:
        part: the part's directory.
        known: file name -> hash, kept by the caller from one try to the next.
        anew: an fsync of this part has failed before. The kernel reports a lost write once and then calls the file
            clean, so the file is written anew and its hash compared.

    Raises:
        CheckpointFailed: a file is not what was staged.
        OSError: as the file system says; the caller may try again, `anew`.
    """
    with contextlib.suppress(CheckpointFailed):
        return read_durable(part)
    staged, files = Part.unseal((part / PART).read_bytes()), part / FILES
    if anew:
        for file in staged.files:
            _write_anew(files / file.path, known.get(file.path) or file.hash)
    with ThreadPoolExecutor(_THREADS) as pool:
        syncing = None if anew else pool.submit(_sync_all, files, staged)
        hashed = list(pool.map(lambda file: _hashed(files, file, known), staged.files))
        if syncing is not None:
            syncing.result()
    for file in staged.files if not anew else ():
        _check_unchanged(files / file.path, file)
    durable = Part(tuple(hashed), staged.directories)
    _sync_folders(files)
    _replace(part / DURABLE, durable.seal())
    return durable


def read_durable(part: Path) -> Part:
    """Returns what the keeper wrote down about a part.

    Raises:
        CheckpointFailed: the note is torn, or there is none.
    """
    try:
        return Part.unseal((part / DURABLE).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointFailed(f"the staged part {part} is not whole: {error}") from error


def _hashed(files: Path, file: File, known: dict[str, str]) -> File:
    digest = file.hash or known.get(file.path) or hash_file(files / file.path)
    known[file.path] = digest
    return File(file.path, file.size_bytes, digest)


def _check_unchanged(path: Path, file: File) -> None:
    status = os.stat(path)
    if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise CheckpointFailed(
            f"{file.path} was still written to after it had been reported: close every file before you call report"
        )


def _sync_all(files: Path, staged: Part) -> None:
    if len(staged.files) >= _MANY_FILES:
        sync_filesystem(files)
    else:
        for file in staged.files:
            sync_file(files / file.path)


def _sync_folders(files: Path) -> None:
    """Syncs every directory of a part, from the deepest up to the part itself."""
    for folder, _, _ in os.walk(files, topdown=False):
        sync_directory(Path(folder))
    sync_directory(files.parent)


def _write_anew(path: Path, digest: str) -> None:
    fresh = path.with_name(path.name + ".anew")
    with open(path, "rb", buffering=0) as reading, open(fresh, "wb", buffering=0) as writing:
        if _pour(reading.fileno(), writing.fileno()) != digest:
            raise CheckpointFailed(f"{path.name} could not be written: after a failed fsync its bytes are not the same")
        os.fsync(writing.fileno())
    os.replace(fresh, path)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(data)
    os.replace(fresh, path)


def damage(directory: Path, files: Sequence[File], *, full: bool) -> list[str]:
    """Compares files with what a manifest says of them; returns what is wrong, in words, nothing if they are whole.

    Args:
        full: compare hashes too, not only sizes.
    """

    def look(file: File) -> str | None:
        try:
            size_bytes = os.stat(directory / file.path).st_size
            if size_bytes != file.size_bytes:
                return f"{file.path} has {size_bytes} bytes, not {file.size_bytes}"
            if full and hash_file(directory / file.path) != file.hash:
                return f"{file.path} has other bytes than were committed"
        except FileNotFoundError:
            return f"{file.path} is missing"
        except OSError as error:
            return f"{file.path} cannot be read ({error.strerror})"
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        return [problem for problem in pool.map(look, files) if problem]
