"""Tells on a terminal, or in a log file, what happens in a run: plain lines, one for each event that matters.

14:03:22 run digits: started with 2 workers in /data/digits
14:03:29 report 12: loss 0.1234  accuracy 0.98
14:03:29 checkpoint 3: committed, 20.1 MB in 0.12 s
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from holdfast.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointAbandoned,
    CheckpointCommitted,
    DamageFound,
    Event,
    Observer,
    Reported,
    RunFailed,
    RunFinished,
    RunStarted,
    Waiting,
    WaitingOver,
    Warned,
)

_METRICS_SHOWN = 8
_VALUE_LENGTH = 40
_REPORT_PERIOD_S = 1.0


class TerminalObserver:
    """Prints a line for each event that matters.

    Args:
        stream: where to.
        verbose: 0: nothing; 1: everything, but reports at most once a second; 2: every report too.
    """

    def __init__(self, stream: TextIO, verbose: int) -> None:
        self._stream = stream
        self._verbose = verbose
        self._reported_time: float | None = None

    def on_event(self, event: Event) -> None:
        if self._verbose <= 0 or (isinstance(event, Reported) and not self._is_due(event.time)):
            return
        line = _line(event)
        if line is not None:
            clock = time.strftime("%H:%M:%S", time.localtime(event.time))
            self._stream.write(_writable(f"{clock} {line}\n", self._stream))
            self._stream.flush()

    def _is_due(self, now: float) -> bool:
        # Not `now - last` alone: a clock that was set back would silence the reports until it has caught up.
        last = self._reported_time
        due = self._verbose >= 2 or last is None or abs(now - last) >= _REPORT_PERIOD_S
        if due:
            self._reported_time = now
        return due


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Returns metrics as short text on one line.

    >>> format_metrics({"loss": 0.12345, "eval": {"accuracy": 0.98}, "epoch": 3})
    'loss 0.1235  eval/accuracy 0.98  epoch 3'
    """
    shown = [f"{_one_line(name)} {_short(value)}" for name, value in _flat(metrics)]
    more = len(shown) - _METRICS_SHOWN
    return "  ".join([*shown[:_METRICS_SHOWN], f"(+{more} more)"] if more > 0 else shown)


def _line(event: Event) -> str | None:
    match event:
        case RunStarted():
            how = "resumed" if event.resumed else "started"
            workers = _count(event.world_size, "worker")
            return f"run {_one_line(event.name)}: {how} with {workers} in {_one_line(event.path)}"
        case AttemptStarted():
            since = "the beginning" if event.checkpoint is None else f"checkpoint {event.checkpoint}"
            return f"attempt {event.attempt}: {_count(event.world_size, 'worker')}, from {since}"
        case Reported():
            return f"report {event.iteration}: {format_metrics(event.metrics)}".rstrip()
        case CheckpointCommitted():
            return f"checkpoint {event.number}: committed, {_size(event.size_bytes)} in {_duration(event.seconds)}"
        case CheckpointAbandoned():
            return f"checkpoint {event.number}: abandoned: {_reason(event.reason)}"
        case DamageFound():
            return f"checkpoint {event.number}: DAMAGED, not used: {_reason(event.reason)}"
        case AttemptFailed():
            return f"attempt {event.attempt}: failed: {_reasons(event.reasons)}"
        case Waiting():
            return f"waiting for {_one_line(event.what)}"
        case WaitingOver():
            return f"waited for {_one_line(event.what)}: it is there, going on"
        case Warned():
            return f"warning: {_one_line(event.message)}"
        case RunFinished():
            kept = f"{_count(event.attempts, 'attempt')}, {_count(event.checkpoints_kept, 'checkpoint')} kept"
            return f"finished in {_duration(event.seconds)}: {kept} in {_one_line(event.path)}"
        case RunFailed():
            return f"FAILED: {_reason(event.reason)}; what was committed is in {_one_line(event.path)}"
        case _:
            return None


def _reasons(reasons: Mapping[int, str]) -> str:
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(reasons):
        ranks[_reason(reasons[rank])].append(rank)
    return "; ".join(f"{_ranks(same)}: {reason}" for reason, same in ranks.items()) or "no rank said why"


def _ranks(ranks: list[int]) -> str:
    """Says `rank 3` or `ranks 0-2, 5`; `ranks` is ascending."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    said = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {said}" if len(ranks) == 1 else f"ranks {said}"


def _reason(text: str) -> str:
    """Returns a traceback as the line that names its last exception; another text as one line."""
    lines = text.strip().splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if heads:  # below the frames, which are indented; a message may have further lines
        lines = [line for line in lines[heads[-1] + 1 :] if not line.startswith(" ")][:1]
    return _one_line(" ".join(lines)) or "no reason was given"


def _one_line(text: str) -> str:
    """Returns `text` without line breaks and without what would move the cursor or colour the terminal."""
    line = " ".join(text.split())
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = _one_line(str(value))
    return text if len(text) <= _VALUE_LENGTH else f"{text[: _VALUE_LENGTH - 3]}..."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


def _duration(seconds: float) -> str:
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _writable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _conforms(observer: TerminalObserver) -> Observer:
    return observer
