"""What the state of a run is told, and what it asks for: events in, actions out. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

# ---- events


class Event(Struct, frozen=True):
    """Something that happened; `time` in seconds, never going back."""

    time: float


class Begun(Event, frozen=True):
    """A driver begins to own this run. `taken`: the numbers under which something lies in storage."""

    taken: tuple[int, ...] = ()
    present: tuple[int, ...] = ()


class Looked(Event, frozen=True):
    """A checkpoint was looked at before an attempt starts from it."""

    number: int
    problems: tuple[str, ...] = ()


class RankEvent(Event, frozen=True):
    """From a rank of an attempt; those of an older attempt are dropped."""

    attempt: int
    rank: int


class LookFailed(Event, frozen=True):
    """A checkpoint could not be looked at. `passing`: another try may succeed."""

    number: int
    reason: str
    passing: bool


class Reported(RankEvent, frozen=True):
    """A rank called `report` for the `report`-th time.

    `part_bytes`: None without a checkpoint; `failed`: why it could not give what it wanted to, and was told so.
    """

    report: int
    metrics: Mapping[str, Any]
    part_bytes: int | None = None
    sync: bool = False
    free_bytes: int = 0
    failed: str = ""


class Returned(RankEvent, frozen=True):
    """A rank's training function returned."""

    value: Any = None


class Raised(RankEvent, frozen=True):
    """A rank's training function raised."""

    traceback: str


class Exited(RankEvent, frozen=True):
    """A rank's process is gone."""

    how: str


class GangRefused(Event, frozen=True):
    """The processes of an attempt could not be started."""

    attempt: int
    reason: str


class Durable(Event, frozen=True):
    """The part of a rank survives the machine now."""

    number: int
    rank: int


class Committed(Event, frozen=True):
    """A checkpoint exists. `in_use`: committed ones that a reader has open now."""

    number: int
    path: str
    size_bytes: int
    conflicts: tuple[str, ...] = ()
    in_use: frozenset[int] = frozenset()


class StorageFailed(Event, frozen=True):
    """A staged checkpoint could not be made durable or committed. `passing`: another try may succeed."""

    number: int
    reason: str
    passing: bool
    step: Literal["persist", "commit"] = "persist"


class KeeperDied(Event, frozen=True):
    """The keeper's process is gone."""


class PutOff(Event, frozen=True):
    """Forgotten checkpoints were not removed: somebody reads them."""

    numbers: tuple[int, ...]


class CleaningFailed(Event, frozen=True):
    """Something that is needed no more could not be removed."""

    reason: str


class Tick(Event, frozen=True):
    """Time has passed."""


# ---- actions


class Look(Struct, frozen=True):
    """Compare a committed checkpoint with its manifest."""

    number: int


class StartGang(Struct, frozen=True):
    """Start the workers of an attempt. `checkpoint`: the number to start from."""

    attempt: int
    checkpoint: int | None


class StopGang(Struct, frozen=True):
    """End the workers of an attempt; each sends its `Exited`."""

    attempt: int


class Answer(Struct, frozen=True):
    """Let a rank's `report` return, or raise `error`."""

    rank: int
    report: int
    number: int
    error: str | None = None


class Tell(Struct, frozen=True):
    """Tell every rank which checkpoint is the newest committed one."""

    number: int


class Persist(Struct, frozen=True):
    """Have the parts of a staged checkpoint made durable: by the keeper, or by the driver itself."""

    number: int
    in_driver: bool = False


class EndKeeper(Struct, frozen=True):
    """End the keeper: it has not answered for too long."""


class MakeCommit(Struct, frozen=True):
    """Make staged, durable parts a checkpoint."""

    number: int


class Remove(Struct, frozen=True):
    """Remove checkpoints that were forgotten."""

    numbers: tuple[int, ...]


class Discard(Struct, frozen=True):
    """Remove what is left of the parts of one report: they were committed, or no checkpoint will be made of them.

    `abandoned`: the number they had; what already lies under it goes too, if it is made of these parts.
    """

    epoch: int
    attempt: int
    report: int
    abandoned: int | None = None


class Sweep(Struct, frozen=True):
    """Remove everything that was staged before an attempt, or (None) everything: it is not needed any more.

    It may be carried out late, when a younger attempt has begun to stage: what is younger is never removed.
    """

    keep_attempt: int | None


Action = Look | StartGang | StopGang | Answer | Tell | Persist | EndKeeper | MakeCommit | Remove | Discard | Sweep
