"""The entry of the interpreter that becomes a service: not forked from the warm parent, so that it stays small."""

from __future__ import annotations

import os
import socket
import sys

from holdfast.engines import entry
from holdfast.engines.connection import Connection


def main(descriptor: int, driver_pid: int) -> None:
    """Runs the entry that comes over the socket."""
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    connection = Connection(sock)
    surroundings = entry.Surroundings.decode(connection.receive() or b"")
    payload = connection.receive() or b""
    surroundings.enter()
    status = entry.call(surroundings.entry, connection, payload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status) if status else sys.exit(0)
