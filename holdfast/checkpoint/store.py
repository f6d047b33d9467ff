"""The checkpoints of one run: commit, open, list, verify, forget. The only writer of manifests.

A commit merges the parts of all ranks into one directory and publishes it under its number. Every step can be repeated
after a crash, by this driver or by the next, and does no harm when it was done before.

On a directory (a storage that promises to rename), in this order, which must not change:

1. every part's files are moved into `merged/`, in the order of ranks (the bytes are durable: the keeper's work);
2. the manifest is written into `merged/` and synced;
3. every directory of `merged/` is synced, bottom up;
4. `merged/` is renamed to its final name, which must not exist: this is the commit;
5. the folder that holds it is synced.

On an object store the files are uploaded under the final name, and the manifest last, if absent: this is the commit.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.checkpoint.checkpoint import CANNOT_LOCK, MANIFEST, Checkpoint
from holdfast.checkpoint.manifest import File, Manifest, Merge, Origin, listed, merge
from holdfast.checkpoint.transfer import FILES, damage, read_durable
from holdfast.errors import AlreadyExists, CheckpointDamaged, CheckpointError, CheckpointFailed, NotFound
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage, rename_exclusive, sync_directory, translated, write_all

STAGING = ".staging"
_PREFIX = "checkpoint_"
_FORGOTTEN = ".forgotten_"  # before the name of a checkpoint that is being removed


def checkpoint_name(number: int) -> str:
    """The name of the directory of a checkpoint: `checkpoint_000007`."""
    return f"{_PREFIX}{number:06d}"


def _number_of(name: str) -> int | None:
    digits = name.removeprefix(_PREFIX)
    return int(digits) if digits.isdecimal() and name == checkpoint_name(int(digits)) else None


@dataclass(frozen=True)
class Commit:
    """What is to become a checkpoint.

    Attributes:
        number: its number, given by the journal and to nothing else.
        origin: the report it comes from.
        parts: rank -> the directory of that rank's staged part, made durable.
        metrics: what was reported with it.
    """

    number: int
    origin: Origin
    parts: Mapping[int, Path]
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Committed:
    """A checkpoint that exists now, and what ranks gave differently, in words."""

    manifest: Manifest
    conflicts: tuple[str, ...] = ()


class _Layout(Protocol):
    """How checkpoints lie on one kind of storage."""

    def publish(self, commit: Commit, merged: Merge, manifest: Manifest) -> None: ...
    def settle(self) -> None: ...
    def manifest(self, number: int) -> bytes: ...
    def numbers(self) -> list[int]: ...
    def taken(self) -> list[int]: ...
    def damage(self, manifest: Manifest, *, full: bool) -> list[str]: ...
    def in_use(self, number: int) -> bool: ...
    def remove(self, number: int) -> bool: ...
    def sweep(self, epoch: int, attempt: int | None) -> None: ...


class CheckpointStore:
    """The checkpoints below one folder of a storage.

    Args:
        storage: where they are.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._layout: _Layout = _Directories(storage) if isinstance(storage, LocalStorage) else _Objects(storage)

    def commit(self, commit: Commit) -> Committed:
        """Makes staged, durable parts a checkpoint; returns at once what is there if it was done before.

        Raises:
            AlreadyExists: another checkpoint has this number.
            CheckpointFailed: what was staged is not whole.
            StorageError, OSError: as the storage says; the same commit may be tried again.
        """
        there = self._found(commit)
        if there is not None:
            self._layout.settle()
            return Committed(there)
        merged = merge({rank: read_durable(part) for rank, part in commit.parts.items()})
        manifest = Manifest(
            number=commit.number,
            origin=commit.origin,
            files=listed([file for _, file in merged.files.values()]),
            directories=merged.directories,
            metrics=commit.metrics,
            time=time.time(),
        )
        try:
            self._layout.publish(commit, merged, manifest)
        except (AlreadyExists, FileNotFoundError):  # perhaps it was done, and only the answer was lost: look
            there = self._found(commit)
            if there is None:
                raise
            manifest = there
        self._layout.settle()
        return Committed(manifest, merged.conflicts)

    def _found(self, commit: Commit) -> Manifest | None:
        """The manifest of this very commit, if it was made before."""
        try:
            there = self.manifest(commit.number)
        except NotFound:
            return None
        if there.origin != commit.origin:
            raise AlreadyExists(
                f"{checkpoint_name(commit.number)} exists and comes from another report: {there.origin}"
            )
        return there

    def manifest(self, number: int) -> Manifest:
        """Returns the manifest of a checkpoint.

        Raises:
            NotFound: there is no such checkpoint.
            CheckpointDamaged: its manifest is not what was written.
            CheckpointError: it was written by a newer holdfast.
            StorageError: it cannot be read now.
        """
        manifest = Manifest.unseal(self._layout.manifest(number), checkpoint_name(number))
        if manifest.number != number:
            raise CheckpointDamaged(f"{checkpoint_name(number)} holds the manifest of number {manifest.number}")
        return manifest

    def open(self, number: int) -> Checkpoint:
        """Returns a reference to a checkpoint; does not look whether it is there."""
        if not isinstance(self.storage, LocalStorage):
            raise CheckpointError(
                f"checkpoints on {self.storage.url} cannot be opened yet: only those of a directory can"
            )
        return Checkpoint(self.storage.root / checkpoint_name(number))

    def taken(self) -> list[int]:
        """Returns the numbers under which there is anything at all, ascending."""
        return self._layout.taken()

    def verify(self, number: int, *, full: bool = True) -> list[str]:
        """Returns what is wrong with a checkpoint, in words; nothing if it is whole.

        Args:
            full: compare every file's hash; otherwise only sizes.

        Raises:
            CheckpointError: it was written by a newer holdfast.
            StorageError: it cannot be read now: nobody knows whether it is whole.
        """
        try:
            return self._layout.damage(self.manifest(number), full=full)
        except NotFound:
            return [f"{checkpoint_name(number)} is missing, or its manifest is"]
        except CheckpointDamaged as error:
            return [str(error)]

    def in_use(self, numbers: Iterable[int]) -> frozenset[int]:
        """Returns those of `numbers` that somebody has open in `as_directory()` now."""
        return frozenset(number for number in numbers if self._layout.in_use(number))

    def remove(self, number: int) -> bool:
        """Removes a checkpoint that the journal has forgotten: first its name, then its bytes; absent is no error.

        Returns:
            False when somebody has it open: to be tried again later.
        """
        return self._layout.remove(number)

    def discard(self, number: int, origin: Origin) -> bool:
        """Removes what an abandoned report has left under its number; a checkpoint from elsewhere is left alone.

        Returns:
            False when somebody has it open: to be tried again later.

        Raises:
            StorageError: it cannot be read now, and so nobody knows where it comes from.
        """
        with suppress(NotFound, CheckpointError):  # who cannot say where it comes from is not ours
            if self.manifest(number).origin == origin:
                return self.remove(number)
        return True

    def sweep(self, epoch: int, attempt: int | None) -> None:
        """Removes what was staged before an attempt, or, when it is None, in this epoch and all before it.

        For the journal's owner, as often and as late as it likes: nothing of a later attempt is touched.
        """
        self._layout.sweep(epoch, attempt)

    def list(self) -> list[int]:  # the last: below it `list` is no type
        """Returns the numbers under which there is a manifest, whole or not, ascending."""
        return self._layout.numbers()


