"""Kills runs at random moments, and looks at what is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.store import CheckpointStore
from holdfast.storage.local import LocalStorage
from tests.crash.program import notes

TOKEN = "HOLDFAST_CRASH_TOKEN"
_START_DEADLINE_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What a round of killing showed."""

    kills: int = 0
    reports: int = 0
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        found = "; ".join(self.violations) or "nothing lost, nothing torn, nothing left over"
        return f"{self.kills} kills, {self.reports} reports returned, {self.seconds:.0f} s: {found}"


def kill_everything(folder: Path, kills: int, size_bytes: int, seed: int) -> Outcome:
    """Kills a run's whole process tree, keeper included, `kills` times at random moments; then lets it end."""
    choose, outcome, began = random.Random(seed), Outcome(), time.monotonic()
    for _ in range(kills):
        run = _start(folder, size_bytes, iterations=10**9, max_failures=0)
        _await(lambda run=run: run.poll() is not None or _grown(folder, "workers"), "the run to start")
        time.sleep(choose.expovariate(1 / 0.25) if choose.random() < 0.8 else choose.uniform(0, 0.03))
        if run.poll() is not None:
            outcome.violations.append(f"the run ended by itself with status {run.returncode}: {_last_words(folder)}")
            break
        _kill_all(str(folder))
        run.wait()
        outcome.kills += 1
    _finish(folder, size_bytes, outcome)
    outcome.seconds = time.monotonic() - began
    return outcome


def kill_workers(folder: Path, kills: int, size_bytes: int, seed: int) -> Outcome:
    """Kills one worker of one run `kills` times at random moments; the run starts its workers again by itself."""
    choose, outcome, began = random.Random(seed), Outcome(), time.monotonic()
    run = _start(folder, size_bytes, iterations=10**9, max_failures=-1)
    for _ in range(kills):
        _await(
            lambda: run.poll() is not None or len(notes(folder, "workers")) >= 2 * (outcome.kills + 1), "new workers"
        )
        if run.poll() is not None:
            outcome.violations.append(f"the run ended by itself with status {run.returncode}: {_last_words(folder)}")
            break
        time.sleep(choose.expovariate(1 / 0.15))
        newest = dict(line.split() for line in notes(folder, "workers"))
        os.kill(int(newest[str(choose.randrange(2))]), signal.SIGKILL)
        outcome.kills += 1
    (folder / "stop").touch()
    if run.poll() is None:
        _await(lambda: run.poll() is not None, "the run to end")
    _finish(folder, size_bytes, outcome)
    outcome.seconds = time.monotonic() - began
    return outcome


def _start(folder: Path, size_bytes: int, iterations: int, max_failures: int) -> subprocess.Popen[bytes]:
    _grown(folder, "workers")
    with open(folder / "output", "ab") as output:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.crash.program",
                str(folder),
                str(size_bytes),
                str(iterations),
                str(max_failures),
            ],
            cwd=ROOT,
            env={**os.environ, TOKEN: str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


_seen: dict[tuple[Path, str], int] = {}


def _grown(folder: Path, name: str) -> bool:
    """Whether two lines more are in a file of notes than at the last call."""
    lines = len(notes(folder, name))
    grown = lines >= _seen.get((folder, name), 0) + 2
    if grown or (folder, name) not in _seen:
        _seen[folder, name] = lines
    return grown


def _finish(folder: Path, size_bytes: int, outcome: Outcome) -> None:
    (folder / "stop").touch()
    run = _start(folder, size_bytes, iterations=10**9, max_failures=0)
    try:
        run.wait(_START_DEADLINE_S)
    except subprocess.TimeoutExpired:
        _kill_all(str(folder))
        outcome.violations.append("the last run did not end")
    if run.returncode != 0:
        outcome.violations.append(f"the last run failed: {_last_words(folder)}")
    outcome.reports = len(notes(folder, "returned"))
    outcome.violations += notes(folder, "violations") + what_is_wrong(folder / "killed")
    outcome.violations += [f"process {pid} is left over" for pid in _alive(str(folder))]


def what_is_wrong(root: Path) -> list[str]:
    """Returns what is wrong in an experiment's folder after its run has ended, in words."""
    store = CheckpointStore(LocalStorage(root))
    wrong = [problem for number in store.list() for problem in store.verify(number)]
    if len(store.list()) > 3:
        wrong.append(f"{len(store.list())} checkpoints are there; 2 were to be kept, and the newest")
    expected = {f"checkpoint_{number:06d}" for number in store.list()} | {"journal", "experiment.json"}
    logs = {f"rank{rank}.{stream}.log" for rank in range(2) for stream in ("stdout", "stderr")}
    return wrong + [f"{name} is left over" for name in sorted({*os.listdir(root)} - expected - logs)]


def _alive(token: str) -> list[int]:
    wanted = f"{TOKEN}={token}".encode()
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


def _kill_all(token: str) -> None:
    """Stops every process of a run, then kills them: for the file system they die in one moment."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in _alive(token):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
    _await(lambda: not _alive(token), "the killed processes to be gone")


def _await(condition: object, what: str) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_START_DEADLINE_S:.0f} s for {what}")
        time.sleep(0.002)


def _last_words(folder: Path) -> str:
    return (folder / "output").read_text()[-2000:]
