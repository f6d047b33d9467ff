"""A checkpoint as its user holds it: an immutable reference to a directory of files.

>>> checkpoint = Checkpoint.from_directory("/tmp/model")
>>> checkpoint
Checkpoint('/tmp/model')

Whoever reads it asks for the directory, and the files stay until the block ends:

    with checkpoint.as_directory() as directory:
        model.load_state_dict(torch.load(f"{directory}/model.pt"))
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn
from urllib.parse import unquote

from holdfast.errors import CheckpointError, CheckpointForgotten, ConfigError, StorageError
from holdfast.plain import Plain, decode, encode, plain
from holdfast.storage.local import share_blocks

MANIFEST = ".holdfast.json"  # makes the directory a committed checkpoint; a reader's lock is on it
METADATA = ".metadata.json"  # the user's notes; neither in the manifest nor verified
CANNOT_LOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # from a file system without locks
METADATA_UNFINISHED = ".metadata.json.new"  # left behind only by a process that died while it wrote notes

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Checkpoint:
    """A reference to a directory of files. It never changes, and two of the same place are equal.

    Args:
        path: the directory, or a `file://` URL of it. It need not exist yet.
        filesystem: a `pyarrow.fs` file system; only local ones can be used in this version.

    Raises:
        ConfigError: the path or the file system is not local.
    """

    __slots__ = ("_filesystem", "_path")

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        kind = "local" if filesystem is None else getattr(filesystem, "type_name", type(filesystem).__name__)
        if kind != "local":
            raise _remote(f"Checkpoint({path!r}, filesystem=<{kind}>)")
        self._path = _located(os.fsdecode(path))
        self._filesystem = filesystem

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Returns a reference to `path`. Nothing is copied, and nothing is looked at: it may be written later."""
        return cls(path)

    @property
    def path(self) -> str:
        """The directory, absolute and normalised."""
        return self._path

    @property
    def filesystem(self) -> Any:
        """The file system that was given, or None."""
        return self._filesystem

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yields the directory itself, not a copy: read it, do not change it.

        A committed checkpoint is not forgotten while the block runs.

        Raises:
            CheckpointForgotten: it was let go while it was being opened.
            CheckpointError: there is no such directory.
        """
        locked = self._lock_for_reading()
        owner = os.getpid()
        try:
            yield self._path
        finally:
            if locked is not None:
                # Closing alone would leave the lock with a child forked inside the block; a child that leaves the
                # block must not take the lock from its parent.
                if os.getpid() == owner:
                    fcntl.flock(locked, fcntl.LOCK_UN)
                os.close(locked)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copies the files to `path`, which may exist, or to a new temporary directory, and returns where they are.

        The manifest is not copied: what is made is a plain directory. Links are followed. Where the file system can
        share blocks the copy costs no space.

        Raises:
            CheckpointForgotten: the directory is gone, from the beginning or while it was copied.
            CheckpointError: the path is not a directory.
            ConfigError: the files cannot be copied to `path`.
        """
        if not os.path.lexists(self._path):
            raise self._gone()
        if path is not None:
            return self._copy_to(self._checked_target(os.path.abspath(os.fsdecode(path))))
        target = tempfile.mkdtemp(prefix=f"{os.path.basename(self._path)}_")
        try:
            return self._copy_to(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    def get_metadata(self) -> dict[str, Any]:
        """Returns the notes kept with this checkpoint; `{}` if there are none.

        Raises:
            CheckpointError: there is no such directory, or the notes cannot be read.
        """
        try:
            with open(os.path.join(self._path, METADATA), "rb") as file:
                return _notes(file.read(), self._path)
        except (FileNotFoundError, NotADirectoryError):
            self._require_directory()
            return {}

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Keeps `metadata` with this checkpoint, in place of what was there.

        Raises:
            TypeError: a value cannot be kept; the message names it.
            CheckpointError: there is no such directory.
            StorageError: it could not be written.
        """
        wanted = _plain_notes(metadata)
        with self._metadata_locked():
            self._write_metadata(wanted)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Adds `metadata` to what is kept with this checkpoint; of two processes that do, both are kept.

        Raises:
            As `set_metadata`.
        """
        wanted = _plain_notes(metadata)
        with self._metadata_locked():
            self._write_metadata({**self.get_metadata(), **wanted})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return self._path == other._path

    def __hash__(self) -> int:
        return hash(self._path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._path!r})"

    def __fspath__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} was used as a path. Open it: `with checkpoint.as_directory() as directory:` "
            "keeps the files there while they are read."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,) if self._filesystem is None else (self._path, self._filesystem)

    def _lock_for_reading(self) -> int | None:
        """Returns a descriptor that holds the shared lock, or None where there is no manifest to lock."""
        manifest = os.path.join(self._path, MANIFEST)
        try:
            descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            self._require_directory()
            return None
        try:
            _lock(descriptor, fcntl.LOCK_SH, self._path)
            if not _is_still(descriptor, manifest):
                raise self._gone()
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _copy_to(self, target: str) -> str:
        with self.as_directory() as source:
            try:
                _copy_tree(source, target, leave_out=(MANIFEST, METADATA_UNFINISHED))
            except OSError as error:
                if not os.path.lexists(source):
                    raise self._gone() from error
                raise StorageError(
                    f"{self!r} could not be copied to {target}: {error}", transient=_is_full(error)
                ) from error
            if not os.path.lexists(source):  # what was not yet listed when it was removed is missing from the copy
                raise self._gone()
        return target

    def _checked_target(self, target: str) -> str:
        if os.path.lexists(target) and not os.path.isdir(target):
            raise ConfigError(f"{self!r} cannot be copied to {target}: that is not a directory. Name another place.")
        if os.path.lexists(os.path.join(target, MANIFEST)):
            raise ConfigError(
                f"{self!r} cannot be copied to {target}: there is a committed checkpoint, and those never change. "
                "Name another place."
            )
        here, there = os.path.realpath(self._path), os.path.realpath(target)
        if os.path.commonpath([here, there]) == here:
            raise ConfigError(f"{self!r} cannot be copied to {target}: that is inside itself. Name another place.")
        return target

    @contextmanager
    def _metadata_locked(self) -> Iterator[None]:
        """Holds an exclusive lock on the notes; makes an empty file of them where there is none."""
        path = os.path.join(self._path, METADATA)
        self._require_directory()
        with self._writing():
            descriptor = _open_locked(path)
        try:
            yield
        finally:
            os.close(descriptor)

    def _write_metadata(self, metadata: Plain) -> None:
        unfinished = os.path.join(self._path, METADATA_UNFINISHED)
        with self._writing():
            with suppress(FileNotFoundError):
                os.unlink(unfinished)
            with open(unfinished, "xb") as file:
                file.write(encode(metadata))
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, os.path.join(self._path, METADATA))
            _sync_directory(self._path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._require_directory()
            raise StorageError(
                f"the metadata of {self!r} could not be written: {error}", transient=_is_full(error)
            ) from error

    def _require_directory(self) -> None:
        if os.path.isdir(self._path):
            return
        if os.path.lexists(self._path):
            raise CheckpointError(f"{self!r} cannot be opened: a checkpoint is a directory, and this is not one.")
        raise CheckpointError(
            f"{self!r} cannot be opened: there is no such directory. It was not written yet, was moved, or was let go "
            "by the retention policy; num_to_keep says how many stay."
        )

    def _gone(self) -> CheckpointForgotten:
        return CheckpointForgotten(
            f"{self!r} is gone: it was let go by the retention policy, moved or deleted. "
            "Keep more (num_to_keep), or read it inside `with checkpoint.as_directory()`."
        )


def _located(path: str) -> str:
    scheme = _SCHEME.match(path)
    if scheme is not None:
        if scheme[1].lower() != "file":
            raise _remote(f"Checkpoint({path!r})")
        host, slash, rest = path[scheme.end() :].partition("/")
        if host not in ("", "localhost"):
            raise _remote(f"Checkpoint({path!r})")
        path = unquote(slash + rest)
    if not path or "\0" in path:
        raise ConfigError(f"Checkpoint({path!r}): that is not the path of a directory.")
    # Not os.path.abspath alone: POSIX lets exactly two leading slashes stand, and they are the same place here.
    return re.sub("^//", "/", os.path.abspath(path))


def _remote(asked: str) -> ConfigError:
    return ConfigError(
        f"{asked}: only directories of this machine can be used; remote checkpoints come in a later version. "
        "Download the files and give their directory."
    )


def _lock(descriptor: int, how: int, path: str) -> None:
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
        warnings.warn(
            f"the file system of {path} has no file locks ({error.strerror}): a checkpoint there can be let go while "
            "it is read, and metadata that two processes write at once can be lost",
            stacklevel=2,
        )


def _is_still(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _open_locked(path: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, fcntl.LOCK_EX, path)
            if _is_still(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # a writer has replaced the file while we waited: lock the new one


def _plain_notes(metadata: Mapping[str, Any]) -> Plain:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict, not a {type(metadata).__name__}")
    return plain(dict(metadata), "metadata")


def _notes(data: bytes, path: str) -> dict[str, Any]:
    try:
        notes = decode(data) if data else {}  # empty: locked for the first time, not written yet
    except ValueError as error:
        raise CheckpointError(f"{path}/{METADATA} is not JSON: {error}. Mend it or delete it.") from error
    if not isinstance(notes, dict):
        raise CheckpointError(f"{path}/{METADATA} holds a {type(notes).__name__}, not a dict. Mend it or delete it.")
    return notes


def _copy_tree(source: str, target: str, leave_out: Collection[str] = ()) -> None:
    os.makedirs(target, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            if entry.name in leave_out:
                continue
            copy = _copy_tree if entry.is_dir() else _copy_file
            copy(entry.path, os.path.join(target, entry.name))
    shutil.copystat(source, target)  # last: the directory may be read-only


def _copy_file(source: str, target: str) -> None:
    if not stat.S_ISREG(os.stat(source).st_mode):
        raise shutil.SpecialFileError(f"{source} is not a file")
    # Not overwritten in place: a file that is there may be a link to the one that is copied.
    with suppress(FileNotFoundError):
        os.unlink(target)
    if not _clone_file(source, target):
        shutil.copyfile(source, target)
    shutil.copystat(source, target)


def _clone_file(source: str, target: str) -> bool:
    with open(source, "rb") as reader, open(target, "wb") as writer:
        return share_blocks(reader.fileno(), writer.fileno())


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
