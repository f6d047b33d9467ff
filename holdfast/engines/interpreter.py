"""Starts a fresh interpreter that has the driver's `sys.path`, options and environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import IO


def start(
    module: str,
    sock: socket.socket,
    env: Mapping[str, str],
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `module.main(descriptor of sock, pid of this process)` in a session of its own; closes `sock` here."""
    # not `-m`: that would look for the package before sys.path is ours
    program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; main({sock.fileno()}, {os.getpid()})"
    with sock:
        return subprocess.Popen(
            [sys.executable, *_options(), "-c", program],
            pass_fds=[sock.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
        )


def _options() -> list[str]:
    names = [name if value is True else f"{name}={value}" for name, value in sys._xoptions.items()]
    return [*(f"-W{option}" for option in sys.warnoptions), *(f"-X{name}" for name in names)]
