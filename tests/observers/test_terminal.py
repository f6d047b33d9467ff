from __future__ import annotations

import io
import math
from typing import Any

import pytest

from holdfast.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointAbandoned,
    CheckpointCommitted,
    DamageFound,
    Event,
    Reported,
    RunFailed,
    RunFinished,
    RunStarted,
    Waiting,
    WaitingOver,
    Warned,
)
from holdfast.observers.terminal import TerminalObserver, format_metrics

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in train\nValueError: no such layer\n'


def told(*events: Event, verbose: int = 1) -> list[str]:
    """The lines without their clock."""
    stream = io.StringIO()
    observer = TerminalObserver(stream, verbose)
    for event in events:
        observer.on_event(event)
    return [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (RunStarted("digits", "/d", False, 2, time=0), "run digits: started with 2 workers in /d"),
        (RunStarted("digits", "/d", True, 1, time=0), "run digits: resumed with 1 worker in /d"),
        (AttemptStarted(0, 2, None, time=0), "attempt 0: 2 workers, from the beginning"),
        (AttemptStarted(3, 1, 0, time=0), "attempt 3: 1 worker, from checkpoint 0"),
        (Reported(0, 7, {"loss": 0.12345, "accuracy": 0.98}, time=0), "report 7: loss 0.1235  accuracy 0.98"),
        (Reported(0, 7, {}, time=0), "report 7:"),
        (
            CheckpointCommitted(3, "/d/c", 20_120_000, {"loss": 1}, 0.1234, time=0),
            "checkpoint 3: committed, 20.1 MB in 0.12 s",
        ),
        (CheckpointCommitted(3, "/d/c", 0, {}, 59.6, time=0), "checkpoint 3: committed, 0 B in 1 min 0 s"),
        (CheckpointCommitted(3, "/d/c", 999_999, {}, 12.3, time=0), "checkpoint 3: committed, 1 MB in 12 s"),
        (
            CheckpointCommitted(3, "/d/c", 12_345 * 10**12, {}, 0, time=0),
            "checkpoint 3: committed, 1.234e+04 TB in 0 s",
        ),
        (CheckpointAbandoned(4, "rank 1 died", time=0), "checkpoint 4: abandoned: rank 1 died"),
        (DamageFound(4, "model.pt differs", time=0), "checkpoint 4: DAMAGED, not used: model.pt differs"),
        (AttemptFailed(1, {1: TRACEBACK}, time=0), "attempt 1: failed: rank 1: ValueError: no such layer"),
        (
            AttemptFailed(1, {5: "lost", 2: "killed by\nSIGKILL", 0: "lost", 1: "lost"}, time=0),
            "attempt 1: failed: ranks 0-1, 5: lost; rank 2: killed by SIGKILL",
        ),
        (AttemptFailed(1, {}, time=0), "attempt 1: failed: no rank said why"),
        (Waiting("space in /d", time=0), "waiting for space in /d"),
        (WaitingOver("space in /d", time=0), "waited for space in /d: it is there, going on"),
        (Warned("two ranks wrote a.txt", time=0), "warning: two ranks wrote a.txt"),
        (RunFinished("/d", 1, 2, 3725, time=0), "finished in 1 h 2 min: 1 attempt, 2 checkpoints kept in /d"),
        (RunFailed("/d", TRACEBACK, time=0), "FAILED: ValueError: no such layer; what was committed is in /d"),
        (RunFailed("/d", "", time=0), "FAILED: no reason was given; what was committed is in /d"),
    ],
)
def test_an_event_is_one_line(event: Event, line: str) -> None:
    assert told(event) == [line]
    assert told(event, verbose=2) == [line]
    assert told(event, verbose=0) == []


def test_an_event_that_is_not_known_is_not_told() -> None:
    assert told(Event(time=0)) == []


def test_a_line_begins_with_the_time_of_its_event() -> None:
    stream = io.StringIO()
    TerminalObserver(stream, 1).on_event(Warned("x", time=1_700_000_000.5))
    assert stream.getvalue()[2:6:3] == "::"
    assert stream.getvalue()[6:8] == "20"  # the seconds are the same in every time zone of today


@pytest.mark.parametrize(
    ("times", "shown"),
    [
        ([0.0, 0.5, 0.999, 1.0, 1.5, 2.0], [0, 3, 5]),
        ([0.0, 10.0, 10.5, 11.1], [0, 1, 3]),
        ([100.0, 5.0, 5.5, 6.0], [0, 1, 3]),
    ],
)
def test_reports_are_told_at_most_once_a_second_unless_all_are_wanted(times: list[float], shown: list[int]) -> None:
    reports = [Reported(0, index, {}, time=time) for index, time in enumerate(times)]
    assert told(*reports) == [f"report {index}:" for index in shown]
    assert told(*reports, verbose=2) == [f"report {index}:" for index in range(len(times))]


def test_a_report_holds_back_no_other_event() -> None:
    assert len(told(Reported(0, 1, {}, time=0), Warned("a", time=0), Warned("b", time=0))) == 3


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({}, ""),
        ({"loss": 0.1234, "accuracy": 0.98}, "loss 0.1234  accuracy 0.98"),
        ({"loss": math.nan, "best": -math.inf, "lr": 1e-5}, "loss nan  best -inf  lr 1e-05"),
        ({"step": 1234567, "done": True, "note": None}, "step 1234567  done True  note None"),
        ({"eval": {"loss": 1.0, "top": {"5": 0.5}}, "x": {}}, "eval/loss 1  eval/top/5 0.5"),
        ({"text": "a\nb\tc", "red": "\x1b[31m"}, "text a b c  red \\x1b[31m"),
        ({"long": "x" * 41}, f"long {'x' * 37}..."),
        ({f"m{i}": i for i in range(9)}, "m0 0  m1 1  m2 2  m3 3  m4 4  m5 5  m6 6  m7 7  (+1 more)"),
    ],
)
def test_metrics_are_short_text_on_one_line(metrics: dict[str, Any], text: str) -> None:
    assert format_metrics(metrics) == text


def test_what_the_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    TerminalObserver(stream, 1).on_event(Warned("données \udcff", time=0))
    assert raw.getvalue().endswith(b"warning: donn\\xe9es \\udcff\n")


def test_a_line_is_there_as_soon_as_its_event_was() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw, 1 << 16), encoding="utf-8")
    TerminalObserver(stream, 1).on_event(Warned("now", time=0))
    assert raw.getvalue()
