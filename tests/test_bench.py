from __future__ import annotations

from pathlib import Path

import pytest

from bench.figure import LIMIT, OURS, RAY_TUNED, Figure, Target, percentile, table
from bench.side import SCRIPTS, Side, script_for


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        (Target("value", 2), "held"),
        (Target("value", 1.9), "not held"),
        (Target("limit", 4), "held"),
        (Target("limit", 3.9), "not held"),
        (Target("ray", 5), "held"),
        (Target("ray", 5.1), "not held"),
    ],
)
def test_a_verdict_compares_medians(target: Target, verdict: str) -> None:
    figure = Figure("a figure", "s", target, samples={OURS: [1, 2, 90], LIMIT: [0.5], RAY_TUNED: [10]})
    assert figure.verdict() == verdict


def test_a_figure_that_could_not_be_measured_is_neither_held_nor_not_held() -> None:
    assert Figure("a figure", "s", Target("value", 2)).verdict() == "not measured"
    assert Figure("a figure", "s", Target("ray", 2), samples={OURS: [1]}).verdict() == "no ray measured"
    assert Figure("a figure", "s", Target("limit", 2), samples={OURS: [1]}).verdict() == "no limit measured"


def test_the_table_names_each_side_with_its_spread_and_ratios() -> None:
    text = table([Figure("a figure", "s", samples={OURS: [1, 2, 3], LIMIT: [1], RAY_TUNED: [8]})])
    assert "1 / 2 / 3" in text
    assert "2 x limit" in text
    assert "4 x ours" in text


def test_the_percentile_of_few_values_is_the_greatest() -> None:
    assert percentile([3, 1, 2], 0.99) == 3
    assert percentile(range(1000), 0.99) == 990


@pytest.mark.parametrize("script", ["toy", "reports", "kills", "resident"])
def test_both_sides_run_the_same_script_but_for_the_import_root(script: str) -> None:
    ours = (SCRIPTS / f"{script}.py").read_text()
    assert script_for(Side(OURS, Path("python"), "holdfast"), script) == ours
    theirs = script_for(Side(RAY_TUNED, Path("python"), "ray"), script)
    changed = [line for line, other in zip(ours.splitlines(), theirs.splitlines(), strict=True) if line != other]
    assert changed
    assert all("holdfast" in line for line in changed)
