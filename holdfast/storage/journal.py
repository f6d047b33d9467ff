"""Records in order on any storage, and epochs of ownership.

Each owner appends to a segment of its own. A take-over claims the next epoch by creating its segment exclusively, only
then reads the earlier ones, and writes down how far it read the one before: what lands there later is void for ever.

No clock takes part. An owner first writes, then looks whether the next epoch is claimed (epochs leave no gap: one look
is enough). No claim seen: the claim, and so the reading that follows it, comes after the write, and every later owner
has the record. A claim seen: the record may be void, `OwnershipLost`. A sync looks last, too, for the same reason.

In a directory a segment is the file `<epoch>.jsonl`; on an object store it is the objects `<epoch>/<sequence>.jsonl`,
and its length is counted in objects. Line 1, or object 0, is the claim. A claimed segment without a `previous` record
(its owner died between) carries nothing, and the one before it is read instead.

A record is a sealed line (`holdfast/sealed.py`). In a file a torn tail is cut when it is read, and stays where it is.
Objects are whole or not there: each begins with a record that counts the others.

On NFS the look must not be answered from the client's cache: mount with `lookupcache=positive`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from holdfast.errors import AlreadyExists, DriverAlive, JournalDamaged, NotFound, OwnershipLost, StorageError
from holdfast.sealed import is_whole, seal, unseal
from holdfast.storage import local
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage

Record = dict[str, Any]

_OWN_KINDS = ("owner", "previous", "closed", "object")
_FILE_GROUP_AGE_S = 0.04  # leaves the disk 10 ms of the 50 that are promised
_OBJECT_GROUP_AGE_S = 1.0
_open_here: set[str] = set()  # stamps of the journals that this process owns


@dataclass(frozen=True)
class Driver:
    """A process that owns, or owned, a journal; the start time tells it from a later one with its pid."""

    host: str
    boot_id: str
    pid: int
    start_time: int

    @classmethod
    def here(cls) -> Driver:
        pid = os.getpid()
        return cls(os.uname().nodename, local.boot_id(), pid, _start_time(pid) or 0)

    def is_alive_here(self) -> bool:
        """Whether this very process still runs on this machine; of another machine nobody knows, and it is False."""
        return self.boot_id == local.boot_id() and _start_time(self.pid) == self.start_time


class Journal:
    """The owner's hold on a journal: what it alone may do. Threads may share it.

    Attributes:
        epoch: the number of this ownership.
        earlier: the records of all earlier epochs, in order.
    """

    def __init__(self, tail: _Tail, epoch: int, earlier: list[Record], stamp: str) -> None:
        self.epoch = epoch
        self.earlier = earlier
        self._tail = tail
        self._stamp = stamp
        self._written = 0  # counts appends
        self._durable = 0
        self._end: Exception | None = None  # why this journal is of no use any more
        self._flush_failure: StorageError | None = None  # of the background, may pass; the next append raises it
        self._append_lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._flusher = threading.Thread(target=self._flush_in_groups, name="holdfast-journal", daemon=True)
        self._flusher.start()

    @classmethod
    def open(
        cls, storage: Storage, folder: str = "journal", *, takeover: bool = False, driver: Driver | None = None
    ) -> Journal:
        """Becomes the owner. What earlier owners write from now on is void, and they are told.

        Args:
            storage: where the journal is; need not exist yet.
            folder: its folder there.
            takeover: also from an owner that is alive on this machine.
            driver: who becomes the owner; this process.

        Raises:
            DriverAlive: the owner is alive on this machine.
            OwnershipLost: another one took over at once.
            JournalDamaged: a record is not what was written.
        """
        segments = _segments(storage, folder)
        stamp = os.urandom(8).hex()
        _open_here.add(stamp)
        try:
            epoch = _claim(segments, driver or Driver.here(), stamp, takeover=takeover)
            # The claim comes before the reading, never after: else a record may land between and be lost.
            earlier, previous = _read_chain(segments, epoch - 1)
            segments.settle(previous)
            journal = cls(segments.open_tail(epoch), epoch, earlier, stamp)
        except BaseException:
            _open_here.discard(stamp)
            raise
        journal._begin(previous)
        return journal

    def append(self, records: Sequence[Record]) -> None:
        """Writes records, all or none. In a directory they survive this process; on an object store only `sync` keeps.

        Raises:
            OwnershipLost: there is a newer owner; it may have read these records or not.
            StorageError: nothing was written; if it is transient the call may be repeated.
        """
        assert not any(record.get("kind") in _OWN_KINDS for record in records), f"{_OWN_KINDS} are the journal's own"
        self._write(records)

    def sync(self) -> None:
        """Makes durable all that was appended.

        Raises:
            OwnershipLost: there is a newer owner.
            StorageError: it is not durable; if it is not transient this journal is of no use any more.
        """
        self._check_end()
        self._flush_failure = None
        self._flush()

    def look(self) -> None:
        """Raises `OwnershipLost` if there is a newer owner."""
        self._check_end()
        if self._tail.is_superseded():
            self._end = OwnershipLost(
                f"another driver has taken over {self._tail.place}; this one stops. "
                "If you did not start another one, look who uses the same storage path and name."
            )
            raise self._end

    def close(self) -> None:
        """Ends the ownership, durably: anyone may open the journal, also while this process lives."""
        if self._closing.is_set():
            return
        self._stop_flusher()
        try:
            self._flush_failure = None
            self._write([{"kind": "closed"}])
            self._flush()
        finally:
            self._release()

    def _begin(self, previous: _Reach) -> None:
        try:
            self._write([{"kind": "previous", "epoch": previous.epoch, "length": previous.length}])
            self._flush()
        except BaseException:
            self._stop_flusher()
            self._release()
            raise

    def _stop_flusher(self) -> None:
        self._closing.set()
        self._dirty.set()
        self._flusher.join()

    def _release(self) -> None:
        self._end = self._end or StorageError(f"the journal {self._tail.place} was closed")
        self._tail.close()
        _open_here.discard(self._stamp)

    def _write(self, records: Sequence[Record]) -> None:
        lines = [seal(record) for record in records]
        with self._append_lock:
            self._check_end()
            self._raise_flush_failure()
            try:
                self._tail.write(lines)
            except StorageError as error:
                raise self._ended_by(error) from error.__cause__
            self._written += 1
            if self._tail.hands_over:
                self._look_after_write()
            if not self._dirty.is_set():
                self._dirty.set()

    def _look_after_write(self) -> None:
        try:
            self.look()
        except StorageError as error:
            # Not transient: the records are written, and a second append would write them twice.
            self._end = StorageError(f"{error}; whether the last records count is unknown: start a new driver")
            raise self._end from error

    def _flush(self) -> None:
        with self._flush_lock:
            written = self._written
            if written > self._durable:
                try:
                    self._tail.flush()
                except StorageError as error:
                    raise self._ended_by(error) from error.__cause__
                self._durable = written
        self.look()

    def _flush_in_groups(self) -> None:
        while self._dirty.wait() and not self._closing.wait(self._tail.group_age_s):
            self._dirty.clear()
            try:
                self._check_end()
                self._flush()
            except StorageError as error:
                self._flush_failure = error
                self._dirty.set()
            except Exception as error:  # OwnershipLost, or a mistake of ours: the next call must say so
                self._end = self._end or error
            if self._end:
                return

    def _check_end(self) -> None:
        if self._end:
            raise self._end

    def _raise_flush_failure(self) -> None:
        failure, self._flush_failure = self._flush_failure, None
        if failure:
            raise failure

    def _ended_by(self, error: StorageError) -> StorageError:
        if not error.transient:
            self._end = error
        return error


def read(storage: Storage, folder: str = "journal") -> list[Record]:
    """Returns the records, for who does not own the journal. Never writes; what is not whole yet is left out."""
    segments = _segments(storage, folder)
    while True:
        newest = segments.newest()
        records, _ = _read_chain(segments, newest)
        if not segments.is_claimed(newest + 1):
            return records


@dataclass(frozen=True)
class _Reach:
    """How far an epoch was read: bytes of its file, or objects."""

    epoch: int
    length: int


class _Tail(Protocol):
    """The segment that its owner writes."""

    place: str
    group_age_s: float
    hands_over: bool  # whether what was written survives this process before it is flushed

    def write(self, lines: list[bytes]) -> None: ...

    def flush(self) -> None: ...

    def is_superseded(self) -> bool: ...

    def close(self) -> None: ...


class _Segments(Protocol):
    """The segments of one journal."""

    place: str

    def newest(self) -> int:
        """Returns the newest epoch that is claimed; 0: none."""

    def is_claimed(self, epoch: int) -> bool: ...

    def claim(self, epoch: int, line: bytes) -> None: ...

    def read_owner(self, epoch: int) -> Record | None:
        """Returns the first record; None: it was torn."""

    def read(self, epoch: int, length: int | None) -> tuple[list[Record], int]:
        """Returns the records up to `length`, or all, and the length that they take."""

    def settle(self, reach: _Reach) -> None:
        """Makes durable what was read."""

    def open_tail(self, epoch: int) -> _Tail: ...


def _segments(storage: Storage, folder: str) -> _Segments:
    return _FileSegments(storage, folder) if isinstance(storage, LocalStorage) else _ObjectSegments(storage, folder)


def _claim(segments: _Segments, driver: Driver, stamp: str, *, takeover: bool) -> int:
    while True:
        newest = segments.newest()
        if newest and not takeover:
            _refuse_if_alive(segments, newest)
        owner = {"kind": "owner", "epoch": newest + 1, "driver": vars(driver), "stamp": stamp, "time": time.time()}
        try:
            segments.claim(newest + 1, seal(owner))
        except AlreadyExists:
            continue  # another one was faster: now it is the owner, and may be alive
        return newest + 1


def _refuse_if_alive(segments: _Segments, epoch: int) -> None:
    owner = segments.read_owner(epoch)
    if owner is None or not _is_alive(owner):
        return
    if segments.read(epoch, None)[0][-1].get("kind") != "closed":
        pid = owner["driver"]["pid"]
        raise DriverAlive(
            f"process {pid}{' (this one)' if pid == os.getpid() else ''} is alive and owns {segments.place}. "
            'Let it end or stop it first, or take over with resume="takeover".'
        )


def _is_alive(owner: Record) -> bool:
    driver = Driver(**{field.name: owner["driver"][field.name] for field in fields(Driver)})
    if driver == Driver.here():
        return owner["stamp"] in _open_here  # else it failed to open or to close, and is no owner
    return driver.is_alive_here()


def _read_chain(segments: _Segments, newest: int) -> tuple[list[Record], _Reach]:
    """Returns the records of all epochs up to `newest`, and how far the last one that carries any was read."""
    reach, records = _newest_that_carries(segments, newest)
    parts = []
    epoch = reach.epoch
    while epoch:
        parts.append(records[2:-1] if records[-1].get("kind") == "closed" else records[2:])
        epoch, length = records[1]["epoch"], records[1]["length"]
        if epoch:
            records, _ = segments.read(epoch, length)
    return [record for part in reversed(parts) for record in part], reach


def _newest_that_carries(segments: _Segments, newest: int) -> tuple[_Reach, list[Record]]:
    for epoch in range(newest, 0, -1):
        records, length = segments.read(epoch, None)
        if len(records) > 1:
            return _Reach(epoch, length), records
    return _Reach(0, 0), []


class _FileSegments:
    def __init__(self, storage: LocalStorage, folder: str) -> None:
        self.place = f"{storage.url}/{folder}"
        self._storage = storage
        self._folder = folder

    def newest(self) -> int:
        names = (entry.path.rpartition("/")[2] for entry in self._storage.list(self._folder))
        epochs = (int(match[1]) for name in names if (match := re.fullmatch(r"(\d{8,})\.jsonl", name)))
        return _newest_claimed(self, max(epochs, default=0))

    def is_claimed(self, epoch: int) -> bool:
        return _exists(self._path(epoch))

    def claim(self, epoch: int, line: bytes) -> None:
        self._storage.put(self._name(epoch), line, if_absent=True)

    def read_owner(self, epoch: int) -> Record | None:
        records, _ = self.read(epoch, None)
        return records[0] if records else None

    def read(self, epoch: int, length: int | None) -> tuple[list[Record], int]:
        name = self._name(epoch)
        try:
            data = self._storage.get(name)
        except NotFound as error:
            raise JournalDamaged(f"{self._path(epoch)} is missing; later segments refer to it") from error
        if length is not None and len(data) < length:
            raise JournalDamaged(f"{self._path(epoch)} has {len(data)} bytes; it had at least {length}")
        return _parse(data[:length], self._path(epoch), may_be_torn=length is None)

    def settle(self, reach: _Reach) -> None:
        if reach.epoch:
            with local.translated("sync", self._path(reach.epoch)):
                local.sync_file(self._path(reach.epoch))

    def open_tail(self, epoch: int) -> _Tail:
        with local.translated("clean", self.place):
            local.remove_temporaries(self._storage.root / self._folder)
        return _FileTail(self._path(epoch), self._path(epoch + 1))

    def _name(self, epoch: int) -> str:
        return f"{self._folder}/{epoch:08d}.jsonl"

    def _path(self, epoch: int) -> str:
        return str(self._storage.root / self._name(epoch))


class _FileTail:
    group_age_s = _FILE_GROUP_AGE_S
    hands_over = True

    def __init__(self, path: str, next_path: str) -> None:
        self.place = path
        self._next_path = next_path
        with local.translated("open", path):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._file).st_size

    def write(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        try:
            local.write_all(self._file, data)
        except OSError as error:
            self._cut_torn_write()
            raise local.storage_error("append to", self.place, error) from error
        self._size += len(data)

    def flush(self) -> None:
        try:
            local.sync_data(self._file)
        except OSError as error:
            # Not transient, never repeated: the system may have dropped the bytes; a second sync would find no fault.
            raise StorageError(
                f"{local.storage_error('sync', self.place, error)}; the last records may be lost with the machine. "
                "This journal takes no more records: start a new driver."
            ) from error

    def is_superseded(self) -> bool:
        return _exists(self._next_path)

    def close(self) -> None:
        os.close(self._file)

    def _cut_torn_write(self) -> None:
        try:
            os.ftruncate(self._file, self._size)
        except OSError as error:  # a record behind a torn one would damage the journal
            raise StorageError(f"{local.storage_error('cut a torn record from', self.place, error)}") from error


class _ObjectSegments:
    def __init__(self, storage: Storage, folder: str) -> None:
        self.place = f"{storage.url}/{folder}"
        self._storage = storage
        self._folder = folder

    def newest(self) -> int:
        names = (entry.path.removeprefix(self._folder) for entry in self._storage.list(self._folder))
        epochs = (int(match[1]) for name in names if (match := re.fullmatch(r"/(\d{8,})/0{8}\.jsonl", name)))
        return _newest_claimed(self, max(epochs, default=0))

    def is_claimed(self, epoch: int) -> bool:
        return _get_if_there(self._storage, self._name(epoch, 0)) is not None

    def claim(self, epoch: int, line: bytes) -> None:
        _put_once(self._storage, self._name(epoch, 0), _object([line]))

    def read_owner(self, epoch: int) -> Record | None:
        return self._records(self._name(epoch, 0), self._storage.get(self._name(epoch, 0)))[0]

    def read(self, epoch: int, length: int | None) -> tuple[list[Record], int]:
        records: list[Record] = []
        sequence = 0
        while sequence != length:
            name = self._name(epoch, sequence)
            try:
                data = self._storage.get(name)
            except NotFound as error:
                if length is None and sequence > 0:
                    break
                raise JournalDamaged(f"{self._place(name)} is missing; the journal refers to it") from error
            records += self._records(name, data)
            sequence += 1
        return records, sequence

    def _records(self, name: str, data: bytes) -> list[Record]:
        lines, _ = _parse(data, self._place(name), may_be_torn=False)
        if not lines or lines[0].get("records") != len(lines) - 1:
            raise JournalDamaged(f"{self._place(name)} has {len(lines)} lines, not as many as line 1 counts")
        return lines[1:]

    def settle(self, reach: _Reach) -> None:
        """Every object is durable."""

    def open_tail(self, epoch: int) -> _Tail:
        return _ObjectTail(self._storage, f"{self._folder}/{epoch:08d}", self._name(epoch + 1, 0))

    def _name(self, epoch: int, sequence: int) -> str:
        return f"{self._folder}/{epoch:08d}/{sequence:08d}.jsonl"

    def _place(self, name: str) -> str:
        return f"{self._storage.url}/{name}"


class _ObjectTail:
    group_age_s = _OBJECT_GROUP_AGE_S
    hands_over = False

    def __init__(self, storage: Storage, folder: str, next_claim: str) -> None:
        self.place = f"{storage.url}/{folder}"
        self._storage = storage
        self._folder = folder
        self._next_claim = next_claim
        self._sequence = 1
        self._object = b""  # what is being put: the same bytes until it is there, since a late put may still land
        self._waiting: list[bytes] = []  # lines
        self._lock = threading.Lock()

    def write(self, lines: list[bytes]) -> None:
        with self._lock:
            self._waiting += lines

    def flush(self) -> None:
        while self._object or self._take_waiting():
            name = f"{self._folder}/{self._sequence:08d}.jsonl"
            try:
                _put_once(self._storage, name, self._object)
            except AlreadyExists as error:
                raise StorageError(f"{name} holds other bytes; only its owner may write it") from error
            self._sequence += 1
            self._object = b""

    def is_superseded(self) -> bool:
        return _get_if_there(self._storage, self._next_claim) is not None

    def close(self) -> None: ...

    def _take_waiting(self) -> bytes:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        self._object = _object(waiting) if waiting else b""
        return self._object


def _newest_claimed(segments: _Segments, listed: int) -> int:
    """Returns the newest epoch; a listing may be behind."""
    while segments.is_claimed(listed + 1):
        listed += 1
    return listed


def _exists(path: str) -> bool:
    # Not os.access: it says no when the storage is away.
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise local.storage_error("look for", path, error) from error
    return True


def _put_once(storage: Storage, name: str, data: bytes) -> None:
    """Puts what nobody else may have put; a lost answer is settled by looking.

    Raises:
        AlreadyExists: there are other bytes.
    """
    try:
        storage.put(name, data, if_absent=True)
    except StorageError as error:
        there = _get_if_there(storage, name)
        if there is None:
            raise
        if there != data:
            raise AlreadyExists(f"there is something else at {storage.url}/{name} already") from error


def _get_if_there(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.get(name)
    except NotFound:
        return None


def _object(lines: list[bytes]) -> bytes:
    return b"".join([seal({"kind": "object", "records": len(lines)}), *lines])


def _parse(data: bytes, place: str, *, may_be_torn: bool) -> tuple[list[Record], int]:
    """Returns the records of `data` and the length of their lines.

    Raises:
        JournalDamaged: a line is not what was written, and no torn tail.
    """
    *lines, rest = data.split(b"\n")
    records: list[Record] = []
    length = 0
    for index, line in enumerate(lines):
        try:
            records.append(unseal(line + b"\n"))
        except ValueError:
            rest = line
            may_be_torn = may_be_torn and not any(is_whole(later + b"\n") for later in lines[index + 1 :])
            break
        length += len(line) + 1
    if rest and not may_be_torn:
        raise JournalDamaged(f"line {len(records) + 1} of {place} is not what was written: length or checksum is wrong")
    return records, length


def _start_time(pid: int) -> int | None:
    """Returns when a process started, in the machine's ticks; None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if os.path.exists("/proc/self/stat") else _start_time_elsewhere(pid)
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _start_time_elsewhere(pid: int) -> int | None:
    """Where there is no /proc (macOS) a later process with the same pid is taken for the first one."""
    return 0 if local.pid_exists(pid) else None
