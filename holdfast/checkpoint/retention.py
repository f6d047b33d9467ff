"""Which checkpoints are the best, and which may be forgotten. Pure: values in, values out.

>>> candidates = [Candidate(0, {"loss": 0.9}), Candidate(1, {"loss": 0.2}), Candidate(2, {"loss": 0.5})]
>>> retention = Retention(num_to_keep=1, score_attribute="loss", score_order="min")
>>> best(candidates, retention)
[1]
>>> forgettable(candidates, retention, pinned={2})
[0]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError

_MISSING, _NAN, _NUMBER = range(3)


@dataclass(frozen=True)
class Candidate:
    """A committed checkpoint: its number, larger is more recent, and the metrics it was reported with."""

    number: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Retention:
    """What is to be kept.

    Attributes:
        num_to_keep: how many of the best are kept; None: all.
        score_attribute: the metric that says which is better, for example `loss` or `eval/loss`; None: the more recent.
        score_order: `max` or `min`: which score is the best.

    Raises:
        ConfigError: one of them cannot be.
    """

    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: str = "max"

    def __post_init__(self) -> None:
        if self.num_to_keep is not None and (not isinstance(self.num_to_keep, int) or self.num_to_keep < 1):
            raise ConfigError(f"num_to_keep={self.num_to_keep!r}: give a whole number from 1 on, or None to keep all.")
        if self.score_order not in ("max", "min"):
            raise ConfigError(f"checkpoint_score_order={self.score_order!r}: give 'max' or 'min'.")


def lookup(metrics: Mapping[str, Any], attribute: str) -> tuple[bool, Any]:
    """Returns (True, value) of a metric, or (False, None).

    `eval/loss` is the key `eval/loss`; where there is none, `loss` in the dict under `eval`. Of several readings the
    one with the longest first key counts.

    >>> lookup({"eval": {"loss": 0.5}}, "eval/loss")
    (True, 0.5)
    """
    if attribute in metrics:
        return True, metrics[attribute]
    slash = attribute.rfind("/")
    while slash >= 0:
        inner = metrics.get(attribute[:slash])
        if isinstance(inner, Mapping):
            found, value = lookup(inner, attribute[slash + 1 :])
            if found:
                return True, value
        slash = attribute.rfind("/", 0, slash)
    return False, None


def has_score(metrics: Mapping[str, Any], attribute: str) -> bool:
    """Returns whether there is a number under `attribute`; NaN is one."""
    found, value = lookup(metrics, attribute)
    return found and isinstance(value, (int, float))


def rank(candidates: Iterable[Candidate], retention: Retention) -> list[int]:
    """Returns the numbers of all candidates, the worst first and the best last; their order of arrival counts nothing.

    - Without an attribute the more recent is better.
    - With one, the better score is better; of equal scores the more recent.
    - NaN is worse than every number, infinities included.
    - Worst is a candidate that lacks the attribute, or whose value is no number. True and False are 1 and 0.
    """
    return [candidate.number for candidate in sorted(candidates, key=lambda candidate: _merit(candidate, retention))]


def best(candidates: Iterable[Candidate], retention: Retention) -> list[int]:
    """Returns the numbers of the best `num_to_keep` candidates, or of all there are, in the order of `rank`."""
    ranked = rank(candidates, retention)
    return ranked if retention.num_to_keep is None else ranked[-retention.num_to_keep :]


def forgettable(candidates: Iterable[Candidate], retention: Retention, pinned: Collection[int]) -> list[int]:
    """Returns the numbers of those that are neither among the best nor pinned, the oldest first.

    A pin keeps a checkpoint besides the best: it takes no place from them.
    """
    if retention.num_to_keep is None:
        return []
    surplus = rank(candidates, retention)[: -retention.num_to_keep]
    return sorted(set(surplus).difference(pinned))


def _merit(candidate: Candidate, retention: Retention) -> tuple[int, float, int]:
    if retention.score_attribute is None:
        return _NUMBER, 0, candidate.number
    if not has_score(candidate.metrics, retention.score_attribute):
        return _MISSING, 0, candidate.number
    _, score = lookup(candidate.metrics, retention.score_attribute)
    if score != score:  # not math.isnan, which cannot take an int beyond the range of floats
        return _NAN, 0, candidate.number
    return _NUMBER, score if retention.score_order == "max" else -score, candidate.number
