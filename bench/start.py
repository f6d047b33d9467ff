"""The toy example on two workers: from the start of the script to its end, and to the function's first line."""

from __future__ import annotations

import subprocess
import time

from bench.figure import LIMIT, Figure, Target
from bench.side import Bench, Run, Side, tried

IMPORTS = "import os, tempfile, numpy, torch, torch.nn, torch.optim"


def figures(bench: Bench) -> list[Figure]:
    """Measures the whole process, the first gang and a second gang of the same script."""
    whole = Figure(
        "toy on two workers, whole process", "s", Target("ray", 5), "limit: a process that imports its modules"
    )
    first = Figure(
        "toy, construction of the trainer to the function's first line",
        "s",
        Target("limit", 1.2),
        "of the later rank; limit: bare import of its modules, in a fresh interpreter",
    )
    second = Figure("toy, second gang: fit() to the function's first line", "s", Target("value", 0.1))
    for round_, side in bench.interleaved():
        if round_ == 0 and side is bench.sides[0]:
            _bare_import(side)
        process_s, import_s = _bare_import(side)
        whole.add(LIMIT, process_s)
        first.add(LIMIT, import_s)
        tried(side, "start", _once, bench, side, whole, first)
        tried(side, "start, two gangs", _twice, bench, side, second)
    return [whole, first, second]


def _once(bench: Bench, side: Side, whole: Figure, first: Figure) -> None:
    run = bench.run(side, "toy", {"fits": 1})
    whole.add(side.name, run.seconds)
    first.add(side.name, _first_line(run, 0) - run.named("constructing")[0]["t"])


def _twice(bench: Bench, side: Side, second: Figure) -> None:
    run = bench.run(side, "toy", {"fits": 2})
    second.add(side.name, _first_line(run, 1) - run.named("fitting")[1]["t"])


def _first_line(run: Run, fit: int) -> float:
    lines: list[float] = [mark["t"] for mark in run.named("first line") if mark["fit"] == fit]
    return max(lines)


def _bare_import(side: Side) -> tuple[float, float]:
    """Returns the seconds of the whole process, and of the imports in it."""
    start = time.monotonic()
    program = f"import time; t = time.perf_counter(); {IMPORTS}; print(time.perf_counter() - t)"
    done = subprocess.run([side.python, "-c", program], check=True, capture_output=True, text=True, cwd="/")
    seconds = time.monotonic() - start
    return seconds, float(done.stdout)
