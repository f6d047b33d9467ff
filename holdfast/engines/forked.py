"""A worker, just forked from the warm parent: what makes it an ordinary process."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from holdfast.engines import entry
from holdfast.engines.connection import Connection

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_worker(sock: socket.socket, parent_pid: int, handlers: Mapping[int, Any]) -> None:
    """Runs the entry that comes over `sock`, and ends this process; `handlers` are those the parent has changed."""
    status = 1
    try:
        _leave_parent(parent_pid, handlers)
        status = _run(Connection(sock))
    except BaseException:
        traceback.print_exc()
    finally:
        entry.finish(status)


def adopt_orphans() -> None:
    """Makes this process the parent of all that its workers leave behind, so that it can see them end."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _leave_parent(parent_pid: int, handlers: Mapping[int, Any]) -> None:
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number, handler in {**handlers, signal.SIGCHLD: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}.items():
        signal.signal(number, handler)
    gc.enable()


def _run(connection: Connection) -> int:
    surroundings = entry.Surroundings.decode(_received(connection))
    payload = _received(connection)
    surroundings.enter()
    _libc.prctl(_PR_SET_NAME, surroundings.name.encode()[:15], 0, 0, 0)
    importlib.invalidate_caches()
    _reseed()
    _set_threads(os.environ.get("OMP_NUM_THREADS", ""))
    return entry.call(surroundings.entry, connection, payload)


def _received(connection: Connection) -> bytes:
    data = connection.receive()
    assert data is not None
    return data


def _reseed() -> None:
    """Gives this process random numbers of its own: a fork has those of its parent."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_threads(said: str) -> None:
    """Tells a torch that was imported with the parent's number of threads."""
    torch = sys.modules.get("torch")
    if torch is not None and said.isdecimal() and int(said) > 0:
        torch.set_num_threads(int(said))
