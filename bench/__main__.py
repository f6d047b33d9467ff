"""`python -m bench`: measures ours, the machine's limit and Ray in one run, prints a table, keeps the samples as JSON.

    python -m bench                          everything, three rounds (half an hour with Ray)
    python -m bench --quick                  one round, fewer repeats
    python -m bench --only resume            one benchmark: import, start, report, resume, memory
    python -m bench --only report:durable    one case of it
    python -m bench --no-ray                 ours and the limits alone

It judges nothing: the exit status is 0 when all ran, whatever the figures are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import imports, memory, processes, report, resume, start
from bench.figure import Figure, table
from bench.ray_environment import ray_python
from bench.side import Bench, note, sides

RESULTS = Path(__file__).resolve().parent / "results"
BENCHMARKS: dict[str, Callable[[Bench], list[Figure]]] = {
    "import": imports.figures,
    "start": start.figures,
    "report": report.figures,
    "resume": resume.figures,
    "memory": memory.figures,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for and returns the exit status."""
    asked = _parser().parse_args(arguments)
    processes.adopt_orphans()
    RESULTS.mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="data-", dir=RESULTS))
    try:
        found = _measure(asked, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"\n{_write(found, asked)}")
    return 0


def _measure(asked: argparse.Namespace, directory: Path) -> list[Figure]:
    with_ours = importlib.util.find_spec("holdfast.train") is not None
    if not with_ours:
        note("holdfast.train is not there: the limits and Ray alone")
    taking_turns = sides(None if asked.no_ray else ray_python(), with_ours)
    cases = _cases(asked.only)
    found = []
    for name, figures in BENCHMARKS.items():
        if not cases or name in cases:
            rounds = asked.rounds or (1 if asked.quick else 3)
            measured = figures(Bench(taking_turns, rounds, asked.quick, directory, frozenset(cases.get(name, ()))))
            print(table(measured), flush=True)  # at once: what comes next may take minutes, and be broken off
            found += measured
    return found


def _cases(only: Sequence[str]) -> dict[str, set[str]]:
    """Returns benchmark -> its cases that were named; none: all."""
    cases: dict[str, set[str]] = {}
    for text in only:
        name, _, case = text.partition(":")
        if name not in BENCHMARKS:
            raise SystemExit(f"bench: there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
        cases.setdefault(name, set()).update({case} - {""})
    return cases


def _write(found: Sequence[Figure], asked: argparse.Namespace) -> Path:
    path = RESULTS / time.strftime("%Y%m%d-%H%M%S.json")
    content = {"machine": _machine(), "asked": vars(asked), "figures": [figure.as_dict() for figure in found]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _machine() -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, fewer repeats")
    parser.add_argument("--rounds", type=int, help="how often the sides take turns (default: 3, quick: 1)")
    parser.add_argument("--only", action="append", default=[], metavar="NAME[:CASE]", help="may be repeated")
    parser.add_argument("--no-ray", action="store_true", help="ours and the limits alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
