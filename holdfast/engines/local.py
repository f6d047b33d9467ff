"""Processes on this machine: ranks forked from a warm parent, services as interpreters of their own."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast import plain
from holdfast.engines import interpreter, parent
from holdfast.engines.base import Engine, Exit, Message, Node, Process, ProcessSpec
from holdfast.engines.connection import Peer, frame, pair
from holdfast.engines.entry import Surroundings
from holdfast.engines.resources import Ledger, Share, this_machine
from holdfast.engines.switchboard import Switchboard
from holdfast.errors import EngineError

_FORK_TIMEOUT_S = 600.0  # the parent imports first
_KILL_TIMEOUT_S = 30.0
_STRAGGLERS_TIMEOUT_S = 2.0
_numbers = itertools.count()
_left_services: list[subprocess.Popen[bytes]] = []  # they outlive their engine; kept to be reaped


@dataclass
class _Worker:
    process: Process
    share: Share
    exited: bool = False


@dataclass
class _Service:
    process: Process
    popen: subprocess.Popen[bytes]
    pidfd: int


class LocalEngine:
    """Runs processes on this machine. All engines of a driver share one warm parent."""

    def __init__(self) -> None:
        self._node = this_machine()
        self._ledger = Ledger(self._node)
        self._switchboard = Switchboard()
        self._parent: Peer | None = None
        self._workers: dict[str, _Worker] = {}
        self._services: dict[str, _Service] = {}
        self._forked: dict[str, int | str] = {}  # the parent's answers: a pid, or why there is none
        self._early: list[dict[str, Any]] = []  # notices of ranks whose gang is not whole yet
        self._closed = False

    @classmethod
    def prepare(cls, modules: Iterable[str], threads: int = 1) -> None:
        """Starts the warm parent in the background and returns at once.

        Args:
            modules: names of modules that the script has imported (`sys.modules` will do); the parent imports those of
                a short list of heavy ones. Later calls may name more.
            threads: `OMP_NUM_THREADS` of the parent, unless the environment has it.
        """
        parent.prepare(modules, threads)

    def nodes(self) -> list[Node]:
        return [self._node]

    def check(self, ranks: Sequence[ProcessSpec]) -> None:
        """Says whether this machine could run these ranks at all; what runs now does not count.

        Raises:
            EngineError: it could not; the message says what to change.
        """
        self._ledger.check(ranks)

    def start_gang(self, ranks: Sequence[ProcessSpec]) -> list[Process]:
        shares = self._ledger.take(ranks)
        try:
            return self._fork_gang(ranks, shares)
        except BaseException:
            for share in shares:
                self._ledger.give_back(share)
            raise

    def _fork_gang(self, ranks: Sequence[ProcessSpec], shares: Sequence[Share]) -> list[Process]:
        for last_try in (False, True):
            try:
                forked = self._request_forks(ranks, shares)
                break
            except EOFError:  # the parent died since it was last used
                if self._parent is not None:
                    self._lose_parent()
                if last_try:
                    raise EngineError(
                        f"{len(ranks)} workers were to be started; the process that starts them {parent.fate()}"
                    ) from None
        for (process, peer), share in zip(forked, shares, strict=True):
            self._workers[process.id] = _Worker(process, share)
            self._switchboard.connect(process, peer)
        for notice in self._early:
            if notice.get("exit", notice.get("gone")) in self._workers:
                self._take_notice(notice)
        self._early.clear()
        return [process for process, _ in forked]

    def _request_forks(self, ranks: Sequence[ProcessSpec], shares: Sequence[Share]) -> list[tuple[Process, Peer]]:
        peers: dict[str, Peer] = {}
        try:
            for rank, share in zip(ranks, shares, strict=True):
                id = f"rank-{next(_numbers)}"
                mine, its_end = pair()
                peers[id] = Peer(mine)
                with its_end:
                    self._request_fork(rank, share, id, its_end, peers[id])
            pids = self._await_forks(list(peers))
        except BaseException:
            self._abandon(peers)
            raise
        return [
            (Process(id, rank.name, self._node.id, pids[id]), peer)
            for (id, peer), rank in zip(peers.items(), ranks, strict=True)
        ]

    def _abandon(self, peers: dict[str, Peer]) -> None:
        for id, peer in peers.items():
            peer.close()
            with suppress(EOFError):
                if self._parent is not None:
                    self._tell_parent({"signal": id, "number": int(signal.SIGKILL)})

    def _request_fork(self, spec: ProcessSpec, share: Share, id: str, its_end: socket.socket, peer: Peer) -> None:
        threads = {"OMP_NUM_THREADS": str(max(1, int(spec.cpus)))}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if self._node.gpus else {}
        self._tell_parent({"fork": id}, its_end)
        peer.send(Surroundings.of(spec, defaults=threads, assigned=gpus).encode())
        peer.send(spec.payload)

    def _await_forks(self, ids: Sequence[str]) -> dict[str, int]:
        deadline = time.monotonic() + _FORK_TIMEOUT_S
        assert self._parent is not None
        while not all(id in self._forked for id in ids):
            if not select.select([self._parent.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineError(
                    f"{len(ids)} workers were to be started; the process that starts them has not answered for "
                    f"{_FORK_TIMEOUT_S:.0f} s: is one of the modules that the script imports waiting for something?"
                )
            self._hear_parent(self._parent)
            if self._parent is None:
                raise EOFError
        answers = {id: self._forked.pop(id) for id in ids}
        failed = [answer for answer in answers.values() if isinstance(answer, str)]
        if failed:
            raise EngineError(f"{len(ids)} workers were to be started; the system refused to fork: {failed[0]}")
        return {id: int(answer) for id, answer in answers.items()}

    def _tell_parent(self, request: plain.Plain, *sockets: socket.socket) -> None:
        if self._parent is None:
            self._parent = Peer(parent.connect())
            self._switchboard.watch(self._parent.socket, partial(self._hear_parent, self._parent))
        data = b"".join(frame(plain.encode(request)))
        while True:
            try:
                socket.send_fds(self._parent.socket, [data], [sock.fileno() for sock in sockets])
                return
            except BlockingIOError:
                select.select([], [self._parent.socket], [], 1.0)
            except OSError as error:
                raise EOFError from error

    def _hear_parent(self, peer: Peer) -> None:
        if peer is not self._parent:  # lost by an event of the same turn
            return
        for message in map(plain.decode, peer.read()):
            self._take_notice(message)
        if peer.ended:
            self._lose_parent()

    def _take_notice(self, notice: dict[str, Any]) -> None:
        if "forked" in notice:
            self._forked[notice["forked"]] = notice["pid"]
        elif "failed" in notice:
            self._forked[notice["failed"]] = notice["error"]
        elif notice.get("exit", notice.get("gone")) not in self._workers:
            self._early.append(notice)  # its gang is still being started; or was given up
        elif "exit" in notice:
            self._worker_exited(self._workers[notice["exit"]], notice["status"])
        else:
            del self._workers[notice["gone"]]

    def _worker_exited(self, worker: _Worker, status: int) -> None:
        worker.exited = True
        self._ledger.give_back(worker.share)
        self._switchboard.exited(worker.process, status)

    def _lose_parent(self) -> None:
        """The parent is dead: so are its workers, in a moment; here that moment is waited for."""
        assert self._parent is not None
        self._switchboard.unwatch(self._parent.socket)
        self._parent.close()
        self._parent = None
        self._forked.clear()
        for worker in self._workers.values():
            _kill_group(worker.process.pid)
        for worker in self._workers.values():
            if not worker.exited:
                _await_death(worker.process.pid, _KILL_TIMEOUT_S)
                self._worker_exited(worker, -signal.SIGKILL)
        self._workers.clear()

    def start_service(self, spec: ProcessSpec) -> Process:
        """As the protocol says; without a file its output is dropped: it may outlive the terminal and every pipe."""
        _reap_left_services()
        mine, its_end = pair()
        popen = interpreter.start(
            "holdfast.engines.service", its_end, {**os.environ, **spec.env}, subprocess.DEVNULL, subprocess.DEVNULL
        )
        process = Process(f"service-{next(_numbers)}", spec.name, self._node.id, popen.pid)
        service = _Service(process, popen, os.pidfd_open(popen.pid))
        self._services[process.id] = service
        peer = Peer(mine)
        peer.send(Surroundings.of(spec, {}, {}).encode())
        peer.send(spec.payload)
        self._switchboard.connect(process, peer)
        self._switchboard.watch(service.pidfd, partial(self._service_exited, service))
        return process

    def _service_exited(self, service: _Service) -> None:
        if self._services.pop(service.process.id, None) is None:
            return
        self._switchboard.unwatch(service.pidfd)
        os.close(service.pidfd)
        _kill_group(service.popen.pid)  # before wait: until then nobody else can have this number
        self._switchboard.exited(service.process, service.popen.wait())

    def poll(self) -> list[Message | Exit]:
        return self._switchboard.poll()

    def wait(self, timeout_s: float) -> None:
        self._switchboard.wait(timeout_s)

    def wake(self) -> None:
        self._switchboard.wake()

    def send(self, process: Process, data: bytes) -> None:
        self._switchboard.send(process, data)

    def stop(self, processes: Sequence[Process], grace_s: float = 0.0) -> None:
        """As the protocol says; their last messages and their exits are still to be polled."""
        ids = [process.id for process in processes]
        if grace_s > 0:
            self._signal(ids, signal.SIGTERM)
            self._turn_until(lambda: not self._living(ids), grace_s)
        self._signal(ids, signal.SIGKILL)
        if not self._turn_until(lambda: not self._living(ids), _KILL_TIMEOUT_S):
            raise EngineError(
                f"{', '.join(self._living(ids))} got SIGKILL and still lives after {_KILL_TIMEOUT_S:.0f} s: it waits "
                "in the kernel, for a file system or a device that does not answer"
            )
        self._turn_until(lambda: not any(id in self._workers for id in ids), _STRAGGLERS_TIMEOUT_S)

    def _living(self, ids: Iterable[str]) -> list[str]:
        workers = [self._workers[id] for id in ids if id in self._workers]
        services = [self._services[id] for id in ids if id in self._services]
        return [f"{worker.process.name} (pid {worker.process.pid})" for worker in workers if not worker.exited] + [
            f"{service.process.name} (pid {service.process.pid})" for service in services
        ]

    def _signal(self, ids: Iterable[str], number: signal.Signals) -> None:
        for id in ids:
            if id in self._services:
                _kill_group(self._services[id].popen.pid, number)
            elif id in self._workers and not self._workers[id].exited:
                try:
                    self._tell_parent({"signal": id, "number": int(number)})
                except EOFError:  # its death is heard in the next turn
                    return

    def _turn_until(self, reached: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not reached():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._switchboard.turn(left)
        return True

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.stop([worker.process for worker in self._workers.values()])
        if self._parent is not None:
            self._switchboard.unwatch(self._parent.socket)
            self._parent.close()
        for service in self._services.values():
            self._switchboard.unwatch(service.pidfd)
            os.close(service.pidfd)
            _left_services.append(service.popen)
        self._services.clear()
        self._switchboard.close()


def _kill_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _await_death(pid: int, timeout_s: float) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        select.select([pidfd], [], [], timeout_s)
    finally:
        os.close(pidfd)


def _reap_left_services() -> None:
    _left_services[:] = [popen for popen in _left_services if popen.poll() is None]


def _conforms(engine: LocalEngine) -> Engine:
    return engine
