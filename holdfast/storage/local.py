"""A directory as a storage, and the system calls that a commit is made of.

The functions of this module raise `OSError`, each is one call of the system; `LocalStorage` raises `StorageError`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from holdfast.errors import AlreadyExists, NotFound, StorageError
from holdfast.storage.base import Entry, Promises, Storage, checked

_TRANSIENT = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}
_TEMPORARY = re.compile(r"\.tmp-(\d+)-[0-9a-f]{16}")
_CHUNK_BYTES = 1 << 20
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_FICLONE = 0x40049409  # linux/fs.h
_WAIT_BEFORE = 1  # SYNC_FILE_RANGE_WAIT_BEFORE
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_NO_SUCH_RENAME = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


class LocalStorage:
    """A directory. It is made by the first write, and may be on a shared file system.

    Links to files are listed as files; links to folders are not followed.
    """

    promises = Promises(create_exclusive=True, atomic_rename=True, list_after_write=True)

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.abspath(root))

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.root)!r})"

    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> None:
        target = self.root / checked(path)
        with translated("write", target):
            with _new_file_beside(target) as (file, temporary):
                write_all(file, data)
                os.fsync(file)
                _place(temporary, target, if_absent=if_absent)
            sync_directory(target.parent)

    def upload(self, source: Path, path: str) -> None:
        self._put_copy(source, self.root / checked(path))

    def get(self, path: str) -> bytes:
        source = self.root / checked(path)
        with translated("read", source), _opened(source) as file:
            return b"".join(iter(lambda: os.read(file, _CHUNK_BYTES), b""))

    def download(self, path: str, target: Path) -> None:
        source = self.root / checked(path)
        with translated("read", source), _opened(source) as file, translated("write", target):
            _write_copy(file, Path(target), sync=False)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        folder = self.root / checked(prefix) if prefix else self.root
        with translated("list", folder):
            yield from _files_below(folder, f"{prefix}/" if prefix else "")

    def delete(self, path: str) -> None:
        target = self.root / checked(path)
        with translated("delete", target), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(target)
            sync_directory(target.parent)

    def copy(self, source: str, target: str) -> None:
        self._put_copy(self.root / checked(source), self.root / checked(target))

    def _put_copy(self, source: Path, target: Path) -> None:
        with translated("read", source), _opened(source) as file, translated("write", target):
            _write_copy(file, target, sync=True)
            sync_directory(target.parent)


def storage_error(tried: str, path: str | Path, error: OSError) -> StorageError:
    """Returns what to raise `from` this error of the system."""
    transient = error.errno in _TRANSIENT
    advice = "; free some space there and try again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    return StorageError(f"could not {tried} {path}: {error.strerror} ({name}){advice}", transient=transient)


def is_temporary(name: str) -> bool:
    """Whether this is the name of a file that is still being written, or was when its writer died."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_temporaries(folder: Path) -> None:
    """Removes what dead writers left in `folder`; for its owner only, since pids of other machines look dead."""
    for name in os.listdir(folder):
        match = _TEMPORARY.fullmatch(name)
        if match and not pid_exists(int(match[1])):
            with suppress(FileNotFoundError):
                os.unlink(folder / name)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Writes `data` to a descriptor: one `write`, and more only if that took less."""
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, memoryview(data)[written:])


def share_blocks(source: int, target: int) -> bool:
    """Makes an open file share the blocks of another, copy on write; False where the file system cannot."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def sync_data(file: int) -> None:
    """Makes the bytes of an open file durable."""
    getattr(os, "fdatasync", os.fsync)(file)  # macOS has no fdatasync


def sync_file(path: str | Path) -> None:
    """Makes a file durable, whoever wrote it."""
    _sync_path(path, os.O_RDONLY)


