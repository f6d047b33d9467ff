"""An object store in memory: put-if-absent, get, list, delete, copy, and nothing else. It misbehaves on request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path

from holdfast.errors import AlreadyExists, NotFound, StorageError
from holdfast.storage.base import Entry, Promises, Storage, checked


class Fault(Enum):
    """What can go wrong with one call."""

    FAIL = "fail"  # nothing happens, the caller gets an error
    LOSE_ANSWER = "lose answer"  # it happens, the caller gets an error all the same
    LATE = "late"  # the caller gets an error; a write happens at `land_late_writes`


Faults = Callable[[str, str], "Fault | None"]  # (verb, path) -> what goes wrong with this call


def no_faults(verb: str, path: str) -> Fault | None:
    return None


def away(verb: str, path: str) -> Fault | None:
    """The storage cannot be reached."""
    return Fault.FAIL


class MemoryStorage:
    """An object store; any number of threads may use it.

    >>> storage = MemoryStorage()
    >>> storage.faults = lambda verb, path: Fault.LOSE_ANSWER if verb == "put" else None
    """

    promises = Promises(create_exclusive=True, atomic_rename=False, list_after_write=True)

    def __init__(self, name: str = "test", *, faults: Faults = no_faults) -> None:
        self.name = name
        self.faults = faults
        self._objects: dict[str, bytes] = {}
        self._late: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    @property
    def url(self) -> str:
        return f"memory://{self.name}"

    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> None:
        data = bytes(data)
        self._write("put", checked(path), lambda: self._set(path, data, if_absent))

    def upload(self, source: Path, path: str) -> None:
        checked(path)
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise StorageError(f"could not read {source}: {error}") from error
        self._write("upload", path, lambda: self._set(path, data, False))

    def get(self, path: str) -> bytes:
        with self._lock:
            self._read("get", checked(path))
            return self._find(path)

    def download(self, path: str, target: Path) -> None:
        self._read("download", checked(path))
        data = self._find(path)
        try:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            Path(target).write_bytes(data)
        except OSError as error:
            raise StorageError(f"could not write {target}: {error}") from error

    def list(self, prefix: str = "") -> Iterator[Entry]:
        folder = checked(prefix) + "/" if prefix else ""
        with self._lock:
            self._read("list", prefix)
            found = [Entry(path, len(data)) for path, data in self._objects.items() if path.startswith(folder)]
        yield from sorted(found, key=lambda entry: entry.path)

    def delete(self, path: str) -> None:
        self._write("delete", checked(path), lambda: self._remove(path))

    def copy(self, source: str, target: str) -> None:
        checked(source)
        self._write("copy", checked(target), lambda: self._set(target, self._find(source), False))

    def land_late_writes(self) -> int:
        """Lets happen what was late, in the order of the calls, and returns how many calls that were."""
        with self._lock:
            late, self._late = self._late, []
            for effect in late:
                _try(effect)
            return len(late)

    def _read(self, verb: str, path: str) -> None:
        if self.faults(verb, path) is not None:
            raise _unanswered(self.url, verb, path)

    def _write(self, verb: str, path: str, effect: Callable[[], None]) -> None:
        with self._lock:
            fault = self.faults(verb, path)
            if fault is None:
                return effect()
            if fault is Fault.LOSE_ANSWER:
                _try(effect)
            elif fault is Fault.LATE:
                self._late.append(effect)
        raise _unanswered(self.url, verb, path)

    def _set(self, path: str, data: bytes, if_absent: bool) -> None:
        with self._lock:
            if if_absent and path in self._objects:
                raise AlreadyExists(f"there is something at {self.url}/{path} already")
            self._objects[path] = data

    def _find(self, path: str) -> bytes:
        with self._lock:
            try:
                return self._objects[path]
            except KeyError:
                raise NotFound(f"there is nothing at {self.url}/{path}") from None

    def _remove(self, path: str) -> None:
        self._objects.pop(path, None)


def _try(effect: Callable[[], None]) -> None:
    """Does what may also be refused; nobody hears the answer."""
    with suppress(AlreadyExists, NotFound):
        effect()


def _unanswered(url: str, verb: str, path: str) -> StorageError:
    return StorageError(f"could not {verb} {url}/{path}: no answer; it may have happened", transient=True)


_: type[Storage] = MemoryStorage
