"""What an engine is: it starts processes, carries messages, tells of deaths, ends what it started.

Entries are importable names or bytes, messages are bytes, files go by path: what a fork on this machine and an
actor of a cluster can both do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Node:
    """One machine: what processes may use there."""

    id: str
    host: str
    cpus: float
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start.

    Attributes:
        entry: `package.module:function`, called in the new process as `function(channel, payload)`.
        payload: what the entry gets.
        name: for people: `rank 0`, `keeper`.
        env: environment variables over those of the driver.
        cpus: cores it counts for; `OMP_NUM_THREADS` follows.
        gpus: GPUs it gets (`CUDA_VISIBLE_DEVICES`).
        stdout: the file its standard output is appended to; None: the driver's own, and nowhere for a service.
        stderr: as `stdout`.
    """

    entry: str
    payload: bytes
    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: float = 0.0
    stdout: Path | None = None
    stderr: Path | None = None


@dataclass(frozen=True)
class Process:
    """A process that was started; compares by its id."""

    id: str
    name: str = field(compare=False)
    node: str = field(compare=False)
    pid: int = field(compare=False, default=0)


@dataclass(frozen=True)
class Message:
    """Bytes from a process."""

    process: Process
    data: bytes


@dataclass(frozen=True)
class Exit:
    """A process is gone. All it had sent came before.

    Attributes:
        status: its exit status; negative: the signal that ended it.
    """

    process: Process
    status: int


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel(Protocol):
    """A process's own end of its connection with the driver."""

    def send(self, data: bytes) -> None:
        """Sends one message; safe from any thread.

        Raises:
            ChannelClosed: the driver is gone.
        """

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Returns the next message, or None when `timeout_s` has passed (0: what is there now; None: waits).

        Raises:
            ChannelClosed: the driver is gone and everything it sent has been returned.
        """


class Engine(Protocol):
    """Runs processes. All methods are called from one thread, but `wake`."""

    def nodes(self) -> list[Node]:
        """The machines, with all they have (not only what is free)."""

    def start_gang(self, ranks: Sequence[ProcessSpec]) -> list[Process]:
        """Starts ranked processes, all or none; does not wait for their entries to run.

        Raises:
            EngineError: they need more than there is, or could not be started.
        """

    def start_service(self, spec: ProcessSpec) -> Process:
        """Starts one long-lived process that outlives this driver if it wants to: in a session of its own."""

    def poll(self) -> list[Message | Exit]:
        """Returns what has arrived since the last call, in order for each process. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Returns when `poll` may have something, when `wake` was called, or after `timeout_s`."""

    def wake(self) -> None:
        """Makes `wait` return; from any thread."""

    def send(self, process: Process, data: bytes) -> None:
        """Sends one message; never blocks. A process that is gone gets nothing: its `Exit` tells."""

    def stop(self, processes: Sequence[Process], grace_s: float = 0.0) -> None:
        """Ends these processes and all they started (SIGTERM, after `grace_s` SIGKILL); returns when they are gone."""

    def close(self) -> None:
        """Ends all gangs. Services see their channel closed and end themselves."""
