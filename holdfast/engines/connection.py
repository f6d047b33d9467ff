"""Messages over a stream socket: four bytes of length, little endian, then the bytes.

`Connection` is the process's end and may block; `Peer` is the driver's end and never does.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections import deque

from holdfast.engines.base import Channel, ChannelClosed

_SIZE = struct.Struct("<I")
_BUFFER_BYTES = 4 << 20  # what the kernel grants is less, unless its wmem_max was raised
_CHUNK_BYTES = 1 << 16
_SLICE_S = 0.25
_ATOMIC_BYTES = 1 << 14
_LARGEST_BYTES = (1 << 32) - 1


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a connection, with large buffers."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    return ends


def frame(data: bytes) -> list[bytes]:
    """Returns the buffers to write for one message: one if it is small, so that it takes one system call."""
    if len(data) > _LARGEST_BYTES:
        raise ValueError(f"a message of {len(data):,} bytes was to be sent; one may have at most {_LARGEST_BYTES:,}")
    header = _SIZE.pack(len(data))
    return [header + data] if len(data) < _CHUNK_BYTES else [header, data]


class Frames:
    """Cuts what arrives on a socket into messages."""

    def __init__(self) -> None:
        self._rest = b""
        self._large: bytearray | None = None
        self._filled = 0

    def read(self, sock: socket.socket) -> list[bytes]:
        """Receives once and returns the messages that are now whole.

        Raises:
            EOFError: the other end is gone.
        """
        if self._large is not None:
            return self._read_large(sock, self._large)
        try:
            chunk = sock.recv(_CHUNK_BYTES)
        except ConnectionError as error:
            raise EOFError from error
        if not chunk:
            raise EOFError
        return self.cut(chunk)

    def cut(self, chunk: bytes) -> list[bytes]:
        """Returns the messages that `chunk` completes."""
        data = self._rest + chunk if self._rest else chunk
        messages = []
        start, end, size = 0, len(data), 0
        while end - start >= 4:
            (size,) = _SIZE.unpack_from(data, start)
            if end - start - 4 < size:
                break
            start += 4 + size
            messages.append(data[start - size : start])
        self._rest = data[start:] if start else data
        if size > _CHUNK_BYTES and len(self._rest) >= 4:
            self._expect_large(size)
        return messages

    def _expect_large(self, size: int) -> None:
        self._large = bytearray(size)
        self._filled = len(self._rest) - 4
        self._large[: self._filled] = self._rest[4:]
        self._rest = b""

    def _read_large(self, sock: socket.socket, large: bytearray) -> list[bytes]:
        with memoryview(large) as view:
            try:
                count = sock.recv_into(view[self._filled :])
            except ConnectionError as error:
                raise EOFError from error
        if not count:
            raise EOFError
        self._filled += count
        if self._filled < len(large):
            return []
        self._large = None
        return [bytes(large)]


class Connection:
    """A process's own end. Any thread may send, also a signal handler; one thread at a time may receive."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._lock = threading.RLock()
        self._inside_message = False
        self._postponed: deque[bytes] = deque()
        self._frames = Frames()
        self._arrived: deque[bytes] = deque()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def send(self, data: bytes) -> None:
        with self._lock:
            if self._inside_message:  # a signal handler, called while this thread sends
                self._postponed.append(data)
                return
            try:
                if len(data) < _ATOMIC_BYTES:
                    self._send_at_once(_SIZE.pack(len(data)) + data)
                else:
                    self._send_in_parts(frame(data))
            except OSError as error:
                raise ChannelClosed("the driver is gone") from error

    def _send_at_once(self, buffer: bytes) -> None:
        """The system takes all of a small message or nothing: no signal handler can come between its bytes."""
        while True:
            try:
                self._socket.send(buffer, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._writable.poll(_SLICE_S * 1000)

    def _send_in_parts(self, buffers: list[bytes]) -> None:
        self._inside_message = True
        try:
            for buffer in buffers:
                self._socket.sendall(buffer)
        except BaseException:
            self.close()  # a signal handler may have raised inside the message: what follows it could not be read
            raise
        finally:
            self._inside_message = False
        while self._postponed:
            self.send(self._postponed.popleft())

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._arrived:
            if not self._wait_readable(deadline):
                return None
            try:
                self._arrived.extend(self._frames.read(self._socket))
            except (EOFError, OSError) as error:
                raise ChannelClosed("the driver is gone") from error
        return self._arrived.popleft()

    def _wait_readable(self, deadline: float) -> bool:
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            # in slices: Python runs no handler for a signal that came just before a call that blocks
            if self._readable.poll(min(left_s, _SLICE_S) * 1000):
                return True
            if left_s <= _SLICE_S:
                return False

    def close(self) -> None:
        """Ends the connection; a thread that is blocked in it gets `ChannelClosed`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Ends it and gives its descriptor back; for an owner that outlives it."""
        self.close()
        self._socket.close()


class Peer:
    """The driver's end of a connection.

    Attributes:
        ended: the process has closed its end, and all it had sent was read.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.ended = False
        self._frames = Frames()
        self._unsent: deque[memoryview] = deque()

    @property
    def unsent(self) -> bool:
        """Whether something waits until the process has read what came before."""
        return bool(self._unsent)

    def read(self) -> list[bytes]:
        """Returns the messages of one receive; none if there is nothing now."""
        try:
            return self._frames.read(self.socket)
        except BlockingIOError:
            return []
        except (EOFError, OSError):
            self.ended = True
            return []

    def read_all(self) -> list[bytes]:
        """Returns all that is there now: for a process that can send no more."""
        messages = []
        while not self.ended:
            try:
                messages.extend(self._frames.read(self.socket))
            except BlockingIOError:
                break
            except (EOFError, OSError):
                self.ended = True
        return messages

    def send(self, data: bytes) -> None:
        """Sends a message, or keeps what the socket does not take for `flush`."""
        self._unsent.extend(map(memoryview, frame(data)))
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.popleft()

    def close(self) -> None:
        """Closes this end."""
        self._unsent.clear()
        self.socket.close()


def _conforms(connection: Connection) -> Channel:
    return connection
