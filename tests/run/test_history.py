"""The table of a run's reports, from its journal."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.run.result import Result, history


def attempt(number: int, iteration: int = 0) -> dict[str, Any]:
    return {"kind": "attempt", "time": 0.0, "attempt": number, "iteration": iteration}


def report(number: int, step: int, kind: str = "report", **metrics: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "time": float(step),
        "attempt": number,
        "iteration": step,
        "metrics": {"loss": step, **metrics},
    }


def steps(records: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["attempt"], row["training_iteration"]) for row in history(records)]


def test_each_report_is_a_row_with_or_without_a_checkpoint():
    records = [attempt(1), report(1, 1), report(1, 2, "staged"), {"kind": "committed", "time": 3.0, "number": 0}]
    assert history(records) == [
        {"loss": 1, "training_iteration": 1, "attempt": 1, "timestamp": 1.0},
        {"loss": 2, "training_iteration": 2, "attempt": 1, "timestamp": 2.0},
    ]


def test_no_record_is_no_row():
    assert history([]) == history([attempt(1), {"kind": "failed", "time": 1.0, "why": "x"}]) == []


def test_steps_beyond_the_checkpoint_an_attempt_goes_on_from_are_dropped_also_before_they_are_done_again():
    records = [attempt(1), *(report(1, step) for step in (1, 2, 3, 4)), attempt(2, iteration=2)]
    assert steps(records) == [(1, 1), (1, 2)]
    assert steps([*records, report(2, 3)]) == [(1, 1), (1, 2), (2, 3)]


def test_a_step_that_was_done_again_is_there_once_with_the_metrics_of_the_later_attempt():
    records = [attempt(1), report(1, 1, lr=1), attempt(2), report(2, 1, lr=2), attempt(3), report(3, 1, lr=3)]
    assert [(row["attempt"], row["lr"]) for row in history(records)] == [(3, 3)]


def test_an_attempt_that_starts_from_an_older_checkpoint_than_the_one_before_takes_the_place_of_both():
    records = [attempt(1), report(1, 1), report(1, 2), attempt(2, iteration=2), report(2, 3), attempt(3, iteration=1)]
    assert steps([*records, report(3, 2)]) == [(1, 1), (3, 2)]


def test_nested_metrics_are_flattened_with_slashes():
    row = history([attempt(1), report(1, 1, eval={"loss": 0.5, "by": {"class": 1}})])[0]
    assert (row["eval/loss"], row["eval/by/class"]) == (0.5, 1)


def test_the_metrics_dataframe_has_a_row_for_each_step():
    pytest.importorskip("pandas")
    records = [attempt(1), report(1, 1), report(1, 2), attempt(2, iteration=1), report(2, 2)]
    frame = Result({}, None, [], "", records=lambda: records).metrics_dataframe
    assert list(frame["training_iteration"]) == [1, 2]
    assert list(frame["attempt"]) == [1, 2]
