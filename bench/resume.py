"""From the SIGKILL of a worker to the first step of the resumed function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.figure import LIMIT, RAY_DEFAULT, Figure, Target
from bench.side import Bench, Run, ScriptFailed, Side, tried

SIZES = {"20MB": 20 * 10**6, "1GB": 10**9}


@dataclass(frozen=True)
class Resumption:
    """One kill: seconds until every rank has made a step, and the same without the user's own load."""

    to_step_s: float
    without_load_s: float


def figures(bench: Bench) -> list[Figure]:
    """Measures resumption with a small and a large checkpoint, and what each GB of it adds."""
    step = {
        "20MB": Figure("SIGKILL of a worker to the first resumed step, 20 MB", "s", Target("value", 0.3)),
        "1GB": Figure("SIGKILL of a worker to the first resumed step, 1 GB", "s"),
    }
    without = {
        "20MB": Figure("the same without the user's own load, 20 MB", "s"),
        "1GB": Figure("the same without the user's own load, 1 GB", "s"),
    }
    for figure in (*step.values(), *without.values()):
        figure.note = "limit: one read of the checkpoint's file"
    for _, side in bench.interleaved():
        for size in SIZES:
            if bench.wants(size):
                tried(side, f"resume, {size}", _measure, bench, side, size, step[size], without[size])
    per_gb = _per_gb(without, [side.name for side in bench.sides])
    return [step["20MB"], without["20MB"], step["1GB"], without["1GB"], per_gb]


def _measure(bench: Bench, side: Side, size: str, step: Figure, without: Figure) -> None:
    kills = 2 if bench.quick else 5
    settle_s = 3.0 if side.name == RAY_DEFAULT else 1.0
    run = bench.run(side, "kills", {"kills": kills, "size_bytes": SIZES[size], "settle_s": settle_s})
    found = _resumptions(run)
    step.add(side.name, [resumption.to_step_s for resumption in found])
    without.add(side.name, [resumption.without_load_s for resumption in found])
    if side is bench.sides[0]:
        for figure in (step, without):
            figure.add(LIMIT, [mark["seconds"] for mark in run.named("read")])


def _resumptions(run: Run) -> list[Resumption]:
    kills = [mark["t"] for mark in run.named("killed")]
    ends = [*kills[1:], float("inf")]
    return [_resumption(run, start, end) for start, end in zip(kills, ends, strict=True)]


def _resumption(run: Run, start: float, end: float) -> Resumption:
    """The last rank counts: a gang steps together."""
    steps = {m["rank"]: m["t"] for m in run.named("stepped") if start < m["t"] < end and m["resumed"]}
    if not steps:
        raise ScriptFailed("after a kill no rank went on from a checkpoint")
    loads = {m["rank"]: m["seconds"] for m in run.named("loaded") if start < m["t"] < end}
    return Resumption(
        to_step_s=max(steps.values()) - start,
        without_load_s=max(t - loads[rank] for rank, t in steps.items()) - start,
    )


def _per_gb(without: dict[str, Figure], names: Sequence[str]) -> Figure:
    """The slope between the two sizes. Medians, one sample a column: the two sizes are not pairs."""
    figure = Figure(
        "what each GB of checkpoint adds to the resumption",
        "s",
        Target("limit", 1.0),
        "between 20 MB and 1 GB, the user's own load not counted; limit: one read",
    )
    gigabytes = (SIZES["1GB"] - SIZES["20MB"]) / 1e9
    read = without["1GB"].spread(LIMIT)
    if read:
        figure.add(LIMIT, read.median / (SIZES["1GB"] / 1e9))
    for name in names:
        small, large = without["20MB"].spread(name), without["1GB"].spread(name)
        if small and large:
            figure.add(name, (large.median - small.median) / gigabytes)
    return figure
