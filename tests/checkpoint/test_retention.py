from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.retention import Candidate, Retention, best, forgettable, lookup, rank
from holdfast.errors import ConfigError

NAN, INF = math.nan, math.inf
HUGE = 10**400  # an int that no float can hold


def scored(*scores: Any) -> list[Candidate]:
    return [Candidate(number, {"score": score}) for number, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("metrics", "attribute", "expected"),
    [
        ({"loss": 1}, "loss", (True, 1)),
        ({"loss": None}, "loss", (True, None)),
        ({}, "loss", (False, None)),
        ({"eval/loss": 1}, "eval/loss", (True, 1)),
        ({"eval": {"loss": 2}}, "eval/loss", (True, 2)),
        ({"eval": {"loss": 2}, "eval/loss": 1}, "eval/loss", (True, 1)),
        ({"a": {"b": {"c": 3}}}, "a/b/c", (True, 3)),
        ({"a": {"b/c": 4}}, "a/b/c", (True, 4)),
        ({"a/b": {"c": 5}}, "a/b/c", (True, 5)),
        ({"a/b": {"c": 5}, "a": {"b/c": 4, "b": {"c": 3}}}, "a/b/c", (True, 5)),
        ({"a/b": {"d": 5}, "a": {"b/c": 4}}, "a/b/c", (True, 4)),
        ({"a/b": 5, "a": {"b": {"c": 3}}}, "a/b/c", (True, 3)),
        ({"eval": 7}, "eval/loss", (False, None)),
        ({"eval": {"acc": 7}}, "eval/loss", (False, None)),
        ({"eval": {"loss": 7}}, "loss", (False, None)),
        ({"": {"x": 1}}, "/x", (True, 1)),
        ({"x": {"": 1}}, "x/", (True, 1)),
    ],
)
def test_a_metric_is_found_as_a_whole_key_first_and_nested_then(
    metrics: dict[str, Any], attribute: str, expected: tuple[bool, Any]
) -> None:
    assert lookup(metrics, attribute) == expected


@pytest.mark.parametrize(
    ("scores", "order", "worst_to_best"),
    [
        ([0.5, 0.9, 0.1], "max", [2, 0, 1]),
        ([0.5, 0.9, 0.1], "min", [1, 0, 2]),
        ([1, 1, 1], "max", [0, 1, 2]),
        ([1, 1, 1], "min", [0, 1, 2]),
        ([2, 1, 2], "max", [1, 0, 2]),
        ([2, 1, 2], "min", [0, 2, 1]),
        ([0.0, -0.0], "min", [0, 1]),
        ([NAN, -INF, 0, INF], "max", [0, 1, 2, 3]),
        ([NAN, -INF, 0, INF], "min", [0, 3, 2, 1]),
        ([NAN, 1, NAN], "max", [0, 2, 1]),
        ([None, NAN, -INF], "max", [0, 1, 2]),
        ([NAN, None, "9", [1], {"score": 1}], "max", [1, 2, 3, 4, 0]),
        ([True, 0.5, False, 2], "max", [2, 1, 0, 3]),
        ([True, 0.5, False, 2], "min", [3, 0, 1, 2]),
        ([HUGE, INF, -HUGE, 1.5], "max", [2, 3, 0, 1]),
        ([HUGE, INF, -HUGE, 1.5], "min", [1, 0, 3, 2]),
        ([], "max", []),
    ],
)
def test_scores_rank_from_worst_to_best(scores: list[Any], order: str, worst_to_best: list[int]) -> None:
    assert rank(scored(*scores), Retention(score_attribute="score", score_order=order)) == worst_to_best


@pytest.mark.parametrize("order", ["max", "min"])
def test_a_missing_attribute_ranks_below_nan(order: str) -> None:
    candidates = [
        Candidate(0, {"score": NAN}),
        Candidate(1, {}),
        Candidate(2, {"score": 1}),
        Candidate(3, {"other": 1}),
    ]
    assert rank(candidates, Retention(score_attribute="score", score_order=order)) == [1, 3, 0, 2]


@pytest.mark.parametrize("order", ["max", "min"])
def test_without_an_attribute_the_most_recent_is_the_best(order: str) -> None:
    candidates = [Candidate(7, {"a": 9}), Candidate(2, {}), Candidate(5, {"a": 1})]
    assert rank(candidates, Retention(score_order=order)) == [2, 5, 7]
    assert best(candidates, Retention(num_to_keep=2, score_order=order)) == [5, 7]


def test_nested_attributes_rank() -> None:
    candidates = [Candidate(0, {"eval": {"loss": 0.3}}), Candidate(1, {"eval/loss": 0.1}), Candidate(2, {"eval": 0.0})]
    assert best(candidates, Retention(2, "eval/loss", "min")) == [0, 1]


