"""The warm parent: imports what takes long once, and forks workers on request. It stays single-threaded.

The driver's first connection says what to import, and hands over a connection for each engine; an engine's connection
takes requests to fork and to signal, and tells of deaths. When a connection ends, so do the workers started over it;
when the first one ends or the driver dies, so does this process.

    driver -> parent        {"import": [names], "later": [names]}   {"engine": true} + socket
    engine -> parent        {"fork": id} + socket   {"signal": id, "number": 15}
    parent -> engine        {"forked": id, "pid": pid}   {"failed": id, "error": text}
                            {"exit": id, "status": status}   {"gone": id}

`exit` tells that a worker is dead, `gone` that all it had started is too. What is to be imported later is what workers
of a second gang would miss; it is imported once the first gang has been forked and nothing happens.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
from collections import deque
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from holdfast import plain
from holdfast.engines import forked
from holdfast.engines.connection import Frames, Peer

_SOCKETS_AT_ONCE = 64
_IDLE_S = 1.0
# Sent to every process of a job when it is to end: the driver decides what that means for the workers.
_NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
END = signal.SIGALRM


@dataclass
class _Worker:
    id: str
    engine: _Client


@dataclass
class _Client:
    """A connection with the driver, and the sockets that came over it and were not asked for yet."""

    peer: Peer
    frames: Frames = field(default_factory=Frames)
    sockets: deque[int] = field(default_factory=deque)

    def receive(self) -> list[plain.Plain]:
        """Raises EOFError when the driver has closed it."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.peer.socket, 1 << 16, _SOCKETS_AT_ONCE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        self.sockets.extend(descriptors)
        if not data:
            raise EOFError
        return [plain.decode(message) for message in self.frames.cut(data)]

    def socket(self) -> socket.socket:
        """Returns the socket that came with a request: they come in the order of their requests."""
        sock = socket.socket(fileno=self.sockets.popleft())
        sock.set_inheritable(False)
        return sock

    def close(self) -> None:
        for descriptor in self.sockets:
            os.close(descriptor)
        self.peer.close()


