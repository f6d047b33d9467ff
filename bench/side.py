"""The sides that are compared, and how each runs the same script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import processes
from bench.figure import OURS, RAY_DEFAULT, RAY_TUNED

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "scripts"


class ScriptFailed(Exception):
    """A measured script did not end well; its figures have no sample."""


@dataclass(frozen=True)
class Side:
    """One system under measurement: an interpreter, the import root of its scripts, its environment variables."""

    name: str
    python: Path
    root: str
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """One script while it runs, and what its processes have marked."""

    process: subprocess.Popen[bytes]
    marks_path: Path
    log_path: Path
    started: float
    seconds: float = 0.0

    @property
    def marks(self) -> list[dict[str, Any]]:
        """What was marked so far, in the order of writing."""
        if not self.marks_path.exists():
            return []
        return [json.loads(line) for line in self.marks_path.read_text().splitlines()]

    def named(self, name: str) -> list[dict[str, Any]]:
        """The marks of one name."""
        return [mark for mark in self.marks if mark["name"] == name]

    def wait(self, timeout_s: float) -> None:
        """Returns when the script has ended well.

        Raises:
            ScriptFailed: it ended otherwise, or not in time.
        """
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ScriptFailed(f"did not end within {timeout_s:g} s\n{self._tail()}") from None
        self.seconds = time.monotonic() - self.started
        if status != 0:
            raise ScriptFailed(f"ended with status {status}\n{self._tail()}")

    def wait_for(self, name: str, count: int, timeout_s: float) -> None:
        """Returns when `count` marks of a name are there.

        Raises:
            ScriptFailed: the script ended first, or they did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        while len(self.named(name)) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ScriptFailed(f"no mark {name!r} x {count}\n{self._tail()}")
            time.sleep(0.05)

    def _tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-3000:]


@dataclass(frozen=True)
class Bench:
    """What a benchmark gets: the sides, how often, and where it may write."""

    sides: Sequence[Side]
    rounds: int
    quick: bool
    directory: Path
    only: frozenset[str] = frozenset()

    def wants(self, case: str) -> bool:
        """Whether a case of a benchmark was asked for; all, if none was named."""
        return not self.only or case in self.only

    def interleaved(self) -> Iterator[tuple[int, Side]]:
        """Yields every side in turn, round after round: the machine's speed drifts."""
        for round_ in range(self.rounds):
            for side in self.sides:
                yield round_, side

    def run(self, side: Side, script: str, config: Mapping[str, Any], timeout_s: float = 600.0) -> Run:
        """Runs a script to its end and returns what it marked.

        Raises:
            ScriptFailed: it did not end well.
        """
        with self.started(side, script, config) as run:
            run.wait(timeout_s)
        return run

    @contextmanager
    def started(self, side: Side, script: str, config: Mapping[str, Any]) -> Iterator[Run]:
        """Starts a script; at the end all its processes and files are gone, its marks are kept."""
        directory = Path(tempfile.mkdtemp(prefix=f"{script}-", dir=self.directory))
        # Sockets of Ray lie below this one, and a socket's path has at most 107 characters: not in `directory`.
        short = Path(tempfile.mkdtemp(prefix="hb", dir="/tmp"))
        try:
            yield _start(side, script, directory, short, config)
        finally:
            left = processes.left_behind(grace_s=3.0)
            if left and side.name == OURS:
                note("left behind: " + "; ".join(processes.command(pid) for pid in left))
            processes.end(left)
            for name in ("data", "tmp"):
                shutil.rmtree(directory / name, ignore_errors=True)
            shutil.rmtree(short, ignore_errors=True)


def _start(side: Side, script: str, directory: Path, short: Path, config: Mapping[str, Any]) -> Run:
    for name in ("data", "tmp"):
        (directory / name).mkdir()
    source = directory / f"{script}.py"
    source.write_text(script_for(side, script))
    marks, log = directory / "marks.jsonl", directory / "log.txt"
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "BENCH_CONFIG": json.dumps({**config, "directory": str(directory / "data")}),
        "BENCH_MARKS": str(marks),
        # Temporary directories on the file system of the results: a copy between two would be another figure.
        "TMPDIR": str(directory / "tmp"),
        "RAY_TMPDIR": str(short),
        "RAY_USAGE_STATS_ENABLED": "0",
        **side.env,
    }
    with open(log, "wb") as output:
        started = time.monotonic()
        process = subprocess.Popen(
            [side.python, source], env=env, cwd=directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    return Run(process, marks, log, started)


def script_for(side: Side, script: str) -> str:
    """Returns a script with its import root changed, and nothing else."""
    return re.sub(r"\bholdfast\b", side.root, (SCRIPTS / f"{script}.py").read_text())


def sides(ray_python: Path | None, with_ours: bool) -> list[Side]:
    """Returns the sides in the order in which they take turns."""
    ours = [Side(OURS, Path(sys.executable), "holdfast")] if with_ours else []
    if ray_python is None:
        return ours
    tuned = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.05"}
    return [*ours, Side(RAY_TUNED, ray_python, "ray", tuned), Side(RAY_DEFAULT, ray_python, "ray")]


def note(text: str) -> None:
    """Says something about the measurement, beside the table."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def tried(side: Side, what: str, action: Callable[..., None], *arguments: object) -> None:
    """Measures one side once; if its script fails, says so and goes on."""
    note(f"{what}: {side.name}")
    try:
        action(*arguments)
    except ScriptFailed as failure:
        note(f"{what}: {side.name}: {failure}")
