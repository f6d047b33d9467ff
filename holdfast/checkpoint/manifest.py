"""The file that makes a checkpoint exist, and the notes about its parts on their way.

A *part* is what one rank gives to a checkpoint: a directory with `files/`, the user's files, and `part.json`, what they
were when they were staged. The keeper adds `durable.json`: the same with a hash for each, once the bytes are safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.checkpoint import MANIFEST, METADATA
from holdfast.errors import CheckpointDamaged, CheckpointError
from holdfast.plain import Plain
from holdfast.sealed import seal, unseal
from holdfast.storage.base import checked

VERSION = 1
UNLISTED = frozenset({MANIFEST, METADATA})  # at the top of a checkpoint; never in a manifest


@dataclass(frozen=True)
class File:
    """One file of a checkpoint; `hash` is xxh3-128 in hexadecimal, empty while it is not known."""

    path: str
    size_bytes: int
    hash: str = ""
    mtime_ns: int = 0

    def to_plain(self) -> Plain:
        row: list[Plain] = [self.path, self.size_bytes, self.hash]
        return [*row, self.mtime_ns] if self.mtime_ns else row

    @classmethod
    def from_plain(cls, row: Plain) -> File:
        path, size_bytes, digest, *mtime_ns = row
        return cls(_path(path), int(size_bytes), str(digest), *map(int, mtime_ns))


@dataclass(frozen=True)
class Part:
    """The files of one rank, and its directories that hold none.

    `boot` says which start of which machine staged them: until they are durable, they may end with it.
    """

    files: tuple[File, ...]
    directories: tuple[str, ...] = ()
    boot: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def seal(self) -> bytes:
        files = [file.to_plain() for file in self.files]
        boot = {"boot": self.boot} if self.boot else {}
        return seal({"version": VERSION, "files": files, "directories": list(self.directories), **boot})

    @classmethod
    def unseal(cls, line: bytes) -> Part:
        """Returns the part that `line` holds.

        Raises:
            ValueError: the line is not what was written, or of a format this library does not know.
        """
        with _reading():
            value = _known(unseal(line))
            files, directories = map(File.from_plain, value["files"]), map(_path, value["directories"])
            return cls(tuple(files), tuple(directories), str(value.get("boot", "")))


@dataclass(frozen=True)
class Origin:
    """Which report of which attempt of which owner a checkpoint comes from.

    The experiment's name is for people: its folder may be renamed, and what is in it comes from where it came.
    """

    experiment: str = field(compare=False)
    epoch: int
    attempt: int
    report: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of. Written once, last, and never changed."""

    number: int
    origin: Origin
    files: tuple[File, ...]
    directories: tuple[str, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    time: float = 0.0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def seal(self) -> bytes:
        return seal(
            {
                "version": VERSION,
                "number": self.number,
                "origin": vars(self.origin),
                "metrics": dict(self.metrics),
                "time": self.time,
                "files": [file.to_plain() for file in self.files],
                "directories": list(self.directories),
            }
        )

    @classmethod
    def unseal(cls, line: bytes, where: str) -> Manifest:
        """Returns the manifest that `line` holds.

        Raises:
            CheckpointDamaged: the line is not what was written.
            CheckpointError: it is of a format that this version does not know: that is no damage.
        """
        try:
            with _reading():
                value = _known(unseal(line))
                return cls(
                    number=int(value["number"]),
                    origin=Origin(**value["origin"]),
                    files=tuple(map(File.from_plain, value["files"])),
                    directories=tuple(map(_path, value["directories"])),
                    metrics=dict(value["metrics"]),
                    time=float(value["time"]),
                )
        except _UnknownFormat as error:
            raise CheckpointError(f"the manifest of {where} was written by a newer holdfast: {error}") from error
        except ValueError as error:
            raise CheckpointDamaged(f"the manifest of {where} cannot be read: {error}") from error


class _UnknownFormat(ValueError):
    """What is sealed is whole, and cannot be understood."""


@contextmanager
def _reading() -> Iterator[None]:
    """Whole lines can hold nonsense too, where somebody made them so: one kind of error for all of it."""
    try:
        yield
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not made as ours are ({type(error).__name__}: {error})") from error


def _known(value: Plain) -> dict[str, Plain]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__}, not a dict")
    if value["version"] != VERSION:
        raise _UnknownFormat(
            f"it is of format {value['version']!r}, and this version of holdfast reads format {VERSION}: "
            "use the version that wrote it"
        )
    return value


def _path(value: Plain) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a path")
    return checked(value)


@dataclass(frozen=True)
class Merge:
    """How the parts of several ranks become one directory.

    Attributes:
        files: path -> the rank it is taken from, and the file.
        conflicts: what ranks gave differently, in words.
    """

    files: Mapping[str, tuple[int, File]]
    directories: tuple[str, ...]
    conflicts: tuple[str, ...]


def merge(parts: Mapping[int, Part]) -> Merge:
    """Merges the parts of ranks: the same bytes from several are one file; else the lowest rank's is kept."""
    files: dict[str, tuple[int, File]] = {}
    folders: dict[str, int] = {}  # every folder, with the lowest rank that has it
    conflicts: list[str] = []

    def claim(path: str, rank: int, file: File | None) -> None:
        kept = next((files[taken][0] for taken in (path, *_folders_of(path)) if taken in files), None)
        if kept is None and file is not None:
            kept = folders.get(path)
        if kept is not None:
            if path not in UNLISTED and not _same(files.get(path), file):
                conflicts.append(f"{path}: rank {kept}'s was kept, rank {rank}'s is different and was dropped")
            return
        for folder in _folders_of(path):
            folders.setdefault(folder, rank)
        if file is None:
            folders.setdefault(path, rank)
        else:
            files[path] = (rank, file)

    for rank, part in sorted(parts.items()):
        for file in part.files:
            claim(file.path, rank, file)
        for folder in part.directories:
            claim(folder, rank, None)
    filled = {folder for path in (*files, *folders) for folder in _folders_of(path)}
    return Merge(files, tuple(sorted(folders.keys() - filled)), tuple(conflicts))


def _folders_of(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _same(kept: tuple[int, File] | None, file: File | None) -> bool:
    return kept is not None and file is not None and (kept[1].size_bytes, kept[1].hash) == (file.size_bytes, file.hash)


def part_directory(staging: Path, report: int, rank: int) -> Path:
    """Where rank `rank` stages what it gives to report `report`, below the staging directory of an attempt."""
    return staging / str(report) / str(rank)


def listed(files: Sequence[File]) -> tuple[File, ...]:
    """The files a manifest names."""
    return tuple(File(file.path, file.size_bytes, file.hash) for file in files if file.path not in UNLISTED)
