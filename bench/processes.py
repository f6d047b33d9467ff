"""All processes that a measured script has started: found, weighed and ended. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Weight:
    """Memory of one process; `pss_bytes` counts a shared page by the share of this process."""

    rss_bytes: int
    pss_bytes: int


def adopt_orphans() -> None:
    """From now on what a descendant leaves behind becomes a child of this process, so none can hide.

    Environment variables would not find them: some rewrite the memory in which /proc shows them.
    """
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("this kernel has no child subreaper; benchmarks need Linux 3.4 or newer")


def parents() -> dict[int, int]:
    """Returns pid -> pid of its parent, of every process that is not a zombie."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields and fields[0] not in "ZX":
                found[int(entry.name)] = int(fields[1])
    return found


def descendants(pid: int) -> set[int]:
    """Returns every living process below `pid`."""
    parent_of = parents()
    below: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parent_of.items() if parent in level} - below
        below |= level
    return below


def weigh(pid: int) -> Weight:
    """Returns what a process weighs now; nothing if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return Weight(0, 0)
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:] if line.endswith("kB")}
    return Weight(kilobytes.get("Rss", 0) * 1024, kilobytes.get("Pss", 0) * 1024)


def command(pid: int) -> str:
    """Returns a process's command line, for people."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def left_behind(grace_s: float) -> set[int]:
    """Returns what still lives below this process after `grace_s`."""
    deadline = time.monotonic() + grace_s
    while (alive := descendants(os.getpid())) and time.monotonic() < deadline:
        _reap()
        time.sleep(0.05)
    return alive


def end(pids: set[int], deadline_s: float = 20.0) -> None:
    """Ends these processes, all of which are descendants of this one, and what they start meanwhile."""
    deadline = time.monotonic() + deadline_s
    while pids and time.monotonic() < deadline:
        for pid in pids:
            _kill(pid)
        time.sleep(0.05)
        _reap()
        pids = {pid for root in pids for pid in {root} | descendants(root)} & descendants(os.getpid())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _reap() -> None:
    """Takes the exit status of adopted orphans; the script itself is gone by then, so none is taken from Popen."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()
