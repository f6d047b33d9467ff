"""The driver's side of its warm parent: starts it, tells it what to import, opens connections with it."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable
from contextlib import suppress

from holdfast import plain
from holdfast.engines import interpreter
from holdfast.engines.connection import frame, pair
from holdfast.errors import EngineError

# What takes long to import and can be forked afterwards: not tensorflow and jax, whose imports start threads.
HEAVY = (
    "numpy",
    "torch",
    "scipy",
    "pandas",
    "pyarrow",
    "sklearn",
    "transformers",
    "datasets",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "torchvision",
    "keras",
    "xgboost",
    "lightgbm",
    "cloudpickle",
    "xxhash",
)
# What these import on first use, in each worker anew: the first optimizer of torch imports this for almost a second.
LATER = {"torch": ("torch._dynamo",)}
_END_TIMEOUT_S = 5.0


class _Parent:
    """One warm parent."""

    def __init__(self, threads: int) -> None:
        self.owner_pid = os.getpid()
        self._modules: list[str] = []
        self._socket, its_end = pair()
        self._process = interpreter.start(
            "holdfast.engines.warm", its_end, {"OMP_NUM_THREADS": str(threads), **os.environ}
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def load(self, modules: Iterable[str]) -> None:
        new = [name for name in modules if name not in self._modules]
        self._modules += new
        if new:
            self._tell({"import": new, "later": [later for name in new for later in LATER.get(name, ())]})

    def open(self) -> socket.socket:
        mine, its_end = pair()
        with its_end:
            try:
                self._tell({"engine": True}, its_end)
            except EngineError:
                mine.close()
                raise
        return mine

    def _tell(self, request: plain.Plain, *sockets: socket.socket) -> None:
        try:
            socket.send_fds(self._socket, frame(plain.encode(request)), [sock.fileno() for sock in sockets])
        except OSError as error:
            raise EngineError(f"the process that starts workers {self.fate()}") from error

    def fate(self) -> str:
        try:
            status = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection, but lives"
        return f"ended with status {status}, with these modules to import: {', '.join(self._modules) or 'none'}"

    def close(self) -> None:
        """Closes this end: the parent ends when all of them are closed."""
        self._socket.close()

    def end(self) -> None:
        self.close()
        self._process.send_signal(signal.SIGALRM)  # or it would end its import first
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Nursery:
    """The warm parent of this process: started when it is needed, and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parent: _Parent | None = None
        self._modules: list[str] = []
        self._threads = 1

    def prepare(self, modules: Iterable[str], threads: int) -> None:
        with self._lock:
            self._modules += [name for name in modules if name not in self._modules]
            self._threads = threads
            with suppress(EngineError):  # it has just died; the next gang starts another
                self._living().load(self._modules)

    def open(self) -> socket.socket:
        with self._lock:
            try:
                return self._opened(self._living())
            except EngineError:  # it died after `_living` had looked
                return self._opened(self._new())

    def _opened(self, parent: _Parent) -> socket.socket:
        parent.load(self._modules)
        return parent.open()

    def fate(self) -> str:
        with self._lock:
            return "is gone" if self._parent is None else self._parent.fate()

    def _living(self) -> _Parent:
        known = self._parent
        if known is None or known.owner_pid != os.getpid() or not known.alive:
            return self._new()
        return known

    def _new(self) -> _Parent:
        if self._parent is not None:
            self._parent.close()
        self._parent = _Parent(self._threads)
        return self._parent

    def end(self) -> None:
        if self._parent is not None and self._parent.owner_pid == os.getpid():
            self._parent.end()
            self._parent = None


_nursery = _Nursery()
atexit.register(_nursery.end)


def prepare(modules: Iterable[str], threads: int = 1) -> None:
    """Starts the warm parent in the background, and makes it import those of `modules` that are worth it."""
    given = list(modules)
    packages = [name for name in HEAVY if name in set(given)]
    _nursery.prepare(packages + list(filter(_is_part, given)), threads)


def _is_part(name: str) -> bool:
    """Whether it is a public part of a heavy package, as `sklearn.datasets`, or of this one."""
    package, _, part = name.partition(".")
    if package == "holdfast":
        return bool(part)
    return package in HEAVY and bool(part) and "." not in part and not part.startswith("_")


def connect() -> socket.socket:
    """Returns a new connection with the warm parent, for one engine.

    Raises:
        EngineError: it could not be started.
    """
    try:
        return _nursery.open()
    except OSError as error:
        raise EngineError(f"a process that starts workers was to be started: {error}") from error


def fate() -> str:
    """Says what became of the warm parent, for a message."""
    return _nursery.fate()
