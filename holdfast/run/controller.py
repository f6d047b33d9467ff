"""The one loop of a run that acts, in two calls.

`collect` takes in what has happened and returns the records that are due; whoever owns the journal writes them; then
`obey` acts. Nothing is obeyed before it is written. What takes long on the disk (commits, deletions, looking at a
checkpoint before it is used) is done in order by one thread beside the loop.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from holdfast import events
from holdfast.checkpoint.keeper import Keeper
from holdfast.checkpoint.manifest import Origin, part_directory
from holdfast.checkpoint.store import STAGING, CheckpointStore, Commit
from holdfast.engines.base import Engine, Exit, Message, Process, ProcessSpec
from holdfast.errors import EngineError, HoldfastError, OwnershipLost, StorageError
from holdfast.plain import decode, encode
from holdfast.run import keeper, signals
from holdfast.run.config import RunSpec
from holdfast.run.folded import Held, Record
from holdfast.run.session import Assignment, StorageContext, TrainContext
from holdfast.run.state import RunState
from holdfast.run.worker import pack
from holdfast.storage.local import storage_error

WORKER = "holdfast.run.worker:main"
KEEPER = "holdfast.run.keeper:main"
_LONGEST_WAIT_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where a run lies: its experiment's folder, and its own, on this machine's file system."""

    experiment: str
    root: Path
    folder: Path

    def staging(self, epoch: int, attempt: int) -> Path:
        """The folder in which the workers of an attempt stage their parts."""
        return self.folder / STAGING / str(epoch) / str(attempt)

    def log(self, rank: int, stream: str) -> Path:
        """The file that a rank's `stdout` or `stderr` goes to."""
        return self.folder / f"rank{rank}.{stream}.log"

    @property
    def context(self) -> StorageContext:
        return StorageContext(str(self.root.parent), str(self.root), str(self.folder))


@dataclass(frozen=True)
class Ownership:
    """What the driver's hold on the journal lets a run do."""

    epoch: int
    sync: Callable[[], None]
    look: Callable[[], None]


