"""`python -m tests.crash`: what is long, or needs root, ptrace or mounts.

Each check prints what it found. What this machine forbids is listed as not run, and fails this command: a suite that
skips says nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.crash import damage, full_disk, killing

_SIZE_BYTES = 20_000_000


@dataclass(frozen=True)
class Check:
    """One thing that is tried; `run` returns what was wrong, in words, after what it prints."""

    name: str
    run: Callable[[Path], str]
    needs: Callable[[], str] = lambda: ""


def _killed(kill: Callable[..., killing.Outcome], kills: int, seed: int) -> Callable[[Path], str]:
    def run(folder: Path) -> str:
        outcome = kill(folder, kills=kills, size_bytes=_SIZE_BYTES, seed=seed)
        print(f"  {outcome}")
        return "; ".join(outcome.violations)

    return run


def _mounts() -> str:
    if os.geteuid() != 0:
        return "needs root, to mount a tmpfs"
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(
            ["mount", "-t", "tmpfs", "holdfast", folder], capture_output=True, text=True, check=False
        )
        if tried.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return tried.stderr.strip()


def _traces() -> str:
    if shutil.which("strace") is None:
        return "needs strace"
    tried = subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


def checks(kills: int, seed: int) -> list[Check]:
    return [
        Check(f"{kills} kills of everything, 20 MB", _killed(killing.kill_everything, kills, seed)),
        Check(f"{kills} kills of a worker, 20 MB", _killed(killing.kill_workers, kills, seed)),
        Check("each byte of a checkpoint flipped or cut", lambda folder: "; ".join(damage.flip_every_byte(folder))),
        Check("the journal cut at each byte", lambda folder: "; ".join(damage.cut_journal_everywhere(folder))),
        Check("a full disk that gets space back", full_disk.full_disk, _mounts),
        Check("system calls that fail", full_disk.failing_calls, _traces),
    ]


def main() -> int:
    """Runs the checks; returns how many found something or could not be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments of killing")
    parser.add_argument("--only", default="", help="checks whose name has this in it")
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    failed = 0
    for check in checks(asked.kills, asked.seed):
        if asked.only not in check.name:
            continue
        missing = check.needs()
        print(f"{check.name}: {'NOT RUN: ' + missing if missing else ''}", flush=True)
        failed += bool(missing) or not _passes(check)
    print("all held" if not failed else f"{failed} did not hold or were not run")
    return failed


def _passes(check: Check) -> bool:
    began = time.monotonic()
    # On the disk of the working tree: a temporary folder may be in memory.
    with tempfile.TemporaryDirectory(dir=killing.ROOT, prefix=".crash-") as folder:
        wrong = check.run(Path(folder))
    print(f"  {wrong or 'held'} ({time.monotonic() - began:.0f} s)", flush=True)
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
