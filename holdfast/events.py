"""Frozen records of what happened in a run, and the protocol of those who read them.

>>> Reported(attempt=0, iteration=7, metrics={"loss": 0.5}, time=1700000000.0)
Reported(attempt=0, iteration=7, metrics={'loss': 0.5}, time=1700000000.0)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakValueDictionary

from msgspec import Struct


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened.

    Attributes:
        time: when, in seconds since 1970.
    """

    time: float


class RunStarted(Event, frozen=True):
    """A driver has the run in its hands; `resumed`: it goes on with an earlier one."""

    name: str
    path: str
    resumed: bool
    world_size: int


class AttemptStarted(Event, frozen=True):
    """A gang of workers was started, from the checkpoint of this number or from the beginning (None)."""

    attempt: int
    world_size: int
    checkpoint: int | None


class Reported(Event, frozen=True):
    """The training function has called `report`; the metrics are those of rank 0."""

    attempt: int
    iteration: int
    metrics: Mapping[str, Any]


class CheckpointCommitted(Event, frozen=True):
    """A checkpoint exists, whole and durable, `seconds` after its report."""

    number: int
    path: str
    size_bytes: int
    metrics: Mapping[str, Any]
    seconds: float


class CheckpointAbandoned(Event, frozen=True):
    """A checkpoint that had a number will never exist."""

    number: int
    reason: str


class DamageFound(Event, frozen=True):
    """A committed checkpoint is not what its manifest says; it is not used."""

    number: int
    reason: str


class AttemptFailed(Event, frozen=True):
    """The workers of an attempt have ended before the training function did; `reasons` by rank."""

    attempt: int
    reasons: Mapping[int, str]


class Waiting(Event, frozen=True):
    """The run cannot go on without `what`: `space on the storage`, `a report of rank 1`."""

    what: str


class WaitingOver(Event, frozen=True):
    """What the run was waiting for is there."""

    what: str


class Warned(Event, frozen=True):
    """Something that a person should know; nothing was lost."""

    message: str


class RunFinished(Event, frozen=True):
    """The training function has returned on every rank, and all its checkpoints are committed."""

    path: str
    attempts: int
    checkpoints_kept: int
    seconds: float


class RunFailed(Event, frozen=True):
    """The run has ended without finishing."""

    path: str
    reason: str


class Observer(Protocol):
    """Reads events and cannot change the course: what it raises is told once and stops nothing."""

    def on_event(self, event: Event) -> None:
        """Takes note of `event`. Called in the driver, in order, one at a time; the run waits for it."""


_told: WeakValueDictionary[int, Observer] = WeakValueDictionary()  # by id: an observer need not be hashable


def deliver(observers: Iterable[Observer], event: Event) -> None:
    """Hands `event` to each observer. One that raises gets the next event all the same, and is named in one warning."""
    for observer in observers:
        try:
            observer.on_event(event)
        except Exception as error:
            _tell(observer, event, error)


def _tell(observer: Observer, event: Event, error: Exception) -> None:
    if _told.get(id(observer)) is observer:
        return
    with suppress(TypeError):  # an object that takes no weak reference is told of each time
        _told[id(observer)] = observer
    warnings.warn(
        f"the observer {type(observer).__module__}.{type(observer).__qualname__} failed at {type(event).__name__}: "
        f"{type(error).__name__}: {error}. The run goes on; further failures of it are not shown.",
        RuntimeWarning,
        stacklevel=3,
    )