@pytest.mark.parametrize(
    ("num_to_keep", "pinned", "kept", "forgotten"),
    [
        (None, set(), [3, 1, 0, 2], []),
        (None, {1}, [3, 1, 0, 2], []),
        (9, set(), [3, 1, 0, 2], []),
        (4, set(), [3, 1, 0, 2], []),
        (2, set(), [0, 2], [1, 3]),
        (2, {3}, [0, 2], [1]),
        (2, {0}, [0, 2], [1, 3]),
        (1, {1, 3}, [2], [0]),
        (1, {0, 1, 3, 77}, [2], []),
    ],
)
def test_a_pin_keeps_a_checkpoint_besides_the_best(
    num_to_keep: int | None, pinned: set[int], kept: list[int], forgotten: list[int]
) -> None:
    retention = Retention(num_to_keep, "score")
    candidates = scored(3, 2, 4, 1)
    assert best(candidates, retention) == kept
    assert forgettable(candidates, retention, pinned) == forgotten


@pytest.mark.parametrize("num_to_keep", [0, -1, 1.5, "2"])
def test_keeping_less_than_one_is_refused(num_to_keep: Any) -> None:
    with pytest.raises(ConfigError, match="num_to_keep"):
        Retention(num_to_keep)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="'max' or 'min'"):
        Retention(score_order="maximum")


scores = st.one_of(st.integers(-3, 3), st.floats(), st.booleans(), st.none(), st.sampled_from(["", "9"]))
metrics: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    scores.map(lambda score: {"a/b": score}),
    scores.map(lambda score: {"a": {"b": score}}),
)
candidate_lists = st.dictionaries(st.integers(0, 50), metrics, max_size=12).map(
    lambda found: [Candidate(number, metrics) for number, metrics in found.items()]
)
retentions = st.builds(
    Retention,
    st.one_of(st.none(), st.integers(1, 8)),
    st.sampled_from([None, "a/b"]),
    st.sampled_from(["max", "min"]),
)


def beats(one: Candidate, other: Candidate, retention: Retention) -> bool:
    """The rules said in another way: pairwise, case by case."""
    if retention.score_attribute is None:
        return one.number > other.number
    a, b = (lookup(candidate.metrics, "a/b")[1] for candidate in (one, other))
    a_counts, b_counts = isinstance(a, (int, float)), isinstance(b, (int, float))
    if not (a_counts and b_counts):
        return a_counts if a_counts != b_counts else one.number > other.number
    if math.isnan(a) or math.isnan(b):
        return math.isnan(b) if math.isnan(a) != math.isnan(b) else one.number > other.number
    if a == b:
        return one.number > other.number
    return bool(a > b) if retention.score_order == "max" else bool(a < b)


@settings(deadline=None)
@given(candidate_lists, retentions)
def test_each_candidate_beats_all_that_rank_before_it(candidates: list[Candidate], retention: Retention) -> None:
    by_number = {candidate.number: candidate for candidate in candidates}
    ranked = [by_number[number] for number in rank(candidates, retention)]
    for place, better in enumerate(ranked):
        for worse in ranked[:place]:
            assert beats(better, worse, retention)
            assert not beats(worse, better, retention)


@settings(deadline=None)
@given(candidate_lists, retentions, st.sets(st.integers(0, 50)))
def test_exactly_the_best_and_the_pinned_stay(
    candidates: list[Candidate], retention: Retention, pinned: set[int]
) -> None:
    numbers = {candidate.number for candidate in candidates}
    kept = best(candidates, retention)
    gone = forgettable(candidates, retention, pinned)
    limit = len(candidates) if retention.num_to_keep is None else retention.num_to_keep
    assert len(kept) == len(set(kept)) == min(limit, len(candidates))
    assert kept == [number for number in rank(candidates, retention) if number in kept]
    assert gone == sorted(numbers - set(kept) - pinned)


@settings(deadline=None)
@given(candidate_lists, retentions, st.sets(st.integers(0, 50)), st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_counts_nothing(
    candidates: list[Candidate], retention: Retention, pinned: set[int], chance: random.Random
) -> None:
    shuffled = chance.sample(candidates, len(candidates))
    assert rank(shuffled, retention) == rank(candidates, retention)
    assert best(shuffled, retention) == best(candidates, retention)
    assert forgettable(shuffled, retention, pinned) == forgettable(candidates, retention, pinned)


@settings(deadline=None)
@given(candidate_lists, retentions, st.sets(st.integers(0, 50)))
def test_forgetting_once_leaves_nothing_to_forget(
    candidates: list[Candidate], retention: Retention, pinned: set[int]
) -> None:
    gone = forgettable(candidates, retention, pinned)
    left = [candidate for candidate in candidates if candidate.number not in gone]
    assert best(left, retention) == best(candidates, retention)
    assert forgettable(left, retention, pinned) == []
