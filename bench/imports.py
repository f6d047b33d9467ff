"""What an import costs, in seconds and memory, above a bare interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from bench.figure import LIMIT, OURS, RAY_DEFAULT, Figure, Target
from bench.side import REPOSITORY, Bench, Side, note

FRAMEWORKS = ("torch", "numpy", "pandas", "pyarrow", "tensorflow", "jax", "transformers", "lightning", "boto3", "ray")

PROBE = """
import json, sys, time
def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before, start = resident_bytes(), time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "bytes": resident_bytes() - before, "modules": sorted(sys.modules)}}))
"""


def figures(bench: Bench) -> list[Figure]:
    """Measures `import holdfast`, `from holdfast import train`, and the reference's counterpart."""
    package = Figure("import holdfast", "s", Target("value", 0.03), "limit: start and end of a bare interpreter")
    train = Figure("from holdfast import train", "s", Target("value", 0.1), "limit: as above")
    memory = Figure(
        "from holdfast import train, memory", "MB", Target("value", 25), "resident, above a bare interpreter"
    )
    loaded = Figure("from holdfast import train, frameworks loaded", "", Target("value", 0))
    for round_ in range(bench.rounds * 5 + 1):
        bare_s = _bare_s(bench)
        for side in bench.sides:
            if side.name in (OURS, RAY_DEFAULT):
                _probe(side, round_, (package, train, memory, loaded))
        if round_:
            package.add(LIMIT, bare_s)
            train.add(LIMIT, bare_s)
    return [package, train, memory, loaded]


def _probe(side: Side, round_: int, figures: tuple[Figure, Figure, Figure, Figure]) -> None:
    """One round of one side. The first warms the page cache and the byte code, and is dropped."""
    package, train, memory, loaded = figures
    try:
        alone = _imported(side.python, f"import {side.root}")
        with_train = _imported(side.python, f"from {side.root} import train; train.report; train.ScalingConfig")
    except subprocess.CalledProcessError as failure:
        note(f"import: {side.name}: {failure.stderr[-500:]}")
        return
    if round_:
        package.add(side.name, alone["seconds"])
        train.add(side.name, with_train["seconds"])
        memory.add(side.name, with_train["bytes"] / 1e6)
        loaded.add(side.name, len(set(with_train["modules"]) & set(FRAMEWORKS) - {side.root}))


def _imported(python: Path, statement: str) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", PROBE.format(statement=statement)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _bare_s(bench: Bench) -> float:
    start = time.monotonic()
    subprocess.run([bench.sides[0].python, "-c", "pass"], check=True, cwd="/")
    return time.monotonic() - start
