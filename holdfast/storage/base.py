"""What a storage is: bytes under names, seven verbs, and three promises.

Names are relative, with `/` between their parts, never absolute and never with `..`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Promises:
    """What a storage guarantees; the commit protocol chooses its steps by these.

    Attributes:
        create_exclusive: of several `put(..., if_absent=True)` of one name, exactly one succeeds.
        atomic_rename: whole directories can be renamed in one step (`LocalStorage` only).
        list_after_write: what was put is in every later listing.
    """

    create_exclusive: bool
    atomic_rename: bool
    list_after_write: bool


@dataclass(frozen=True)
class Entry:
    """One stored name."""

    path: str
    size_bytes: int


class Storage(Protocol):
    """Bytes under names. When a writing verb returns, the bytes are durable; a reader sees all of them or none."""

    @property
    def url(self) -> str:
        """Where this is, without credentials."""

    @property
    def promises(self) -> Promises: ...

    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> None:
        """Writes `data` under `path`, over what was there.

        Raises:
            AlreadyExists: `if_absent`, and there is something; nothing was changed.
            StorageError: the bytes could not be written, or nobody knows whether they were.
        """

    def upload(self, source: Path, path: str) -> None:
        """Writes the local file `source` under `path`, over what was there."""

    def get(self, path: str) -> bytes:
        """Returns the bytes under `path`.

        Raises:
            NotFound: there is nothing.
        """

    def download(self, path: str, target: Path) -> None:
        """Writes the bytes under `path` to the local file `target`.

        Raises:
            NotFound: there is nothing.
        """

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yields everything below the folder `prefix`, in the order of names, also in deeper folders."""

    def delete(self, path: str) -> None:
        """Removes the bytes under `path`; nothing there is no error."""

    def copy(self, source: str, target: str) -> None:
        """Copies on the side of the storage.

        Raises:
            NotFound: `source` is not there.
        """


def checked(path: str) -> str:
    """Returns `path`, a name that cannot leave its storage.

    Raises:
        ValueError: it is empty, absolute, or has an empty, `.` or `..` part.
    """
    if not path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} is not a name inside a storage: relative, with / between its parts, no . or ..")
    return path
