"""A figure: what was measured on each side, what was aimed at, and whether it held."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

OURS, LIMIT, RAY_DEFAULT, RAY_TUNED = "ours", "limit", "ray default", "ray tuned"
COLUMNS = (OURS, LIMIT, RAY_DEFAULT, RAY_TUNED)


@dataclass(frozen=True)
class Spread:
    """The least, the median and the greatest of some samples."""

    least: float
    median: float
    greatest: float
    count: int


@dataclass(frozen=True)
class Target:
    """What is aimed at: at most `bound` (of the unit, or times the limit), or at least `bound` times faster than Ray.

    Attributes:
        of: `value`: the median itself; `limit`: median over the limit's; `ray`: tuned Ray's median over ours.
    """

    of: Literal["value", "limit", "ray"]
    bound: float

    def __str__(self) -> str:
        if self.of == "value":
            return f"<= {self.bound:g}"
        return f"<= {self.bound:g} x limit" if self.of == "limit" else f">= {self.bound:g} x faster than ray tuned"


@dataclass
class Figure:
    """One line of the table. Samples are kept by column; a column that could not be measured stays empty."""

    name: str
    unit: str
    target: Target | None = None
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, column: str, values: Sequence[float] | float) -> None:
        """Adds samples to a column."""
        self.samples.setdefault(column, []).extend([values] if isinstance(values, (int, float)) else values)

    def spread(self, column: str) -> Spread | None:
        """Returns what a column's samples say; None: there are none."""
        values = self.samples.get(column)
        if not values:
            return None
        return Spread(min(values), statistics.median(values), max(values), len(values))

    def ratio(self, above: str, below: str) -> float | None:
        """Returns the median of one column over that of another."""
        top, bottom = self.spread(above), self.spread(below)
        return top.median / bottom.median if top and bottom and bottom.median else None

    def verdict(self) -> str:
        """Returns `held`, `not held`, or why neither can be said."""
        if self.target is None:
            return ""
        ours = self.spread(OURS)
        if ours is None:
            return "not measured"
        if self.target.of == "value":
            return _held(ours.median <= self.target.bound)
        if self.target.of == "limit":
            times = self.ratio(OURS, LIMIT)
            return "no limit measured" if times is None else _held(times <= self.target.bound)
        times = self.ratio(RAY_TUNED, OURS)
        return "no ray measured" if times is None else _held(times >= self.target.bound)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything, samples included, for JSON."""
        spreads = {column: self.spread(column) for column in self.samples}
        return {
            "name": self.name,
            "unit": self.unit,
            "note": self.note,
            "target": str(self.target) if self.target else None,
            "verdict": self.verdict(),
            "columns": {column: vars(spread) for column, spread in spreads.items() if spread},
            "ours_over_limit": self.ratio(OURS, LIMIT),
            "ray_default_over_ours": self.ratio(RAY_DEFAULT, OURS),
            "ray_tuned_over_ours": self.ratio(RAY_TUNED, OURS),
            "samples": self.samples,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which `share` of the values lie; of few values the greatest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(figures: Sequence[Figure]) -> str:
    """Returns figures as text, one block each: min/median/max by column, then the ratios and the verdict."""
    return "\n".join(line for figure in figures for line in _block(figure))


def _block(figure: Figure) -> list[str]:
    unit = f" [{figure.unit}]" if figure.unit else ""
    lines = [f"{figure.name}{unit}" + (f"  ({figure.note})" if figure.note else "")]
    for column in COLUMNS:
        spread = figure.spread(column)
        if spread:
            three = f"{_short(spread.least)} / {_short(spread.median)} / {_short(spread.greatest)}"
            lines.append(f"    {column:12} {three:30} n={spread.count:<6}{_against(figure, column)}")
    if figure.target:
        lines.append(f"    {'target':12} {figure.target!s:38} {figure.verdict()}")
    return lines


def _against(figure: Figure, column: str) -> str:
    over_limit = figure.ratio(column, LIMIT) if column != LIMIT else None
    over_ours = figure.ratio(column, OURS) if column.startswith("ray") else None
    parts = [f"{_short(over_limit)} x limit" if over_limit else "", f"{_short(over_ours)} x ours" if over_ours else ""]
    return "  ".join(part for part in parts if part)


def _short(value: float) -> str:
    if value and abs(value) < 0.001:
        return f"{value:.2g}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def _held(kept: bool) -> str:
    return "held" if kept else "not held"
