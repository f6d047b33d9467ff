"""How long `report` keeps the training function, and how soon what it got is durable."""

from __future__ import annotations

from typing import Any

from bench.figure import LIMIT, OURS, RAY_DEFAULT, Figure, Target, percentile
from bench.side import Bench, Side, tried

GIGABYTE = 10**9


def figures(bench: Bench) -> list[Figure]:
    """Measures every case of `scripts/reports.py`, or those named by `--only report:CASE`."""
    made = _figures()
    for _, side in bench.interleaved():
        cases = {case: settings for case, settings in _cases(bench, side).items() if bench.wants(case)}
        if cases:
            tried(side, f"report, {', '.join(cases)}", _measure, bench, side, cases, made)
    return [figure for name, figure in made.items() if bench.wants(name.split("/")[0])]


def _figures() -> dict[str, Figure]:
    file, write = "1 GB", "the user's own write included on all sides"
    return {
        "metrics_only": Figure("report, metrics only: median", "ms", Target("value", 0.05), "limit: a socket message"),
        "metrics_only/p99": Figure("report, metrics only: p99", "ms", Target("value", 0.5)),
        "small": Figure(
            "report, 1 KB checkpoint: blocked", "ms", Target("value", 1), "steps of 0.1 s between; limit: a plain copy"
        ),
        "given": Figure(
            f"report, {file} written into checkpoint_dir(): blocked",
            "ms",
            Target("value", 5),
            "ray: its ASYNC upload; limit: a rename",
        ),
        "given/settled": Figure(f"report, {file} given away: return to committed", "s", None, "ray: to uploaded"),
        "copied": Figure(
            f"report, {file} from a temporary directory: blocked", "s", Target("limit", 1.1), "limit: shutil.copytree"
        ),
        "durable": Figure(
            f"report, {file}: durable and verified",
            "s",
            Target("limit", 1.2),
            f"{write}; ray: its report, then one syncfs, nothing verified; limit: write + fsync",
        ),
        "files": Figure(
            "report, 2,000 files of 64 KB: durable and verified",
            "s",
            Target("limit", 1.5),
            f"{write}; ray: as above; limit: writing them + one syncfs",
        ),
    }


def _cases(bench: Bench, side: Side) -> dict[str, dict[str, int]]:
    """The cases and how often each is repeated. At most 6 GB lie on the disk at once."""
    slow = side.name == RAY_DEFAULT
    large = {"n": 2 if bench.quick else 4, "size_bytes": GIGABYTE}
    return {
        "metrics_only": {"n": {OURS: 5000, RAY_DEFAULT: 4}.get(side.name, 60)},
        "small": {"n": 3 if slow else 30},
        "files": {"n": 2 if slow else 5},
        "given": large,
        "copied": large,
        "durable": large,
    }


def _measure(bench: Bench, side: Side, cases: dict[str, dict[str, int]], made: dict[str, Figure]) -> None:
    with bench.started(side, "reports", {"cases": cases}) as run:
        try:
            run.wait(timeout_s=600)
        finally:
            # The limit is taken beside our own reports where there are any: Ray's processes would slow it.
            for mark in run.marks:
                _add(mark, side, made, with_limit=side is bench.sides[0])


def _add(mark: dict[str, Any], side: Side, made: dict[str, Figure], with_limit: bool) -> None:
    name = mark["name"]
    scale = 1000 if made[name].unit == "ms" else 1
    made[name].add(side.name, [scale * value for value in mark["values"]])
    if with_limit:
        made[name].add(LIMIT, [scale * value for value in mark["limit"]])
    if name == "metrics_only":
        made["metrics_only/p99"].add(side.name, scale * percentile(mark["values"], 0.99))
    if name == "given":
        made["given/settled"].add(side.name, mark["settled"])
