"""What a measured script is told, and how its processes tell what they saw. Standard library only."""

from __future__ import annotations

import json
import os
import time
from typing import Any

CONFIG: dict[str, Any] = json.loads(os.environ.get("BENCH_CONFIG", "{}"))


def mark(name: str, **fields: Any) -> None:
    """Appends one line to the marks of this run, from any of its processes.

    The clock is CLOCK_MONOTONIC, which all processes of a machine share.
    """
    t = time.monotonic()
    line = json.dumps({"name": name, "t": t, "pid": os.getpid(), **fields}) + "\n"
    file = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