class WarmParent:
    """Serves one driver until it is gone."""

    def __init__(self, sock: socket.socket, driver_pid: int) -> None:
        self._pid = os.getpid()
        self._driver = _Client(Peer(sock))
        self._clients: dict[int, _Client] = {}
        self._workers: dict[int, _Worker] = {}
        self._leaving: dict[int, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        self._open: list[socket.socket] = []
        self._later: list[str] = []
        self._forked_any = False
        self._importing = False
        self._watch_driver(driver_pid)
        self._watch_children()
        self._selector.register(sock, selectors.EVENT_READ, self._driver)

    def _watch_driver(self, driver_pid: int) -> None:
        """Sees the driver's death even where a child of it holds its end of the connection open."""
        self._driver_fd = os.pidfd_open(driver_pid) if hasattr(os, "pidfd_open") else -1
        if os.getppid() != driver_pid:
            os._exit(0)
        if self._driver_fd >= 0:
            self._selector.register(self._driver_fd, selectors.EVENT_READ, None)

    def _watch_children(self) -> None:
        self._death, bell = socket.socketpair()
        self._open = [self._death, bell]
        for end in self._open:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, self._child_died)
        signal.signal(END, self._told_to_end)
        signal.set_wakeup_fd(bell.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._death, selectors.EVENT_READ, self._death)

    def serve(self) -> socket.socket:
        """Returns in a forked worker only, with the worker's socket."""
        while True:
            ready = self._selector.select(_IDLE_S if self._later and self._forked_any else None)
            if not ready:
                self._import([self._later.pop(0)])
            for key, events in ready:
                if key.data is None:
                    self._end()
                elif key.data is self._death:
                    self._bury_dead()
                else:
                    worker = self._serve(key.data, events)
                    if worker is not None:
                        return worker

    def _serve(self, client: _Client, events: int) -> socket.socket | None:
        if events & selectors.EVENT_WRITE:
            client.peer.flush()
        if events & selectors.EVENT_READ:
            try:
                requests = client.receive()
            except EOFError:
                self._let_go(client)
                return None
            for request in requests:
                worker = self._obey(client, request)
                if worker is not None:
                    return worker
        self._listen(client)
        return None

    def _tell(self, client: _Client, **message: plain.Plain) -> None:
        if client.peer.socket.fileno() >= 0:  # not let go of
            client.peer.send(plain.encode(message))
            self._listen(client)

    def _listen(self, client: _Client) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.peer.unsent else 0)
        self._selector.modify(client.peer.socket, events, client)

    def _obey(self, client: _Client, request: plain.Plain) -> socket.socket | None:
        if "import" in request:
            self._import(request["import"])
            self._later += request["later"]
        elif "engine" in request:
            self._add_engine(client.socket())
        elif "fork" in request:
            return self._fork(client, request["fork"], client.socket())
        elif "signal" in request:
            self._signal(request["signal"], request["number"])
        return None

    def _import(self, names: list[str]) -> None:
        gc.disable()
        self._importing = True
        for name in names:
            # a worker that needs it gets the exception, where it can be shown
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
        self._importing = False
        self._bury_dead()
        gc.freeze()  # what is not looked at by the collector stays shared with the workers

    def _child_died(self, number: int, frame: FrameType | None) -> None:
        """An import may take a second; else the bell is enough."""
        if self._importing:
            self._importing = False  # for a signal that comes during this one
            self._bury_dead()
            self._importing = True

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._end()

    def _add_engine(self, sock: socket.socket) -> None:
        engine = _Client(Peer(sock))
        self._clients[sock.fileno()] = engine
        self._selector.register(sock, selectors.EVENT_READ, engine)

    def _fork(self, engine: _Client, id: str, sock: socket.socket) -> socket.socket | None:
        try:
            pid = os.fork()
        except OSError as error:
            sock.close()
            self._tell(engine, failed=id, error=str(error))
            return None
        if pid == 0:
            self._close()
            return sock
        sock.close()
        _set_group(pid)
        self._workers[pid] = _Worker(id, engine)
        self._forked_any = True
        self._tell(engine, forked=id, pid=pid)
        return None

    def _signal(self, id: str, number: int) -> None:
        for pid, worker in self._workers.items():
            if worker.id == id:
                _kill_group(pid, number)

    def _bury_dead(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._death.recv(4096)
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if dead is None:
                break
            self._bury(dead.si_pid)
        self._tell_gone()

    def _bury(self, pid: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None:
            _kill_group(pid, signal.SIGKILL)  # before waitpid: until then nobody else can have this number
        _, status = os.waitpid(pid, 0)
        if worker is not None:
            self._leaving[pid] = worker
            self._tell(worker.engine, exit=worker.id, status=os.waitstatus_to_exitcode(status))

    def _tell_gone(self) -> None:
        for pid, worker in list(self._leaving.items()):
            if not _kill_group(pid, signal.SIGKILL):
                del self._leaving[pid]
                self._tell(worker.engine, gone=worker.id)

    def _let_go(self, client: _Client) -> None:
        if client is self._driver:
            self._end()
        for pid, worker in self._workers.items():
            if worker.engine is client:
                _kill_group(pid, signal.SIGKILL)
        self._selector.unregister(client.peer.socket)
        del self._clients[client.peer.socket.fileno()]
        client.close()

    def _end(self) -> None:
        for pid in self._workers:
            _kill_group(pid, signal.SIGKILL)
        os._exit(0)

    def _close(self) -> None:
        """Leaves nothing of the parent open in a worker."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for client in (self._driver, *self._clients.values()):
            client.close()
        for end in self._open:
            end.close()
        if self._driver_fd >= 0:
            os.close(self._driver_fd)


def _set_group(pid: int) -> None:
    with contextlib.suppress(OSError):  # it is dead
        os.setpgid(pid, pid)


def _kill_group(pid: int, number: int) -> bool:
    """Returns whether there was anyone in the group."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(descriptor: int, driver_pid: int) -> None:
    """The entry of the interpreter that becomes the warm parent."""
    forked.adopt_orphans()
    parent_pid = os.getpid()
    handlers: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in _NOTICES}
    worker = WarmParent(socket.socket(fileno=descriptor), driver_pid).serve()
    forked.become_worker(worker, parent_pid, {**handlers, END: signal.SIG_DFL})
