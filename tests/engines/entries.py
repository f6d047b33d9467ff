"""What the processes of these tests do."""

from __future__ import annotations

import json
import os
import sys

from holdfast.engines.base import Channel


def say_where(channel: Channel, payload: bytes) -> None:
    """Tells what the process finds around it."""
    found = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "path": sys.path,
        "env": dict(os.environ),
        "payload": payload.decode(),
        "main": sorted(name for name in vars(sys.modules["__main__"]) if not name.startswith("__")),
    }
    channel.send(json.dumps(found).encode())


def echo(channel: Channel, payload: bytes) -> None:
    """Answers every message with itself, until the driver is gone."""
    while True:
        message = channel.receive()
        assert message is not None
        channel.send(message)


def do(channel: Channel, payload: bytes) -> None:
    """Runs the payload as a script that knows `channel`."""
    exec(compile(payload, "<payload>", "exec"), {"channel": channel, "__name__": "__payload__"})