class _Directories:
    """Checkpoints as directories of a local file system."""

    def __init__(self, storage: LocalStorage) -> None:
        self._root = storage.root

    def _at(self, number: int) -> Path:
        return self._root / checkpoint_name(number)

    def publish(self, commit: Commit, merged: Merge, manifest: Manifest) -> None:
        target = next(iter(commit.parts.values())).parent / "merged"
        _gather(commit.parts, merged, target)
        for folder in merged.directories:
            (target / folder).mkdir(parents=True, exist_ok=True)
        _write_durably(target / MANIFEST, manifest.seal())
        for folder, _, _ in os.walk(target, topdown=False):
            sync_directory(folder)
        try:
            rename_exclusive(target, self._at(commit.number))
        except FileExistsError as error:
            raise AlreadyExists(f"{self._at(commit.number)} exists, without a manifest: move it away") from error

    def settle(self) -> None:
        sync_directory(self._root)  # also of a commit that was made before: its driver may have died before this

    def manifest(self, number: int) -> bytes:
        path = self._at(number) / MANIFEST
        with translated("read", path):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotFound(f"there is no checkpoint at {path.parent}") from error
            except IsADirectoryError as error:
                raise CheckpointDamaged(f"the manifest of {checkpoint_name(number)} is a directory") from error

    def numbers(self) -> list[int]:
        return [number for number in self.taken() if _mode(self._at(number) / MANIFEST)]

    def taken(self) -> list[int]:
        with translated("list", self._root), suppress(FileNotFoundError):
            names = os.listdir(self._root)
            return sorted(number for name in names if (number := _number_of(name)) is not None)
        return []

    def damage(self, manifest: Manifest, *, full: bool) -> list[str]:
        at = self._at(manifest.number)
        missing = [name for name in manifest.directories if not stat.S_ISDIR(_mode(at / name))]
        return [f"the directory {name} is missing" for name in missing] + damage(at, manifest.files, full=full)

    def in_use(self, number: int) -> bool:
        with _held(self._at(number) / MANIFEST) as alone:
            return not alone

    def remove(self, number: int) -> bool:
        away = self._root / (_FORGOTTEN + checkpoint_name(number))  # beside it: a full disk takes no new folder
        with _held(self._at(number) / MANIFEST) as alone:
            if not alone:
                return False
            shutil.rmtree(away, ignore_errors=True)  # half removed before
            # Renamed first, and while no reader can come: it finds all of a checkpoint or nothing, never half of it.
            with suppress(FileNotFoundError):
                rename_exclusive(self._at(number), away)
                sync_directory(self._root)
        shutil.rmtree(away, ignore_errors=True)
        return True

    def sweep(self, epoch: int, attempt: int | None) -> None:
        first = (epoch + 1, 0) if attempt is None else (epoch, attempt)  # to be left, and all after it
        staging = self._root / STAGING
        for of_epoch, in_epoch in _numbered(staging):
            for of_attempt, in_attempt in _numbered(in_epoch):
                if (of_epoch, of_attempt) < first:
                    shutil.rmtree(in_attempt, ignore_errors=True)
            if of_epoch < first[0]:
                _remove_empty(in_epoch)
        _remove_empty(staging)
        for name in _names_in(self._root):
            if name.startswith(_FORGOTTEN) and _number_of(name.removeprefix(_FORGOTTEN)) is not None:
                shutil.rmtree(self._root / name, ignore_errors=True)  # whose owner died in `remove`


