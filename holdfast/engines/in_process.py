"""No process at all: the one rank runs in the driver's main thread, where a debugger works."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from holdfast.engines import entry
from holdfast.engines.base import Engine, Exit, Message, Node, Process, ProcessSpec
from holdfast.engines.connection import Connection, Peer, pair
from holdfast.engines.resources import this_machine
from holdfast.engines.switchboard import Switchboard
from holdfast.errors import EngineError

T = TypeVar("T")
_numbers = itertools.count()
INTERRUPTED = -signal.SIGINT


@dataclass(frozen=True)
class _Call:
    """An entry that the main thread is asked to run."""

    process: Process
    spec: ProcessSpec
    channel: Connection


class InProcessEngine:
    """Runs a gang of one rank in the thread that calls `run`, and services in threads.

    The rank cannot be killed: `stop` closes its channel and returns when its entry has returned.
    """

    def __init__(self) -> None:
        self._node = this_machine()
        self._switchboard = Switchboard()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()  # None: the loop has ended
        self._interrupted = False

    def run(self, loop: Callable[[], T]) -> T:
        """Runs `loop`, which may call the other methods, in a thread, and the entries it starts here.

        Returns what `loop` returns, or raises what it raises. Ctrl-C is raised here after the loop has seen the rank's
        exit (with status -2) and has returned; a second Ctrl-C at once.
        """
        outcome: list[Callable[[], T]] = []
        thread = threading.Thread(target=self._run_loop, args=(loop, outcome), name="holdfast", daemon=True)
        thread.start()
        while True:
            try:
                called = self._calls.get()
                if called is None:
                    break
                self._execute(called)
            except KeyboardInterrupt:
                self._interrupt()
        thread.join()
        if self._interrupted:
            raise KeyboardInterrupt
        return outcome[0]()

    def _run_loop(self, loop: Callable[[], T], outcome: list[Callable[[], T]]) -> None:
        try:
            value = loop()
            outcome.append(lambda: value)
        except BaseException as error:
            outcome.append(_raiser(error))
        finally:
            self._switchboard.silence_all()  # an entry that still runs must end, or `run` could not
            self._calls.put(None)

    def _interrupt(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        self.wake()

    def _execute(self, call: _Call) -> None:
        status = INTERRUPTED
        try:
            if not self._interrupted:
                with entry.environment(call.spec.env):
                    status = _status(call)
        except KeyboardInterrupt:
            self._interrupt()  # before the exit is announced: nothing is to be started after it
        finally:
            call.channel.release()
            self._switchboard.announce(call.process, status)

    def nodes(self) -> list[Node]:
        return [self._node]

    def check(self, ranks: Sequence[ProcessSpec]) -> None:
        """Says whether these ranks could run.

        Raises:
            EngineError: they are not one.
        """
        if len(ranks) != 1:
            raise EngineError(f"{len(ranks)} workers were to be started in this process, which can run one at a time")

    def start_gang(self, ranks: Sequence[ProcessSpec]) -> list[Process]:
        self.check(ranks)
        if self._interrupted:
            raise EngineError("stopped by Ctrl-C: what was reported is kept; the same script goes on from there")
        process, channel = self._connect("rank", ranks[0])
        self._calls.put(_Call(process, ranks[0], channel))
        return [process]

    def start_service(self, spec: ProcessSpec) -> Process:
        """Starts a thread: it ends with this process."""
        process, channel = self._connect("service", spec)
        threading.Thread(target=self._serve, args=(process, spec, channel), name=spec.name, daemon=True).start()
        return process

    def _connect(self, kind: str, spec: ProcessSpec) -> tuple[Process, Connection]:
        process = Process(f"{kind}-here-{next(_numbers)}", spec.name, self._node.id, os.getpid())
        mine, its_end = pair()
        self._switchboard.connect(process, Peer(mine))
        return process, Connection(its_end)

    def _serve(self, process: Process, spec: ProcessSpec, channel: Connection) -> None:
        status = entry.call(spec.entry, channel, spec.payload)
        channel.release()
        self._switchboard.announce(process, status)

    def poll(self) -> list[Message | Exit]:
        return self._switchboard.poll()

    def wait(self, timeout_s: float) -> None:
        self._switchboard.wait(timeout_s)

    def wake(self) -> None:
        self._switchboard.wake()

    def send(self, process: Process, data: bytes) -> None:
        self._switchboard.send(process, data)

    def stop(self, processes: Sequence[Process], grace_s: float = 0.0) -> None:
        """Closes the channels of these processes and returns when their entries have returned, whatever the grace."""
        for process in processes:
            self._switchboard.silence(process)
        while any(self._switchboard.connected(process) for process in processes):
            self._switchboard.turn(None)

    def close(self) -> None:
        self._switchboard.close()


def _status(call: _Call) -> int:
    try:
        entry.find(call.spec.entry)(call.channel, call.spec.payload)
    except SystemExit as end:
        return entry.status_of(end)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _raiser(error: BaseException) -> Callable[[], NoReturn]:
    def raise_it() -> NoReturn:
        raise error

    return raise_it


def _conforms(engine: InProcessEngine) -> Engine:
    return engine
