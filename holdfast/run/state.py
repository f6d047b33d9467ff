"""The state of one run: an event in, records and actions out. Pure: no file, process, clock or random number.

The durable half of the state is the fold of the run's records (`fold`), live and after a restart alike. The live half
is what this driver's processes are doing. What is owed (an answer, a commit, an end) is derived from both, never
remembered from the moment it came up.

    settling ──▶ looking ──▶ running ──▶ stopping
       ▲  every staged     newest one     │ every rank
       │  checkpoint is    is whole       │ returned or is gone
       │  committed        again          ▼
       └───────────────────────────── settling ──▶ ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, field

from holdfast import events
from holdfast.checkpoint.retention import forgettable, has_score
from holdfast.run.config import CheckpointConfig, FailureConfig
from holdfast.run.folded import Folded, Held, Record
from holdfast.run.policies import after_failure
from holdfast.run.signals import (
    Action,
    Answer,
    Begun,
    CleaningFailed,
    Committed,
    Discard,
    Durable,
    EndKeeper,
    Event,
    Exited,
    GangRefused,
    KeeperDied,
    Look,
    Looked,
    LookFailed,
    MakeCommit,
    Persist,
    PutOff,
    Raised,
    RankEvent,
    Remove,
    Reported,
    Returned,
    StartGang,
    StopGang,
    StorageFailed,
    Sweep,
    Tell,
    Tick,
)

Phase = Literal["settling", "looking", "running", "stopping", "ended"]
Goal = Literal["go on", "finish", "fail"]

STAGED_LIMIT = 2  # checkpoints that may wait to be durable before `report` waits too
STAGED_SHARE = 4  # and at most this fraction of the free space: a quarter
NAME_MISSING_AFTER_S = 30.0
CATCH_UP_S = 5.0  # after a failure: for the other ranks' reports that the failed one has made already
KEEPER_DEATHS_LIMIT = 5  # in a row; then the driver does its work itself
RECORD_AFTER_S = 1.0  # metrics of rank 0 do not wait longer for those of other ranks
SLOWEST_DISK_BYTES_S = 10e6  # nobody is ended for being as slow as this


class _Rank(Struct):
    reports: int = 0
    returned: bool = False
    returned_at: float = 0.0
    gone: bool = False


class _Pending(Struct):
    """A report that not every rank has made."""

    since: float
    metrics: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    sync: set[int] = field(default_factory=set)
    free_bytes: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    recorded: bool = False  # rank 0's metrics are: the other ranks take long
    missed: str = ""  # the ranks that were said to be missing, in words


class _Owed(Struct):
    """A rank that waits in `report` for a staged checkpoint."""

    rank: int
    report: int
    number: int
    sync: bool
    free_bytes: int


class _Trouble(Struct):
    """A checkpoint that storage has refused to take, or to show."""

    since: float
    step: Literal["persist", "commit", "look"]
    tries: int = 0
    retry_at: float | None = None  # None: it is being tried


class RunState:
    """One run.

    Args:
        world_size: its ranks.
        epoch: of the owner.
        failures: what happens after failures.
        checkpoints: which are kept.
        report_timeout_s: how long a rank may wait for the others.
    """

    def __init__(
        self,
        world_size: int,
        epoch: int = 1,
        failures: FailureConfig | None = None,
        checkpoints: CheckpointConfig | None = None,
        report_timeout_s: float = 1800.0,
    ) -> None:
        self._world_size = world_size
        self._epoch = epoch
        self._failure_config = failures or FailureConfig()
        self._checkpoint_config = checkpoints or CheckpointConfig()
        self._report_timeout_s = report_timeout_s
        self.folded = Folded(self._checkpoint_config.checkpoint_score_attribute)
        # This driver's.
        self.phase: Phase = "settling"
        self.goal: Goal = "go on"
        self.reason = ""
        self.failures: dict[int, str] = {}
        self.failure_count = 0
        self.attempts_here = 0
        self.start: int | None = None
        self._base_iteration = 0
        self._returned_value: Any = None
        self._ranks: list[_Rank] = []
        self._whole_reports = 0  # of this attempt, made by every rank that has not returned
        self._pending: dict[int, _Pending] = {}
        self._owed: list[_Owed] = []
        self._errors: list[str] = []  # that no rank was told
        self._trouble: dict[int, _Trouble] = {}
        self._catching_up_until: float | None = None
        self._unrecorded: deque[int] = deque()
        self._told_leaving = False
        self._put_off: set[int] = set()
        self._keeper_deaths = 0
        self._in_use: frozenset[int] = frozenset()
        self._told_missing_attribute = False
        self._records: list[Record] = []
        self._actions: list[Action] = []
        self._events: list[events.Event] = []

    # ---- what others read

    def take_records(self) -> list[Record]:
        """Returns the records that are due, and forgets them: they must be written before any action is taken."""
        records, self._records = self._records, []
        return records

    def take_actions(self) -> list[Action]:
        """Returns the actions that are due; the records before them have been written."""
        actions, self._actions = self._actions, []
        return actions

    def take_events(self) -> list[events.Event]:
        """Returns what observers are to hear."""
        happened, self._events = self._events, []
        return happened

    def deadline(self) -> float | None:
        """Returns when a `Tick` is next of use; None: not until something happens."""
        times = [trouble.retry_at for trouble in self._trouble.values() if trouble.retry_at is not None]
        if self._catching_up_until is not None:
            times.append(self._catching_up_until)
        if self.phase == "running":
            times += [self._next_look(pending) for _, pending in self._waited_for()]
            times += [pending.since + RECORD_AFTER_S for pending in self._oldest_unrecorded()]
            times += [since + wait_s for since, wait_s in self._leaving()]
        times += [held.asked_at + self._patience_s(held) for held in self._asked_for() if held.asked_at is not None]
        return min(times, default=None)

    def _oldest_unrecorded(self) -> list[_Pending]:
        """The oldest report of rank 0, without a checkpoint, that waits for other ranks to be written down."""
        while self._unrecorded and self._unrecorded[0] not in self._pending:
            self._unrecorded.popleft()
        return [self._pending[self._unrecorded[0]]] if self._unrecorded else []

    def _leaving(self) -> list[tuple[float, float]]:
        """Since when the processes of ranks that have all returned are waited for, and how long they may be."""
        if not self._ranks or not all(rank.returned for rank in self._ranks):
            return []
        since = max(rank.returned_at for rank in self._ranks)
        return [(since, self._report_timeout_s if self._told_leaving else NAME_MISSING_AFTER_S)]

    def _asked_for(self) -> list[Held]:
        return [held for held in self.folded.staged.values() if held.asked_at is not None and not held.is_durable]

    def _patience_s(self, held: Held) -> float:
        """How long the keeper may take: until that is said, and then until it is ended."""
        if not held.missed:
            return NAME_MISSING_AFTER_S
        return self._failure_config.storage_deadline_s + held.size_bytes / SLOWEST_DISK_BYTES_S

    def _waited_for(self) -> list[tuple[int, _Pending]]:
        """The reports in which a rank waits for others: a rank with a part waits in its latest one."""
        latest = sorted({rank.reports - 1 for rank in self._ranks} & self._pending.keys())
        return [(report, self._pending[report]) for report in latest if self._pending[report].parts]

    def _next_look(self, pending: _Pending) -> float:
        """When it is next of use to look who is missing in a report."""
        wait_s = self._report_timeout_s if pending.missed else min(NAME_MISSING_AFTER_S, self._report_timeout_s)
        return pending.since + wait_s

    # ---- the fold

    def fold(self, record: Record) -> None:
        """Takes in one record of the journal."""
        self.folded.add(record)

    def _record(self, time: float, kind: str, **values: Any) -> None:
        record = {"kind": kind, "time": time, **values}
        self._records.append(record)
        self.fold(record)

    # ---- events

    def apply(self, event: Event) -> None:
        """Takes in what happened. Afterwards the due records, actions and observer events are there to be taken."""
        if isinstance(event, RankEvent) and not self._is_current(event):
            return
        getattr(self, "_on_" + type(event).__name__.lower())(event)
        self._pay()
        self._move_on(event.time)

    def _is_current(self, event: RankEvent) -> bool:
        return event.attempt == self.folded.attempt and self.phase in ("running", "stopping")

    def _on_begun(self, event: Begun) -> None:
        unknown = [number for number in event.taken if number >= self.folded.next_number]
        if unknown:
            self._record(event.time, "skipped", next_number=max(unknown) + 1)
            names = ", ".join(map(str, unknown))
            self._warn(
                event.time, f"checkpoints {names} are in the way: no journal has given these numbers; left alone"
            )
        let_go = [number for number in event.present if self.folded.was_let_go(number)]
        if let_go:
            self._actions.append(Remove(tuple(let_go)))  # the deletion is finished
        for held in self.folded.staged.values():
            self._persist(event.time, held)

    def _on_looked(self, event: Looked) -> None:
        if self.phase != "looking":
            return
        self._end_trouble(event.time, event.number, "look")
        if event.problems:
            why = "; ".join(event.problems[:3])
            self._record(event.time, "damaged", number=event.number, why=why)
            self._events.append(events.DamageFound(event.number, why, time=event.time))
            self._look_or_start(event.time)
        else:
            self._start_attempt(event.time, self.folded.held[event.number])

    def _on_lookfailed(self, event: LookFailed) -> None:
        if self.phase == "looking":
            if self._is_hopeless(event.time, event.number, "look", event.passing):
                self.phase = "settling"
                self.goal, self.reason = "fail", f"checkpoint {event.number} could not be read: {event.reason}"
            else:
                self._try_again(event.time, event.number, event.reason)

    def _look_or_start(self, time: float) -> None:
        newest = self.folded.committed[-1:]
        if newest:
            self.phase = "looking"
            self._actions.append(Look(newest[0].number))
        elif self.folded.damaged:
            self.phase, self.goal = "settling", "fail"
            numbers = ", ".join(map(str, sorted(self.folded.damaged)))
            self.reason = (
                f"every checkpoint is damaged ({numbers}): restore one from a copy, or begin under another name"
            )
        else:
            self._start_attempt(time, None)

    def _start_attempt(self, time: float, start: Held | None) -> None:
        self.start = start.number if start else None
        self._base_iteration = start.iteration if start else 0
        self._record(
            time,
            "attempt",
            attempt=self.folded.attempt + 1,
            epoch=self._epoch,
            checkpoint=self.start,
            iteration=self._base_iteration,
            world_size=self._world_size,
        )
        self.attempts_here += 1
        self._ranks = [_Rank() for _ in range(self._world_size)]
        self._whole_reports = 0
        self._unrecorded.clear()
        self._told_leaving = False
        self.phase = "running"
        self._actions += [StartGang(self.folded.attempt, self.start), Sweep(self.folded.attempt)]
        self._events.append(events.AttemptStarted(self.folded.attempt, self._world_size, self.start, time=time))

    def _on_gangrefused(self, event: GangRefused) -> None:
        if event.attempt != self.folded.attempt or self.phase not in ("running", "stopping"):
            return
        for rank in self._ranks:
            rank.gone = True
        if self.phase == "running":
            self.goal, self.reason = "fail", event.reason
            self._stop(event.time)

    # ---- reports

    def _on_reported(self, event: Reported) -> None:
        self._ranks[event.rank].reports = event.report + 1
        pending = self._pending.setdefault(event.report, _Pending(event.time))
        pending.metrics[event.rank] = event.metrics
        if event.failed:
            pending.failed[event.rank] = event.failed
        elif event.part_bytes is None and event.rank == 0:
            self._unrecorded.append(event.report)
        if event.part_bytes is not None:
            if not pending.parts:
                pending.since = event.time
            pending.parts[event.rank] = event.part_bytes
            pending.free_bytes = event.free_bytes
            if event.sync:
                pending.sync.add(event.rank)
        self._complete_reports(event.time)

    def _on_returned(self, event: Returned) -> None:
        self._ranks[event.rank].returned = True
        self._ranks[event.rank].returned_at = event.time
        if event.rank == 0:
            self._returned_value = event.value
        self._complete_reports(event.time)

    def _complete_reports(self, time: float) -> None:
        reports = [rank.reports for rank in self._ranks]
        reached = min((rank.reports for rank in self._ranks if not rank.returned), default=max(reports))
        for report in range(self._whole_reports, reached):
            self._write_report(time, report, self._pending.pop(report), is_whole=True)
        self._whole_reports = max(self._whole_reports, reached)

    def _write_report(self, time: float, report: int, pending: _Pending, *, is_whole: bool) -> None:
        if pending.missed and is_whole:
            self._events.append(events.WaitingOver(pending.missed, time=time))
        if pending.parts and is_whole and not pending.failed:
            self._stage(time, report, pending)
        else:
            self._record_metrics(time, report, pending)
            if is_whole:
                self._refuse_parts(report, pending)

    def _values(self, report: int, pending: _Pending) -> dict[str, Any]:
        values: dict[str, Any] = {
            "attempt": self.folded.attempt,
            "report": report,
            "iteration": self._base_iteration + report + 1,
            # A run's metrics are rank 0's, were it its last ones.
            "metrics": pending.metrics.get(0, self.folded.metrics),
        }
        others = {str(rank): metrics for rank, metrics in sorted(pending.metrics.items()) if rank != 0 and metrics}
        return {**values, "others": others} if others else values

    def _stage(self, time: float, report: int, pending: _Pending) -> None:
        number, ranks, size_bytes = self.folded.next_number, sorted(pending.parts), sum(pending.parts.values())
        values = self._values(report, pending)
        self._record(time, "staged", number=number, epoch=self._epoch, parts=ranks, size_bytes=size_bytes, **values)
        self._persist(time, self.folded.staged[number])
        for rank in ranks:
            self._owed.append(_Owed(rank, report, number, rank in pending.sync, pending.free_bytes))
        self._tell_reported(time, pending, values)

    def _record_metrics(self, time: float, report: int, pending: _Pending) -> None:
        values = self._values(report, pending)
        if not pending.recorded:
            self._record(time, "report", **values)
            self._tell_reported(time, pending, values)
        elif "others" in values:
            others = {name: values[name] for name in ("attempt", "report", "others")}
            self._record(time, "others", **others)

    def _tell_reported(self, time: float, pending: _Pending, values: Mapping[str, Any]) -> None:
        if not pending.recorded:
            self._events.append(events.Reported(self.folded.attempt, values["iteration"], values["metrics"], time=time))

    def _refuse_parts(self, report: int, pending: _Pending) -> None:
        """Answers those who gave a part of a checkpoint to which another rank could not give its own."""
        if pending.parts:
            why = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(pending.failed.items()))
            error = f"there is no checkpoint of this report, since another rank could not give its part: {why}"
            self._actions += [Answer(rank, report, -1, error) for rank in sorted(pending.parts)]
            self._actions.append(Discard(self._epoch, self.folded.attempt, report))

    def _pay(self) -> None:
        """Answers every rank whose answer is due now."""
        waiting: list[_Owed] = []
        for owed in self._owed:
            if self._errors and self._goes_on:
                self._actions.append(Answer(owed.rank, owed.report, owed.number, self._errors.pop(0)))
            elif self._may_return(owed):
                self._actions.append(Answer(owed.rank, owed.report, owed.number))
            else:
                waiting.append(owed)
        self._owed = waiting

    @property
    def _goes_on(self) -> bool:
        """Whether this attempt goes on: who is answered can still do something about it."""
        return self.phase == "running" and self._catching_up_until is None

    def _may_return(self, owed: _Owed) -> bool:
        if owed.sync and owed.number in self.folded.staged:
            return False
        behind = [held for held in self.folded.staged.values() if not held.is_durable]
        within_share = sum(held.size_bytes for held in behind) * STAGED_SHARE <= owed.free_bytes
        return len(behind) <= 1 or (len(behind) <= STAGED_LIMIT and within_share)

    # ---- storage

    def _on_durable(self, event: Durable) -> None:
        held = self.folded.staged.get(event.number)
        if held is None:
            return
        self._keeper_deaths = 0
        held.durable.add(event.rank)
        if held.is_durable:
            self._end_trouble(event.time, event.number, "persist")
        self._commit_in_order()

    def _commit_in_order(self) -> None:
        """Commits the oldest staged one, once it is durable: the newest committed one only ever gets newer."""
        for held in self.folded.staged.values():
            if held.is_durable and not held.committing:
                held.committing = True
                self._actions.append(MakeCommit(held.number))
            return

    def _on_committed(self, event: Committed) -> None:
        held = self.folded.staged.get(event.number)
        if held is None:
            return
        self._end_trouble(event.time, event.number, "commit")
        self._record(event.time, "committed", number=event.number, size_bytes=event.size_bytes)
        self._actions.append(Discard(held.epoch, held.attempt, held.report))
        self._in_use = event.in_use
        seconds = event.time - held.staged_at
        self._events.append(
            events.CheckpointCommitted(
                event.number, event.path, event.size_bytes, held.metrics, seconds, time=event.time
            )
        )
        for conflict in event.conflicts:
            self._warn(event.time, f"checkpoint {event.number}: {conflict}")
        self._say_missing_attribute(event.time, held)
        self._retain(event.time)
        self._remove_put_off()
        if self.phase == "running":
            self._actions.append(Tell(event.number))
        self._commit_in_order()

    def _retain(self, time: float) -> None:
        """Forgets what is neither among the best, nor the newest, nor open in a reader.

        The start of the attempt is kept until every rank has passed it without a pin of its own: until the attempt's
        first commit it is the newest, and what is committed then, every rank has reported.
        """
        if self._checkpoint_config.num_to_keep is None:
            return
        pinned = {held.number for held in self.folded.committed[-1:]} | self._in_use
        numbers = forgettable(self.folded.candidates, self._checkpoint_config.retention, pinned)
        if numbers:
            self._record(time, "forgotten", numbers=numbers)
            self._actions.append(Remove(tuple(numbers)))

    def _say_missing_attribute(self, time: float, held: Held) -> None:
        attribute = self._checkpoint_config.checkpoint_score_attribute
        if attribute is None or self._told_missing_attribute or has_score(held.metrics, attribute):
            return
        self._told_missing_attribute = True
        there = ", ".join(sorted(held.metrics)) or "none"
        self._warn(
            time,
            f"checkpoint {held.number} was reported without a number {attribute!r}, by which the best are kept: it "
            f"ranks below all that have it (metrics that were there: {there})",
        )

    def _persist(self, time: float, held: Held) -> None:
        held.asked_at, held.missed = time, False
        self._actions.append(Persist(held.number, in_driver=self._keeper_deaths > KEEPER_DEATHS_LIMIT))

    def _on_storagefailed(self, event: StorageFailed) -> None:
        held = self.folded.staged.get(event.number)
        if held is None or (event.step == "persist" and held.is_durable):
            return
        held.asked_at = None
        if self._is_hopeless(event.time, event.number, event.step, event.passing):
            self._abandon(event.time, event.number, event.reason)
        else:
            self._try_again(event.time, event.number, event.reason)

    def _is_hopeless(self, time: float, number: int, step: Literal["persist", "commit", "look"], passing: bool) -> bool:
        """Whether storage is to be asked no more, after it has refused."""
        trouble = self._trouble.setdefault(number, _Trouble(time, step))
        config = self._failure_config
        too_late = time - trouble.since >= config.storage_deadline_s
        return not passing or config.on_storage_error == "fail" or too_late

    def _try_again(self, time: float, number: int, reason: str) -> None:
        trouble = self._trouble[number]
        if trouble.tries == 0:
            self._events.append(events.Waiting(f"{self._trouble_name(number)} ({reason})", time=time))
        if trouble.retry_at is None:  # else another rank's part was refused just before: one try will do for both
            trouble.retry_at = time + min(0.25 * 2 ** min(trouble.tries, 6), 15.0)
            trouble.tries += 1

    def _abandon(self, time: float, number: int, reason: str) -> None:
        self._trouble.pop(number, None)
        held = self.folded.held[number]
        self._record(time, "abandoned", number=number, why=reason)
        self._actions.append(Discard(held.epoch, held.attempt, held.report, abandoned=number))
        if held.epoch == self._epoch:  # else this driver's workers start from the one before: none of them relied on it
            self._raise(number, f"checkpoint {number} could not be kept: {reason}")
        self._events.append(events.CheckpointAbandoned(number, reason, time=time))
        self._commit_in_order()

    def _raise(self, number: int, error: str) -> None:
        """Lets `report` raise in every rank that waits for this checkpoint, or else in the next that is answered."""
        waiting = [owed for owed in self._owed if owed.number == number]
        self._owed = [owed for owed in self._owed if owed.number != number]
        if waiting and self._goes_on:
            self._actions += [Answer(owed.rank, owed.report, number, error) for owed in waiting]
        else:
            self._errors.append(error)

    def _end_trouble(self, time: float, number: int, step: str) -> None:
        trouble = self._trouble.get(number)
        if trouble is not None and trouble.step == step:
            del self._trouble[number]
            self._events.append(events.WaitingOver(self._trouble_name(number), time=time))

    def _trouble_name(self, number: int) -> str:
        return f"storage to {'show' if self.phase == 'looking' else 'take'} checkpoint {number}"

    def _on_keeperdied(self, event: KeeperDied) -> None:
        self._keeper_deaths += 1
        for held in self.folded.staged.values():
            trouble = self._trouble.get(held.number)
            if not held.is_durable and (trouble is None or trouble.retry_at is None):
                self._persist(event.time, held)

    def _on_putoff(self, event: PutOff) -> None:
        self._put_off.update(event.numbers)

    def _remove_put_off(self) -> None:
        if self._put_off:
            self._actions.append(Remove(tuple(sorted(self._put_off))))
            self._put_off.clear()

    def _on_cleaningfailed(self, event: CleaningFailed) -> None:
        self._warn(event.time, f"{event.reason}; the next driver of this experiment tries again")

    # ---- time

    def _on_tick(self, event: Tick) -> None:
        self._retry_due(event.time)
        self._look_after_keeper(event.time)
        if self.phase != "running":
            return
        for report, pending in self._waited_for():
            if event.time >= self._next_look(pending):
                self._name_missing(event.time, report, pending, event.time - pending.since)
        for pending in self._oldest_unrecorded():
            if event.time >= pending.since + RECORD_AFTER_S:
                self._record_metrics(event.time, self._unrecorded[0], pending)
                pending.recorded = True
                self._unrecorded.popleft()
        for since, wait_s in self._leaving():
            if event.time >= since + wait_s:
                self._end_leaving(event.time)

    def _retry_due(self, time: float) -> None:
        for number, trouble in list(self._trouble.items()):
            if trouble.retry_at is not None and time >= trouble.retry_at:
                trouble.retry_at = None
                if trouble.step == "persist":
                    self._persist(time, self.folded.staged[number])
                else:
                    self._actions.append(MakeCommit(number) if trouble.step == "commit" else Look(number))

    def _look_after_keeper(self, time: float) -> None:
        """Says that the keeper takes long, and ends it when it takes too long."""
        for held in self._asked_for():
            if held.asked_at is None or time < held.asked_at + self._patience_s(held):
                continue
            if held.missed:
                self._actions.append(EndKeeper())
                held.asked_at = None  # its death has it asked for again
            else:
                held.missed = True
                what = f"checkpoint {held.number} to be durable: the disk has taken {time - held.asked_at:.0f} s so far"
                self._events.append(events.Waiting(what, time=time))

    def _end_leaving(self, time: float) -> None:
        """All ranks have returned, but a process stays: a thread of the user's may still have something to do."""
        gone = [number for number, rank in enumerate(self._ranks) if not rank.gone]
        if self._told_leaving:
            self._actions.append(StopGang(self.folded.attempt))
        else:
            what = f"the processes of rank {', '.join(map(str, gone))} to end: their training functions have returned"
            self._events.append(events.Waiting(what, time=time))
        self._told_leaving = True

    def _name_missing(self, time: float, report: int, pending: _Pending, waited: float) -> None:
        missing = [n for n, rank in enumerate(self._ranks) if rank.reports <= report and not rank.returned]
        here, away = (", ".join(map(str, ranks)) for ranks in (sorted(pending.parts), missing))
        if not pending.missed:
            pending.missed = f"rank {away} to call report: rank {here} is in its report number {report + 1}"
            self._events.append(events.Waiting(pending.missed, time=time))
        if waited >= self._report_timeout_s:
            self.goal = "fail"
            self.reason = (
                f"rank {here} waited {waited:.0f} s (report_timeout_s) in its report number {report + 1} "
                f"for rank {away}: call report on every rank, equally often"
            )
            self._stop(time)

    # ---- ends

    def _on_raised(self, event: Raised) -> None:
        self.failures[event.rank] = event.traceback
        self._begin_catching_up(event.time)

    def _on_exited(self, event: Exited) -> None:
        rank = self._ranks[event.rank]
        rank.gone = True
        if not rank.returned and self.phase == "running":  # else it was ended by us
            self.failures.setdefault(event.rank, event.how)
            self._begin_catching_up(event.time)

    def _begin_catching_up(self, time: float) -> None:
        if self.phase == "running" and self._catching_up_until is None:
            self._catching_up_until = time + CATCH_UP_S

    def _others_catch_up(self, time: float) -> bool:
        """Whether a rank is behind one that failed, and may still make the reports that the other has made.

        A rank without a checkpoint does not wait in `report`, so it may fail while what it has reported is still being
        staged by another: stopping at once would lose that checkpoint, and a loop that fails there would never get on.
        """
        if self._catching_up_until is None or time >= self._catching_up_until:
            return False
        ahead = max(self._ranks[rank].reports for rank in self.failures)
        return any(
            rank.reports < ahead and not rank.returned and not rank.gone and number not in self.failures
            for number, rank in enumerate(self._ranks)
        )

    def _stop(self, time: float) -> None:
        if self.phase == "running":
            self.phase = "stopping"
            self._catching_up_until = None
            self._actions.append(StopGang(self.folded.attempt))

    def request_stop(self, time: float, reason: str) -> None:
        """Ends the run from outside (Ctrl-C): what is staged is committed, then the run fails for `reason`."""
        if self.phase == "ended":
            return
        self.goal, self.reason = "fail", reason
        if self.phase == "looking":
            self.phase = "settling"
        self._stop(time)
        self._move_on(time)

    def _move_on(self, time: float) -> None:
        """Takes the run to its next phase when nothing holds it where it is."""
        if self._catching_up_until is not None and not self._others_catch_up(time):
            self._stop(time)
        if self.phase == "running" and all(rank.returned and rank.gone for rank in self._ranks):
            self.phase, self.goal = "settling", "finish"
            self._end_attempt(time)
        elif self.phase == "stopping" and all(rank.gone for rank in self._ranks):
            self._after_failure(time)
        if self.phase == "settling" and not self.folded.staged:
            self._settled(time)

    def _after_failure(self, time: float) -> None:
        self._end_attempt(time)
        self.phase = "settling"
        if self.goal == "fail":
            return
        self.failure_count += 1
        reasons = {str(rank): why for rank, why in sorted(self.failures.items())}
        self._record(time, "attempt_failed", attempt=self.folded.attempt, why=reasons)
        self._events.append(events.AttemptFailed(self.folded.attempt, dict(self.failures), time=time))
        if after_failure(self._failure_config, self.failure_count) == "fail":
            self.goal = "fail"
            self.reason = f"attempt {self.folded.attempt} failed, and max_failures={self._failure_config.max_failures}"

    def _end_attempt(self, time: float) -> None:
        """Writes down what reports were incomplete, and owes nobody of this attempt anything any more."""
        for report in sorted(self._pending):
            pending = self._pending.pop(report)
            if 0 in pending.metrics:
                self._write_report(time, report, pending, is_whole=False)
        self._owed.clear()

    def _settled(self, time: float) -> None:
        if self.goal == "go on":
            self.failures = {}
            self._look_or_start(time)
        if self.goal == "go on":
            return
        self.phase = "ended"
        if self.goal == "finish":
            self._finish_or_fail(time)
        if self.goal == "fail":
            self._record(time, "failed", why=self.reason)
        self._remove_put_off()
        self._actions.append(Sweep(None))  # last: it takes what a removal leaves too

    def _finish_or_fail(self, time: float) -> None:
        self._retain(time)
        attribute = self._checkpoint_config.checkpoint_score_attribute
        if self._errors:
            self.goal, self.reason = "fail", "; ".join(self._errors)
        elif attribute is not None and self.folded.committed and not self.folded.scored:
            there = sorted({name for held in self.folded.committed for name in held.metrics})
            self.goal = "fail"
            self.reason = (
                f"checkpoint_score_attribute is {attribute!r}, but no checkpoint was ever reported with it "
                f"(metrics that were there: {', '.join(there) or 'none'})"
            )
        else:
            self._record(time, "finished", return_value=self._returned_value)

    def _warn(self, time: float, message: str) -> None:
        self._events.append(events.Warned(message, time=time))
