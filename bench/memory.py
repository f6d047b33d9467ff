"""What the system itself weighs while two workers train: everything but the workers and the script's own imports."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench import processes
from bench.figure import OURS, Figure, Target
from bench.side import Bench, Run, Side, note, tried

IMPORTS = "import os, tempfile, time, numpy, torch"
MEGABYTE = 10**6


def figures(bench: Bench) -> list[Figure]:
    """Weighs driver, keeper, clean parent and the whole tree, by PSS, while the workers are resident."""
    made = {
        "system": Figure(
            "memory: driver and keeper above the script's imports",
            "MB PSS",
            Target("value", 60),
            "ray: all its processes but the training workers",
        ),
        "driver": Figure("memory: the driver alone, above the script's imports", "MB PSS"),
        "parent": Figure("memory: the clean parent, with what it has imported", "MB PSS"),
        "tree": Figure("memory: everything, script and workers included", "MB PSS"),
        "count": Figure("processes, script and workers included", ""),
    }
    for _, side in bench.interleaved():
        tried(side, "memory", _measure, bench, side, made)
    return list(made.values())


def _measure(bench: Bench, side: Side, made: dict[str, Figure]) -> None:
    with bench.started(side, "resident", {}) as run, _bare(side) as bare_pid:
        run.wait_for("resident", 2, timeout_s=180)
        time.sleep(2)
        _weigh(side, run, bare_pid, made)
        (run.marks_path.parent / "data" / "go").touch()
        run.wait(120)


def _weigh(side: Side, run: Run, bare_pid: int, made: dict[str, Figure]) -> None:
    """Reads all weights in one go. The bare interpreter is alive too: it shares pages as the driver does."""
    driver, workers = run.process.pid, {mark["pid"] for mark in run.named("resident")}
    ours = processes.descendants(os.getpid()) - processes.descendants(bare_pid) - {bare_pid}
    parent_of = processes.parents()
    pss = {pid: processes.weigh(pid).pss_bytes / MEGABYTE for pid in {*ours, bare_pid}}
    clean_parents = {parent_of[pid] for pid in workers} - {driver} if side.name == OURS else set()
    system = ours - workers - clean_parents
    made["system"].add(side.name, sum(pss[pid] for pid in system) - pss[bare_pid])
    made["driver"].add(side.name, pss[driver] - pss[bare_pid])
    made["tree"].add(side.name, sum(pss[pid] for pid in ours))
    made["count"].add(side.name, len(ours))
    if clean_parents:
        made["parent"].add(side.name, sum(pss[pid] for pid in clean_parents))
    for pid in sorted(ours, key=lambda pid: -pss[pid]):
        note(f"memory: {side.name}: {pss[pid]:7.1f} MB  {_role(side, pid, driver, workers, clean_parents)}")


def _role(side: Side, pid: int, driver: int, workers: set[int], clean_parents: set[int]) -> str:
    if pid == driver:
        return "driver"
    if pid in workers:
        return "training worker"
    if pid in clean_parents:
        return "clean parent"
    return "keeper" if side.name == OURS else processes.command(pid)[:80]


@contextmanager
def _bare(side: Side) -> Iterator[int]:
    """An interpreter that has imported what the script imports, and nothing else."""
    program = f"{IMPORTS}\nprint('ready', flush=True)\ninput()"
    process = subprocess.Popen(
        [side.python, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.communicate("\n")
