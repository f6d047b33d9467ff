"""The driver's connections with all its processes, in one place to wait on."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Callable

from holdfast.engines.base import Exit, Message, Process
from holdfast.engines.connection import Peer

_READ = selectors.EVENT_READ
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class Switchboard:
    """Collects the messages and exits of processes. One thread calls it; `wake` and `announce` may be called by any."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ready: list[tuple[selectors.SelectorKey, int]] = []
        self._lines: dict[str, _Line] = {}
        self._arrived: list[Message | Exit] = []
        self._announced: deque[tuple[Process, int]] = deque()
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self.watch(self._bell, self._woken)

    def watch(self, source: socket.socket | int, notice: Callable[[], None]) -> None:
        """Calls `notice` in `turn` when `source` can be read."""
        self._selector.register(source, _READ, lambda events: notice())

    def unwatch(self, source: socket.socket | int) -> None:
        """Forgets a source."""
        self._selector.unregister(source)

    def connect(self, process: Process, peer: Peer) -> None:
        """Takes the messages of `process` from now on."""
        line = _Line(process, peer, self._arrived, self._selector)
        self._lines[process.id] = line
        self._selector.register(peer.socket, _BOTH if peer.unsent else _READ, line.serve)

    def send(self, process: Process, data: bytes) -> None:
        """Sends a message, if the process is still connected."""
        line = self._lines.get(process.id)
        if line is not None and not line.peer.ended:
            line.send(data)

    def exited(self, process: Process, status: int) -> None:
        """Takes the last messages of a process that is gone, then its exit."""
        line = self._lines.pop(process.id)
        line.finish()
        self._arrived.append(Exit(process, status))

    def announce(self, process: Process, status: int) -> None:
        """As `exited`, from any thread."""
        self._announced.append((process, status))
        self.wake()

    def disconnect(self, process: Process) -> None:
        """Closes the connection with a process that is let go, alive."""
        line = self._lines.pop(process.id, None)
        if line is not None:
            line.finish()

    def silence(self, process: Process) -> None:
        """Makes the process's next call on its channel fail; what it had sent still arrives."""
        line = self._lines.get(process.id)
        if line is not None and not line.peer.ended:
            line.peer.socket.shutdown(socket.SHUT_RDWR)

    def silence_all(self) -> None:
        """As `silence`, for every process; when no other call will come."""
        for line in list(self._lines.values()):
            self.silence(line.process)

    def connected(self, process: Process) -> bool:
        """Whether the exit of the process has not been seen yet."""
        return process.id in self._lines

    def wait(self, timeout_s: float) -> None:
        """Returns when something has happened, or after `timeout_s`."""
        if not self._arrived and not self._ready:
            self._ready = self._selector.select(max(0.0, timeout_s))

    def poll(self) -> list[Message | Exit]:
        """Returns what has arrived. Never blocks."""
        self.turn(0.0)
        arrived = self._arrived[:]
        self._arrived.clear()
        return arrived

    def turn(self, timeout_s: float | None) -> None:
        """Waits for something to happen and takes it in, for `poll` to return."""
        ready, self._ready = self._ready or self._selector.select(timeout_s), []
        for key, events in ready:
            key.data(events)

    def wake(self) -> None:
        """Makes `wait` return."""
        with contextlib.suppress(OSError):  # full: it is ringing already; closed: nobody waits
            self._button.send(b"!")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while self._announced:
            self.exited(*self._announced.popleft())

    def close(self) -> None:
        """Closes every connection."""
        for line in list(self._lines.values()):
            self.disconnect(line.process)
        self._selector.close()
        self._bell.close()
        self._button.close()


class _Line:
    """The connection with one process."""

    def __init__(
        self, process: Process, peer: Peer, arrived: list[Message | Exit], selector: selectors.BaseSelector
    ) -> None:
        self.process = process
        self.peer = peer
        self._arrived = arrived
        self._selector = selector
        self._registered = True
        self._events = _BOTH if peer.unsent else _READ

    def serve(self, events: int) -> None:
        if not self._registered:  # disconnected by an event of the same turn
            return
        if events & _READ:
            self._take(self.peer.read())
        if events & selectors.EVENT_WRITE:
            self.peer.flush()
        self._listen()

    def send(self, data: bytes) -> None:
        self.peer.send(data)
        self._listen()

    def finish(self) -> None:
        self._take(self.peer.read_all())
        self._forget()
        self.peer.close()

    def _take(self, messages: list[bytes]) -> None:
        process = self.process
        self._arrived.extend([Message(process, data) for data in messages])

    def _listen(self) -> None:
        if self.peer.ended:
            self._forget()  # or the end of its stream would wake every `wait`
            return
        events = _BOTH if self.peer.unsent else _READ
        if events != self._events and self._registered:
            self._events = events
            self._selector.modify(self.peer.socket, events, self.serve)

    def _forget(self) -> None:
        if self._registered:
            self._registered = False
            self._selector.unregister(self.peer.socket)