def _mode(path: Path) -> int:
    """What is there, as stat says; 0: nothing. Not `exists`, for which what cannot be looked at is not there."""
    with translated("look at", path), suppress(FileNotFoundError, NotADirectoryError):
        return os.stat(path).st_mode
    return 0


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """The folders with a number for a name; others are not ours."""
    names = [name for name in _names_in(folder) if name.isdecimal() and name == str(int(name))]
    found = [(int(name), folder / name) for name in names]
    return [(number, path) for number, path in found if path.is_dir() and not path.is_symlink()]


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # there is none, or the next sweep will see
        return []


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty, or gone
        os.rmdir(folder)


@contextmanager
def _held(manifest: Path) -> Iterator[bool]:
    """Whether nobody reads the checkpoint of this manifest: `as_directory` holds a shared lock on it. Nobody begins
    while the block runs."""
    try:
        file = os.open(manifest, os.O_RDWR)  # to write: NFS gives no exclusive lock to who can only read
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    except OSError:  # nobody can say
        yield False
        return
    try:
        yield _lock(file)
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in CANNOT_LOCK  # there `as_directory` has warned its reader
    return True


def _write_durably(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # not written over: after a failed fsync its file is not to be trusted
    with open(path, "xb", buffering=0) as file:
        write_all(file.fileno(), data)
        os.fsync(file.fileno())


def _gather(parts: Mapping[int, Path], merged: Merge, target: Path) -> None:
    """Moves the files of all parts into `target`; what an earlier, interrupted call has moved is left where it is."""
    ranks = sorted(parts)
    with suppress(FileNotFoundError):
        os.rename(parts[ranks[0]] / FILES, target)  # the whole directory: most checkpoints have one part
    for path, (rank, file) in merged.files.items():
        if rank != ranks[0]:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                os.rename(parts[rank] / FILES / path, target / path)
        try:
            os.lstat(f"{target}/{path}")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointFailed(f"{path}, staged by rank {rank} with {file.size_bytes} bytes, is gone") from error


class _Objects:
    """Checkpoints as objects with a common prefix."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def publish(self, commit: Commit, merged: Merge, manifest: Manifest) -> None:
        name = checkpoint_name(commit.number)
        for path, (rank, _) in merged.files.items():
            self._storage.upload(commit.parts[rank] / FILES / path, f"{name}/{path}")
        self._storage.put(f"{name}/{MANIFEST}", manifest.seal(), if_absent=True)

    def settle(self) -> None:
        """What was put is durable."""

    def manifest(self, number: int) -> bytes:
        return self._storage.get(f"{checkpoint_name(number)}/{MANIFEST}")

    def numbers(self) -> list[int]:
        names = [entry.path.split("/") for entry in self._storage.list()]
        found = (_number_of(name[0]) for name in names if len(name) == 2 and name[1] == MANIFEST)
        return sorted(number for number in found if number is not None)

    def taken(self) -> list[int]:
        found = {_number_of(entry.path.split("/")[0]) for entry in self._storage.list()}
        return sorted(number for number in found if number is not None)

    def damage(self, manifest: Manifest, *, full: bool) -> list[str]:
        return [problem for file in manifest.files for problem in self._damage_of(manifest.number, file, full=full)]

    def _damage_of(self, number: int, file: File, *, full: bool) -> list[str]:
        with tempfile.TemporaryDirectory(prefix="holdfast-verify-") as folder:
            copy = Path(folder) / file.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            with suppress(NotFound):
                self._storage.download(f"{checkpoint_name(number)}/{file.path}", copy)
            return damage(Path(folder), [file], full=full)

    def in_use(self, number: int) -> bool:
        return False

    def remove(self, number: int) -> bool:
        name = checkpoint_name(number)
        self._storage.delete(f"{name}/{MANIFEST}")  # first: from here on the checkpoint does not exist
        for entry in list(self._storage.list(name)):
            self._storage.delete(entry.path)
        return True

    def sweep(self, epoch: int, attempt: int | None) -> None:
        """Removes what commits that never came to their manifest have uploaded."""
        whole = set(self.numbers())
        for entry in list(self._storage.list()):
            number = _number_of(entry.path.split("/")[0])
            if number is not None and number not in whole:
                self._storage.delete(entry.path)
