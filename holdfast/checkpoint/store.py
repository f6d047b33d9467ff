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
from holdfast.storage.local import LocalStorage, rename_exclusive, sync_directory, write_all

STAGING = ".staging"
_FORGOTTEN = f"{STAGING}/forgotten"
_PREFIX = "checkpoint_"


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
    def sweep(self, keep: Iterable[str]) -> None: ...


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
        """
        try:
            return self._layout.damage(self.manifest(number), full=full)
        except NotFound:
            return [f"{checkpoint_name(number)} is missing, or its manifest is"]
        except CheckpointDamaged as error:
            return [str(error)]
        except OSError as error:
            return [f"the manifest of {checkpoint_name(number)} cannot be read ({error.strerror})"]

    def in_use(self, numbers: Iterable[int]) -> frozenset[int]:
        """Returns those of `numbers` that somebody has open in `as_directory()` now."""
        return frozenset(number for number in numbers if self._layout.in_use(number))

    def remove(self, number: int) -> bool:
        """Removes a checkpoint that the journal has forgotten: first its name, then its bytes; absent is no error.

        Returns:
            False when somebody has it open: to be tried again later.
        """
        return self._layout.remove(number)

    def sweep(self, keep: Iterable[str] = ()) -> None:
        """Removes what is staged, but for the attempts `<epoch>/<attempt>` in `keep`. The journal's owner only."""
        self._layout.sweep(keep)

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
        try:
            return (self._at(number) / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"there is no checkpoint at {self._at(number)}") from error

    def numbers(self) -> list[int]:
        return [number for number in self.taken() if (self._at(number) / MANIFEST).exists()]

    def taken(self) -> list[int]:
        names = os.listdir(self._root) if self._root.exists() else []
        return sorted(number for name in names if (number := _number_of(name)) is not None)

    def damage(self, manifest: Manifest, *, full: bool) -> list[str]:
        at = self._at(manifest.number)
        missing = [f"the directory {name} is missing" for name in manifest.directories if not (at / name).is_dir()]
        return missing + damage(at, manifest.files, full=full)

    def in_use(self, number: int) -> bool:
        with _held(self._at(number) / MANIFEST) as alone:
            return not alone

    def remove(self, number: int) -> bool:
        away = self._root / _FORGOTTEN / checkpoint_name(number)
        with _held(self._at(number) / MANIFEST) as alone:
            if not alone:
                return False
            shutil.rmtree(away, ignore_errors=True)  # half removed before
            away.parent.mkdir(parents=True, exist_ok=True)
            # Renamed first, and while no reader can come: it finds all of a checkpoint or nothing, never half of it.
            with suppress(FileNotFoundError):
                rename_exclusive(self._at(number), away)
                sync_directory(self._root)
        shutil.rmtree(away, ignore_errors=True)
        return True

    def sweep(self, keep: Iterable[str]) -> None:
        staging = self._root / STAGING
        kept = set(keep)
        for epoch in _folders_in(staging):
            for attempt in _folders_in(epoch):
                if f"{epoch.name}/{attempt.name}" not in kept:
                    shutil.rmtree(attempt, ignore_errors=True)
            # Never a folder of a live attempt, were it empty: its workers are about to stage there.
            if not any(name.startswith(f"{epoch.name}/") for name in kept):
                shutil.rmtree(epoch, ignore_errors=True)
        if not kept:
            shutil.rmtree(staging, ignore_errors=True)


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except FileNotFoundError:
        return []


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
    first = parts[ranks[0]] / FILES
    if first.exists():
        os.rename(first, target)  # the whole directory: most checkpoints have one part
    for path, (rank, file) in merged.files.items():
        if rank != ranks[0]:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                os.rename(parts[rank] / FILES / path, target / path)
        if not os.path.lexists(f"{target}/{path}"):
            raise CheckpointFailed(f"{path}, staged by rank {rank} with {file.size_bytes} bytes, is gone")


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

    def sweep(self, keep: Iterable[str]) -> None:
        """Removes what commits that never came to their manifest have uploaded."""
        whole = set(self.numbers())
        for entry in list(self._storage.list()):
            number = _number_of(entry.path.split("/")[0])
            if number is not None and number not in whole:
                self._storage.delete(entry.path)