def sync_directory(path: str | Path) -> None:
    """Makes the names in a directory durable."""
    _sync_path(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_filesystem(path: str | Path) -> None:
    """Makes everything on the file system of `path` durable: cheaper than a sync of each of many files."""
    file = os.open(path, os.O_RDONLY)
    try:
        _check(_libc().syncfs(file), path)
    finally:
        os.close(file)


def begin_to_write_back(file: int) -> None:
    """Has the system begin to write an open file, if it can. Takes no error away from the fsync that is to come."""
    if sys.platform == "linux":
        _sync_file_range()(file, 0, 0, _WRITE)


def check_written_back(file: int) -> None:
    """Raises what went wrong when the system wrote an open file; to be called after `sync_filesystem`.

    That call reports no lost write before Linux 5.8, and later none that another call of it has reported already.
    """
    try:
        _check(_sync_file_range()(file, 0, 0, _WAIT_BEFORE), f"/proc/self/fd/{file}")
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        os.fsync(file)


def rename_exclusive(source: str | Path, target: str | Path) -> None:
    """Renames a file or directory to a name that must not exist.

    Raises:
        FileExistsError: there is something, were it an empty directory; nothing was changed.
    """
    try:
        _rename_noreplace(source, target)
    except OSError as error:
        if error.errno not in _NO_SUCH_RENAME:
            raise
        # Not exclusive: what appears between these two lines is lost if it is a file or an empty directory. It is
        # all that such a file system (NFS) offers for directories; the journal's one owner is the real protection.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(source, target)


def make_directories(path: str | Path) -> None:
    """Makes a directory and its missing parents, each durable."""
    path = Path(path)
    if path.is_dir():
        return
    if path.parent != path:
        make_directories(path.parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    sync_directory(path.parent)  # also when another process made it meanwhile: it may not have come this far


@contextmanager
def translated(tried: str, path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(tried, path, error) from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Opens a file to read; a folder is nothing that could be read."""
    try:
        file = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is nothing at {path}") from error
    try:
        if path.is_dir():
            raise NotFound(f"there is a folder at {path}, not a file")
        yield file
    finally:
        os.close(file)


@contextmanager
def _new_file_beside(target: Path) -> Iterator[tuple[int, Path]]:
    """Opens a new file under a temporary name, which is gone afterwards."""
    temporary = target.parent / f".tmp-{os.getpid()}-{os.urandom(8).hex()}"
    file = _create(temporary)
    try:
        yield file, temporary
    finally:
        os.close(file)
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        make_directories(path.parent)
        return os.open(path, flags, 0o666)


def _place(temporary: Path, target: Path, *, if_absent: bool) -> None:
    if not if_absent:
        os.replace(temporary, target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError as error:
        # NFS repeats a call whose answer was lost, and then reports the link that the first call made.
        if os.stat(temporary).st_nlink < 2:
            raise AlreadyExists(f"there is something at {target} already") from error


def _write_copy(source: int, target: Path, *, sync: bool) -> None:
    with _new_file_beside(target) as (file, temporary):
        for chunk in iter(lambda: os.read(source, _CHUNK_BYTES), b""):
            write_all(file, chunk)
        if sync:
            os.fsync(file)
        os.replace(temporary, target)


def _files_below(folder: Path, prefix: str) -> Iterator[Entry]:
    for item in _in_order_of_paths(folder):
        path = prefix + item.name
        if item.is_dir(follow_symlinks=False):
            yield from _files_below(folder / item.name, path + "/")
        elif item.is_file() and not is_temporary(item.name):
            with suppress(FileNotFoundError):  # deleted meanwhile
                yield Entry(path, item.stat().st_size)


def _in_order_of_paths(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            # With its slash, since `a-b` comes before `a/b`.
            return sorted(items, key=lambda item: item.name + "/" * item.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _sync_path(path: str | Path, flags: int) -> None:
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Which start of which machine this is; on systems that do not say, only which machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except FileNotFoundError:
        return os.uname().nodename


def pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _rename_noreplace(source: str | Path, target: str | Path) -> None:
    call = getattr(_libc(), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    status = call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
    _check(status, source, target)


def _check(status: int, path: str | Path, second_path: str | Path | None = None) -> None:
    if status != 0:
        import ctypes

        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path), None, second_path and str(second_path))


@lru_cache(maxsize=1)
def _sync_file_range() -> Any:
    import ctypes

    call = _libc().sync_file_range
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


@lru_cache(maxsize=1)
def _libc() -> Any:
    import ctypes  # here, since it costs 10 ms and most processes never commit

    return ctypes.CDLL(None, use_errno=True)


_: type[Storage] = LocalStorage