class RunController:
    """Carries out one run on an engine.

    Args:
        spec: the run.
        place: where it lies.
        store: its checkpoints.
        engine: what runs its processes.
        ownership: of the journal; asked before anything is published or deleted.
        earlier: the run's records so far.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: Place,
        store: CheckpointStore,
        engine: Engine,
        ownership: Ownership,
        earlier: Iterable[Record] = (),
    ) -> None:
        self.state = RunState(spec.world_size, ownership.epoch, spec.failures, spec.checkpoints, spec.report_timeout_s)
        for record in earlier:
            self.state.fold(record)
        self._spec = spec
        self._place = place
        self._store = store
        self._engine = engine
        self._own = ownership
        self._gang: list[Process] = []
        self._ranks: dict[str, tuple[int, int]] = {}  # a process's id -> its attempt and rank
        self._keeper: Process | None = None
        self._own_keeper = Keeper()  # for when the other one dies and dies
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="holdfast-disk")
        self._done: deque[signals.Event | BaseException] = deque()
        self._events: list[events.Event] = []
        self.state.apply(signals.Begun(now(), tuple(store.taken()), tuple(store.list())))

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do, now that the last records were obeyed."""
        return self.state.phase == "ended"

    @property
    def waits_for_storage_s(self) -> float:
        """How long a full disk is waited for; 0: not at all."""
        failures = self._spec.failures
        return failures.storage_deadline_s if failures.on_storage_error == "wait" else 0.0

    def wait(self) -> None:
        """Returns when there may be something to collect."""
        deadline = self.state.deadline()
        left_s = _LONGEST_WAIT_S if deadline is None else deadline - now()
        if not self._done and left_s > 0:
            self._engine.wait(min(left_s, _LONGEST_WAIT_S))

    def collect(self) -> list[Record]:
        """Takes in what has happened; returns the records that must be written before `obey`."""
        for arrived in self._engine.poll():
            self._take_in(arrived)
        while self._done:
            event = self._done.popleft()
            if isinstance(event, BaseException):
                raise event
            self.state.apply(event)
        deadline = self.state.deadline()
        if deadline is not None and now() >= deadline:
            self.state.apply(signals.Tick(now()))
        return self.state.take_records()

    def obey(self) -> list[events.Event]:
        """Does what the written records say; returns what observers are to hear."""
        # Who waits is told and answered first: of the other actions none depends on an answer.
        waiting = (signals.Tell, signals.Answer)
        for action in sorted(self.state.take_actions(), key=lambda action: not isinstance(action, waiting)):
            getattr(self, "_do_" + type(action).__name__.lower())(action)
        happened, self._events = self._events + self.state.take_events(), []
        return happened

    def interrupt(self, reason: str) -> None:
        """Ends the run for `reason`: its workers are ended, what is staged is committed."""
        self.state.request_stop(now(), reason)

    def close(self) -> None:
        """Ends what still runs; returns when it is gone and the disk's thread is idle."""
        self._engine.stop(self._gang)
        self._disk.shutdown()

    # ---- what happened

    def _take_in(self, arrived: Message | Exit) -> None:
        if self._keeper is not None and arrived.process == self._keeper:
            self._take_in_keeper(arrived)
        elif arrived.process.id in self._ranks:
            self._take_in_rank(arrived, *self._ranks[arrived.process.id])

    def _take_in_rank(self, arrived: Message | Exit, attempt: int, rank: int) -> None:
        at = now()
        if isinstance(arrived, Exit):
            del self._ranks[arrived.process.id]
            self.state.apply(signals.Exited(at, attempt, rank, _how_it_ended(arrived.status)))
            return
        message = decode(arrived.data)
        kind = message["t"]
        if kind == "report":
            self.state.apply(_reported(at, attempt, rank, message))
        elif kind == "returned":
            self.state.apply(signals.Returned(at, attempt, rank, message["value"]))
        elif kind == "raised":
            self.state.apply(signals.Raised(at, attempt, rank, message["traceback"]))
        elif kind == "publish":
            self._tell_gang({"t": "published", "key": message["key"], "value": message["value"]})
        elif kind == "warn":
            self._events.append(events.Warned(message["what"], time=at))
        elif kind == "waiting":
            self._events.append(events.Waiting(message["what"], time=at))
        elif kind == "waited":
            self._events.append(events.WaitingOver(message["what"], time=at))

    def _take_in_keeper(self, arrived: Message | Exit) -> None:
        at = now()
        if isinstance(arrived, Exit):
            self._keeper = None
            self.state.apply(signals.KeeperDied(at))
            return
        answer = decode(arrived.data)
        if "error" in answer:
            self.state.apply(signals.StorageFailed(at, answer["number"], answer["error"], answer["passing"]))
        else:
            self.state.apply(signals.Durable(at, answer["number"], answer["rank"]))

    # ---- what is to be done

    def _do_startgang(self, action: signals.StartGang) -> None:
        checkpoint = self._spec.start_from if action.checkpoint is None else self._store.open(action.checkpoint).path
        try:
            self._place.staging(self._own.epoch, action.attempt).mkdir(parents=True, exist_ok=True)
            self._gang = self._engine.start_gang(
                [self._process(rank, action.attempt, checkpoint) for rank in range(self._spec.world_size)]
            )
        except (EngineError, OSError) as error:
            self._done.append(signals.GangRefused(now(), action.attempt, str(error)))
            self._engine.wake()
            return
        self._ranks.update({process.id: (action.attempt, rank) for rank, process in enumerate(self._gang)})
        self._started_keeper()

    def _process(self, rank: int, attempt: int, checkpoint: str | None) -> ProcessSpec:
        spec = self._spec
        context = TrainContext(
            experiment_name=self._place.experiment,
            world_size=spec.world_size,
            world_rank=rank,
            local_rank=rank,
            local_world_size=spec.world_size,
            node_rank=0,
            storage=self._place.context,
        )
        staging = str(self._place.staging(self._own.epoch, attempt))
        return ProcessSpec(
            entry=WORKER,
            payload=pack(Assignment(attempt, staging, checkpoint, self.waits_for_storage_s, context), spec.function),
            name=f"rank {rank}",
            env=spec.env,
            cpus=spec.scaling.cpus_per_worker,
            gpus=spec.scaling.gpus_per_worker,
            stdout=self._place.log(rank, "stdout"),
            stderr=self._place.log(rank, "stderr"),
        )

    def _do_stopgang(self, action: signals.StopGang) -> None:
        self._engine.stop(self._gang)
        self._engine.wake()  # their exits are there to be polled

    def _do_answer(self, action: signals.Answer) -> None:
        self._tell(action.rank, {"t": "answer", "n": action.report, "number": action.number, "error": action.error})

    def _do_tell(self, action: signals.Tell) -> None:
        self._tell_gang({"t": "committed", "path": self._store.open(action.number).path})

    def _tell_gang(self, message: dict[str, Any]) -> None:
        for rank in range(len(self._gang)):
            self._tell(rank, message)

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        self._engine.send(self._gang[rank], encode(message))

    def _do_persist(self, action: signals.Persist) -> None:
        held = self.state.folded.held.get(action.number)
        if held is None:
            return
        if held.epoch != self._own.epoch and self._is_published(held):  # by a driver that died before it wrote so
            self._done.extend(signals.Durable(now(), held.number, rank) for rank in held.ranks)
            self._engine.wake()
            return
        for rank in sorted(set(held.ranks) - held.durable):
            process = None if action.in_driver else self._started_keeper()
            if process is None:
                self._on_disk(self._persist, held.number, rank, self._part(held, rank))
            else:
                self._engine.send(process, keeper.ask(held.number, rank, self._part(held, rank)))

    def _persist(self, number: int, rank: int, part: Path) -> signals.Event:
        failure = self._own_keeper.persist(part)
        if failure is None:
            return signals.Durable(now(), number, rank)
        return signals.StorageFailed(now(), number, failure.reason, failure.passing)

    def _do_endkeeper(self, action: signals.EndKeeper) -> None:
        if self._keeper is not None:
            self._engine.stop([self._keeper])

    def _is_published(self, held: Held) -> bool:
        with suppress(HoldfastError):
            return self._store.manifest(held.number).origin == self._origin(held)
        return False

    def _started_keeper(self) -> Process | None:
        """The keeper's process; None if there is none to be had: this driver can do without."""
        if self._keeper is None:
            with suppress(EngineError, OSError):
                self._keeper = self._engine.start_service(ProcessSpec(entry=KEEPER, payload=b"", name="keeper"))
        return self._keeper

    def _part(self, held: Held, rank: int) -> Path:
        return part_directory(self._place.staging(held.epoch, held.attempt), held.report, rank)

    def _origin(self, held: Held) -> Origin:
        return Origin(self._place.experiment, held.epoch, held.attempt, held.report)

    # ---- on the disk's thread, one after the other

    def _on_disk(self, work: Callable[..., signals.Event | None], *arguments: Any) -> None:
        def run() -> None:
            try:
                event: signals.Event | BaseException | None = work(*arguments)
            except BaseException as error:  # raised again by `collect`, in the thread of the run's owner
                event = error
            if event is not None:
                self._done.append(event)
                self._engine.wake()

        self._disk.submit(run)

    def _do_makecommit(self, action: signals.MakeCommit) -> None:
        held = self.state.folded.held.get(action.number)
        if held is not None:
            parts = {rank: self._part(held, rank) for rank in held.ranks}
            retained = (
                [] if self._spec.checkpoints.num_to_keep is None else [h.number for h in self.state.folded.committed]
            )
            commit = Commit(held.number, self._origin(held), parts, held.metrics)
            self._on_disk(self._commit, commit, retained)

    def _commit(self, commit: Commit, retained: list[int]) -> signals.Event:
        try:
            # The number is given for good before anything lies under it; and a manifest that a driver publishes is one
            # that the next driver finds in the journal.
            self._own.sync()
            self._own.look()
            done = self._store.commit(commit)
        except OwnershipLost:
            raise
        except OSError as error:
            failure = storage_error("commit", self._store.open(commit.number).path, error)
            return signals.StorageFailed(now(), commit.number, str(failure), failure.transient, "commit")
        except StorageError as error:
            return signals.StorageFailed(now(), commit.number, str(error), error.transient, "commit")
        except HoldfastError as error:
            return signals.StorageFailed(now(), commit.number, str(error), False, "commit")
        path = self._store.open(commit.number).path
        in_use = self._store.in_use(retained)
        return signals.Committed(now(), commit.number, path, done.manifest.size_bytes, done.conflicts, in_use)

    def _do_look(self, action: signals.Look) -> None:
        self._on_disk(self._look, action.number, self._spec.checkpoints.verify == "full")

    def _look(self, number: int, full: bool) -> signals.Event:
        try:
            return signals.Looked(now(), number, tuple(self._store.verify(number, full=full)))
        except StorageError as error:
            return signals.LookFailed(now(), number, str(error), error.transient)
        except HoldfastError as error:
            return signals.LookFailed(now(), number, str(error), False)

    def _do_remove(self, action: signals.Remove) -> None:
        self._on_disk(self._cleaning, self._remove, action.numbers)

    def _cleaning(self, work: Callable[..., signals.Event | None], *arguments: Any) -> signals.Event | None:
        """Does what may fail without harm: nothing is needed any more of what is removed."""
        self._own.sync()  # forget before delete: the record survives what the bytes do not
        self._own.look()
        try:
            return work(*arguments)
        except OSError as error:
            return signals.CleaningFailed(now(), f"{error.filename or self._place.folder} stays: {error.strerror}")
        except StorageError as error:
            return signals.CleaningFailed(now(), f"something in {self._place.folder} stays: {error}")

    def _remove(self, numbers: Iterable[int]) -> signals.Event | None:
        put_off = tuple(number for number in numbers if not self._store.remove(number))
        return signals.PutOff(now(), put_off) if put_off else None

    def _do_discard(self, action: signals.Discard) -> None:
        self._on_disk(self._cleaning, self._discard, action)

    def _discard(self, action: signals.Discard) -> None:
        rmtree(self._place.staging(action.epoch, action.attempt) / str(action.report), ignore_errors=True)
        if action.abandoned is not None:
            origin = Origin(self._place.experiment, action.epoch, action.attempt, action.report)
            self._store.discard(action.abandoned, origin)

    def _do_sweep(self, action: signals.Sweep) -> None:
        self._on_disk(self._cleaning, self._sweep, action.keep_attempt)

    def _sweep(self, attempt: int | None) -> None:
        self._store.sweep(self._own.epoch, attempt)


_EPOCH_S = time.time() - time.monotonic()


def now() -> float:
    """Returns the time in seconds since 1970, by a clock that never goes back: deadlines are reckoned with it too."""
    return _EPOCH_S + time.monotonic()


def _reported(at: float, attempt: int, rank: int, message: dict[str, Any]) -> signals.Reported:
    return signals.Reported(
        at,
        attempt,
        rank,
        message["n"],
        message["m"],
        message.get("bytes"),
        message.get("sync", False),
        message.get("free", 0),
        message.get("failed", ""),
    )


def _how_it_ended(status: int) -> str:
    if status < 0:
        with suppress(ValueError):
            return f"the worker process was ended by {signal.Signals(-status).name}"
    return f"the worker process ended with exit status {status} before the training function returned"


__all__ = ["Ownership", "Place", "RunController"]
