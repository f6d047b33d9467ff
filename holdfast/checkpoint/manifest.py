"""The file that makes a checkpoint exist, and the notes about its parts on their way.

A *part* is what one rank gives to a checkpoint: a directory with `files/`, the user's files, and `part.json`, what they
were when they were staged. The keeper adds `durable.json`: the same with a hash for each, once the bytes are safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.checkpoint import MANIFEST, METADATA
from holdfast.errors import CheckpointDamaged
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
        return cls(checked(path), int(size_bytes), str(digest), *map(int, mtime_ns))


@dataclass(frozen=True)
class Part:
    """The files of one rank, and its directories that hold none."""

    files: tuple[File, ...]
    directories: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def seal(self) -> bytes:
        files = [file.to_plain() for file in self.files]
        return seal({"version": VERSION, "files": files, "directories": list(self.directories)})

    @classmethod
    def unseal(cls, line: bytes) -> Part:
        """Raises ValueError when the line is torn or of a version this library does not know."""
        value = _known(unseal(line))
        return cls(tuple(map(File.from_plain, value["files"])), tuple(map(checked, value["directories"])))


@dataclass(frozen=True)
class Origin:
    """Which report of which attempt of which owner a checkpoint comes from."""

    experiment: str
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
            CheckpointDamaged: the line is not what was written, or of a version this library does not know.
        """
        try:
            value = _known(unseal(line))
            return cls(
                number=int(value["number"]),
                origin=Origin(**value["origin"]),
                files=tuple(map(File.from_plain, value["files"])),
                directories=tuple(map(checked, value["directories"])),
                metrics=value["metrics"],
                time=float(value["time"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointDamaged(f"{where} is damaged: its manifest cannot be read ({error})") from error


def _known(value: Plain) -> dict[str, Plain]:
    if not isinstance(value, dict) or value.get("version") != VERSION:
        found = value.get("version") if isinstance(value, dict) else value
        raise ValueError(f"written in format {found!r}; this version of holdfast reads format {VERSION}")
    return value


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
    """Merges the parts of ranks: the same bytes from several are one file; of different ones the lowest rank's win."""
    files: dict[str, tuple[int, File]] = {}
    folders: dict[str, int] = {}
    conflicts: list[str] = []
    for rank, part in sorted(parts.items()):
        for file in part.files:
            owner = _owner(file.path, files, folders)
            if owner is None:
                files[file.path] = (rank, file)
                folders.update({folder: rank for folder in _folders_of(file.path) if folder not in folders})
            elif file.path not in UNLISTED and not _same(files.get(file.path), file):
                conflicts.append(f"{file.path}: rank {owner}'s was kept, rank {rank}'s is different and was dropped")
    empty = sorted(
        {name for part in parts.values() for name in part.directories if _owner(name, files, folders) is None}
    )
    return Merge(files, tuple(empty), tuple(conflicts))


def _owner(path: str, files: Mapping[str, tuple[int, File]], folders: Mapping[str, int]) -> int | None:
    """The rank that has `path` already, as a file, as a folder, or by a file where `path` needs a folder."""
    for taken in (path, *_folders_of(path)):
        if taken in files:
            return files[taken][0]
    return folders.get(path)


def _folders_of(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _same(kept: tuple[int, File] | None, file: File) -> bool:
    return kept is not None and (kept[1].size_bytes, kept[1].hash) == (file.size_bytes, file.hash)


def total_bytes(parts: Iterable[Part]) -> int:
    return sum(part.size_bytes for part in parts)


def part_directory(staging: Path, report: int, rank: int) -> Path:
    """Where rank `rank` stages what it gives to report `report`, below the staging directory of an attempt."""
    return staging / str(report) / str(rank)


def listed(files: Sequence[File]) -> tuple[File, ...]:
    """The files a manifest names."""
    return tuple(File(file.path, file.size_bytes, file.hash) for file in files if file.path not in UNLISTED)
