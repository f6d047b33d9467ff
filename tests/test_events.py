from __future__ import annotations

import dataclasses
import gc
import warnings
from collections.abc import Iterable, Sequence

import pytest

from holdfast.events import Event, Observer, Reported, Waiting, Warned, deliver

EVENT = Warned("careful", time=1.0)


class Remembering:
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.seen.append(event)


class Failing(Remembering):
    def on_event(self, event: Event) -> None:
        super().on_event(event)
        raise ValueError("no room")


class Slotted:
    __slots__ = ()

    def on_event(self, event: Event) -> None:
        raise ValueError("no room")


@dataclasses.dataclass
class Unhashable:
    def on_event(self, event: Event) -> None:
        raise ValueError("no room")


def deliver_all(observers: Sequence[Observer], events: Iterable[Event]) -> None:
    for event in events:
        deliver(observers, event)


def test_an_event_is_frozen_and_has_a_time() -> None:
    with pytest.raises(AttributeError):
        EVENT.time = 2.0  # type: ignore[misc]
    assert Waiting("space", time=3.0) == Waiting(what="space", time=3.0)
    assert Reported(0, 7, {"loss": 1}, time=3.0).iteration == 7


def test_no_event_is_without_a_time() -> None:
    with pytest.raises(TypeError, match="time"):
        Warned("careful")  # type: ignore[call-arg]


def test_each_observer_gets_each_event_in_order() -> None:
    observers = [Remembering(), Remembering()]
    for event in (EVENT, Waiting("space", time=2.0)):
        deliver(observers, event)
    assert [observer.seen for observer in observers] == [[EVENT, Waiting("space", time=2.0)]] * 2


def test_an_observer_that_raises_is_named_once_and_stops_nobody() -> None:
    failing, after = Failing(), Remembering()
    with pytest.warns(RuntimeWarning, match=r"test_events\.Failing failed at Warned: ValueError: no room") as caught:
        deliver_all([failing, after], [EVENT] * 3)
    assert len(caught) == 1
    assert len(failing.seen) == len(after.seen) == 3


def test_each_failing_observer_is_named() -> None:
    with pytest.warns(RuntimeWarning, match="Failing") as caught:
        deliver([Failing(), Failing()], EVENT)
    assert len(caught) == 2


def test_an_observer_in_the_place_of_a_dead_one_is_named_too() -> None:
    for _ in range(3):
        with pytest.warns(RuntimeWarning, match="Failing"):
            deliver([Failing()], EVENT)
        gc.collect()


def test_an_observer_that_cannot_be_hashed_or_referred_to_weakly_breaks_nothing() -> None:
    unhashable = Unhashable()
    with pytest.warns(RuntimeWarning, match="Unhashable|Slotted") as caught:
        deliver_all([unhashable, Slotted()], [EVENT] * 2)
    assert [str(warning.message).count("Unhashable") for warning in caught].count(1) == 1


def test_an_interrupt_is_no_failure_of_an_observer() -> None:
    class Interrupted:
        def on_event(self, event: Event) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
        deliver([Interrupted()], EVENT)
