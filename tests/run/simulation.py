"""One run played with dice: ranks, a keeper, a disk and a driver that can be killed at any moment.

`play(seed)` carries a `RunState` out as the controller does (records are written, then actions are obeyed), in a world
that outlives the driver, and raises `Violation` as soon as a promise is broken. The same seed plays the same history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from holdfast.run import signals
from holdfast.run.config import CheckpointConfig, FailureConfig
from holdfast.run.folded import Record
from holdfast.run.result import history
from holdfast.run.state import RunState

LONGEST = 4000  # events of one history
REPORT_TIMEOUT_S = 60.0
DEADLINE_S = 20.0


class Violation(AssertionError):
    """A promise was broken."""


def require(condition: bool, promise: str) -> None:
    if not condition:
        raise Violation(promise)


def durable_half(run: RunState) -> tuple[Any, ...]:
    """What a restart must find again: the fold of the records."""
    held = {
        number: (h.epoch, h.attempt, h.report, h.iteration, h.ranks, h.metrics, h.size_bytes, h.committed, h.staged_at)
        for number, h in run.folded.held.items()
    }
    skipped = tuple(run.folded.skipped)
    staged = list(run.folded.staged)
    position = (
        run.folded.next_number,
        skipped,
        run.folded.attempt,
        run.folded.iteration,
        run.folded.metrics,
        run.folded.return_value,
    )
    return held, staged, run.folded.damaged, run.folded.scored, position


Origin = tuple[int, int, int]  # epoch, attempt, report


@dataclass
class Part:
    durable: bool = False
    failed: bool = False


@dataclass
class Rules:
    """What a history may contain."""

    world_size: int
    steps: int
    plan: list[list[tuple[bool, bool]]]  # step -> rank -> whether it gives a part, whether it is `sync`
    short: dict[int, int]  # rank -> the step after which it returns too early
    failures: FailureConfig
    drivers: int
    free_bytes: int

    @classmethod
    def draw(cls, dice: Random) -> Rules:
        world_size, steps = dice.choice([1, 2, 2, 3]), dice.randint(1, 7)
        parts = dice.choice(["all", "first", "random"])
        uneven = dice.random() < 0.1
        return cls(
            world_size=world_size,
            steps=steps,
            plan=[[_gives(dice, parts, rank) for rank in range(world_size)] for _ in range(steps)],
            short={dice.randrange(world_size): dice.randint(0, steps)} if uneven else {},
            failures=FailureConfig(
                max_failures=dice.choice([0, 2, -1, -1]),
                on_storage_error=dice.choice(["wait", "wait", "fail"]),
                storage_deadline_s=DEADLINE_S,
            ),
            drivers=dice.choice([1, 2, 3, 6]),
            free_bytes=dice.choice([0, 100, 10_000]),
        )


def _gives(dice: Random, parts: str, rank: int) -> tuple[bool, bool]:
    gives = {"all": dice.random() < 0.8, "first": rank == 0, "random": dice.random() < 0.5}[parts]
    return gives, dice.random() < 0.2


@dataclass
class World:
    """What outlives a driver."""

    time: float = 1000.0
    epoch: int = 0
    journal: list[Record] = field(default_factory=list)
    store: dict[int, Origin | None] = field(default_factory=dict)  # None: put there by a stranger
    rotten: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    once_read: set[int] = field(default_factory=set)
    parts: dict[tuple[int, int, int, int], Part] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    let_go: set[int] = field(default_factory=set)
    damaged: set[int] = field(default_factory=set)
    promised: set[int] = field(default_factory=set)
    trace: list[str] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.journal.append(record)
        kind = record["kind"]
        if kind == "staged":
            require(record["number"] not in self.given, f"number {record['number']} is given once")
            require(record["number"] not in self.store, f"number {record['number']} is given where nothing lies")
            self.given.add(record["number"])
        elif kind == "committed":
            self.committed.add(record["number"])
        elif kind == "abandoned":
            self.let_go.add(record["number"])
        elif kind == "forgotten":
            self.let_go.update(record["numbers"])
        elif kind == "damaged":
            self.damaged.add(record["number"])


@dataclass
class Worker:
    attempt: int
    rank: int
    step: int  # the steps that count so far, this attempt's start included
    reports: int = 0
    heard: int = 0  # of its reports, by the driver
    waits_in: int | None = None
    ended: bool = False
    stalled: bool = False
    returned: bool = False
    outbox: deque[Callable[[float], signals.Event]] = field(default_factory=deque)

    def send(self, event: type[signals.RankEvent], **values: Any) -> None:
        self.outbox.append(lambda time: event(time, self.attempt, self.rank, **values))

    def end(self, how: str = "killed") -> None:
        if not self.ended:
            self.ended, self.waits_in = True, None
            self.send(signals.Exited, how=how)


@dataclass
class Commit:
    """A commit that waits for the disk."""

    driver: Driver
    number: int
    origin: Origin
    ranks: tuple[int, ...]

    def __call__(self) -> signals.Event:
        return self.driver.commit(self.number, self.origin, self.ranks)


class Driver:
    """Carries out a run state, as the controller does; `dice` decides when what happens."""

    def __init__(self, world: World, rules: Rules, dice: Random) -> None:
        world.epoch += 1
        self.world, self.rules, self.dice = world, rules, dice
        self.epoch = world.epoch
        self.checkpoints = CheckpointConfig(
            num_to_keep=dice.choice([None, 1, 1, 2]), checkpoint_score_attribute=dice.choice([None, None, "score"])
        )
        self.state = self.folded()
        self.shadow = self.folded()  # folded from the written form of each record, as a restart would
        self.workers: list[Worker] = []
        self.keeper: list[tuple[int, int]] = []  # number, rank
        self.keeper_lives, self.keeper_deaths = True, 0
        self.disk: deque[Callable[[], signals.Event | None]] = deque()
        self.done: deque[Callable[[float], signals.Event]] = deque()
        self.echoes: list[signals.Event] = []
        self.in_use: frozenset[int] = frozenset()
        self.told = -1
        self.found_whole: int | None = None
        self.unsaid: set[int] = set()

    def folded(self) -> RunState:
        rules = self.rules
        run = RunState(rules.world_size, self.epoch, rules.failures, self.checkpoints, REPORT_TIMEOUT_S)
        for record in self.world.journal:
            run.fold(record)
        return run

    # ---- the loop of the controller

    def apply(self, event: signals.Event) -> None:
        self.world.trace.append(str(event))
        self.state.apply(event)

    def collect(self) -> list[Record]:
        """The records that are due, in their written form, after each was compared with what is in memory."""
        records = [msgspec.json.decode(msgspec.json.encode(record)) for record in self.state.take_records()]
        for record in records:
            self.check_forgotten(record)
            self.shadow.fold(record)
        require(durable_half(self.shadow) == durable_half(self.state), "memory is the fold of the records")
        return records

    def write_and_obey(self) -> None:
        records = self.collect()
        for record in records:
            self.world.trace.append(f"  record {record}")
            self.world.write(record)
            if record["kind"] == "abandoned":
                self.unsaid.add(record["number"])
        for action in self.state.take_actions():
            self.obey(action)
        self.state.take_events()

    def obey(self, action: signals.Action) -> None:
        self.world.trace.append(f"  action {action}")
        getattr(self, "do_" + type(action).__name__.lower())(action)

    def check_forgotten(self, record: Record) -> None:
        if record["kind"] != "forgotten":
            return
        numbers = set(record["numbers"])
        committed = {number for number, held in self.shadow.folded.held.items() if held.committed}
        require(numbers <= committed, "only what is committed is forgotten")
        require(max(committed) not in numbers, "the newest committed checkpoint is kept")
        require(not numbers & self.in_use, "what a reader has open is kept")
        require(
            self.state.start not in numbers or self.has_passed_start(),
            "the start is kept until every rank has passed it",
        )

    def has_passed_start(self) -> bool:
        attempt = self.state.folded.attempt
        own = [r["report"] for r in self.world.journal if r["kind"] == "staged" and r["attempt"] == attempt]
        return bool(own) and all(worker.returned or worker.heard > min(own) for worker in self.workers)

    # ---- actions

    def do_startgang(self, action: signals.StartGang) -> None:
        world = self.world
        newest = max(world.committed - world.let_go - world.damaged, default=None)
        require(action.checkpoint == newest, "an attempt starts from the newest checkpoint that is whole")
        require(newest is None or newest == self.found_whole, "the start was looked at")
        require(all(worker.ended for worker in self.workers), "the gang before is gone")
        if self.dice.random() < 0.01:
            self.done.append(lambda time: signals.GangRefused(time, action.attempt, "no room"))
            return
        steps = next(
            (r["iteration"] for r in world.journal if r["kind"] == "staged" and r["number"] == action.checkpoint), 0
        )
        self.workers = [Worker(action.attempt, rank, steps) for rank in range(self.rules.world_size)]
        self.told = -1 if action.checkpoint is None else action.checkpoint

    def do_stopgang(self, action: signals.StopGang) -> None:
        for worker in self.workers:
            require(worker.attempt <= action.attempt, "what is stopped is there")
            worker.end("stopped")

    def do_answer(self, action: signals.Answer) -> None:
        world, worker = self.world, self.workers[action.rank]
        record = next(r for r in world.journal if r["kind"] == "staged" and r["number"] == action.number)
        require(action.rank in record["parts"] and record["report"] == action.report, "an answer belongs to a part")
        require(record["attempt"] == worker.attempt, "an answer goes to the attempt that reported")
        if action.error is not None:
            self.unsaid -= {number for number in self.unsaid if f"checkpoint {number} " in action.error}
        if worker.ended:
            return
        require(worker.waits_in == action.report, "an answer is waited for, and comes once")
        worker.waits_in = None
        if action.error is None:
            self.check_answer(action, sync=self.rules.plan[worker.step - 1][worker.rank][1])
        elif self.dice.random() < 0.5:
            self.raise_in(worker, action.error)

    def check_answer(self, action: signals.Answer, *, sync: bool) -> None:
        require(action.number not in self.unsaid, "who waits for an abandoned checkpoint is told so")
        require(not sync or action.number in self.world.committed, "sync returns after the commit")
        behind = [held for held in self.state.folded.staged.values() if not held.is_durable]
        require(len(behind) <= 2, "at most two checkpoints are waited for by nobody")
        self.world.promised.add(action.number)

    def do_tell(self, action: signals.Tell) -> None:
        require(action.number in self.world.committed, "only committed checkpoints are told of")
        require(action.number > self.told, "the newest checkpoint only gets newer")
        self.told = action.number

    def do_persist(self, action: signals.Persist) -> None:
        held = self.state.folded.held.get(action.number)
        if held is None:
            return
        if self.world.store.get(held.number) == (held.epoch, held.attempt, held.report):
            for rank in held.ranks:
                self.done.append(lambda time, rank=rank: signals.Durable(time, held.number, rank))
            return
        asked = [(held.number, rank) for rank in held.ranks if rank not in held.durable]
        if action.in_driver:
            self.disk.extend(lambda one=one: self.persist(*one) for one in asked)
        elif self.keeper_lives:  # else the request is lost with it
            self.keeper += asked
            if self.keeper_deaths:
                self.kill_keeper_once()

    def do_endkeeper(self, action: signals.EndKeeper) -> None:
        self.kill_keeper()

    def do_makecommit(self, action: signals.MakeCommit) -> None:
        held = self.state.folded.held.get(action.number)
        if held is not None:
            older = [h for h in self.state.folded.held.values() if h.number < held.number and not h.committed]
            require(not older, "commits are asked for in the order of numbers")
            origin = (held.epoch, held.attempt, held.report)
            self.disk.append(Commit(self, action.number, origin, held.ranks))

    def commit(self, number: int, origin: Origin, ranks: tuple[int, ...]) -> signals.Event:
        world = self.world
        if number not in world.store:
            for rank in ranks:
                part = world.parts.get((*origin, rank))
                require(part is not None and part.durable, "what is committed is durable")
            world.store[number] = origin
        require(world.store[number] == origin, "a checkpoint's bytes come from one report")
        in_use = frozenset(world.read & set(world.store))
        self.in_use = in_use
        return signals.Committed(world.time, number, f"checkpoint_{number}", 10, (), in_use)

    def do_look(self, action: signals.Look) -> None:
        self.disk.append(lambda: self.look(action.number))

    def look(self, number: int) -> signals.Event:
        whole = number in self.world.store and number not in self.world.rotten
        self.found_whole = number if whole else None
        return signals.Looked(self.world.time, number, () if whole else ("rotten",))

    def do_remove(self, action: signals.Remove) -> None:
        self.disk.extend(lambda number=number: self.remove(number) for number in action.numbers)

    def remove(self, number: int) -> signals.Event | None:
        world = self.world
        require(number in world.let_go, f"checkpoint {number} is let go by the journal before it is removed")
        require(world.store.get(number, ()) is not None, "what a stranger put there is left alone")
        if number in world.read:
            return signals.PutOff(world.time, (number,))
        world.store.pop(number, None)
        return None

    def do_discard(self, action: signals.Discard) -> None:
        origin = (action.epoch, action.attempt, action.report)
        self.disk.append(lambda: self.clear(lambda key: key[:3] == origin))
        if action.abandoned is not None and self.world.store.get(action.abandoned) == origin:
            self.disk.append(lambda: self.world.store.pop(action.abandoned) and None)

    def do_sweep(self, action: signals.Sweep) -> None:
        first = (self.epoch + 1, 0) if action.keep_attempt is None else (self.epoch, action.keep_attempt)
        self.disk.append(lambda: self.clear(lambda key: key[:2] < first))

    def clear(self, goes: Callable[[tuple[int, int, int, int]], bool]) -> None:
        world = self.world
        needed = {
            (r["epoch"], r["attempt"], r["report"])
            for r in world.journal
            if r["kind"] == "staged" and r["number"] not in world.committed | world.let_go
        }
        for key in [key for key in world.parts if goes(key)]:
            require(key[:3] not in needed, "what was staged is kept until it is committed")
            del world.parts[key]

    # ---- what can happen next

    def progress(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        for worker in self.workers:
            if worker.outbox:
                moves.append(lambda worker=worker: self.deliver(worker))
            if not worker.ended and not worker.stalled and worker.waits_in is None:
                moves.append(lambda worker=worker: self.work(worker))
        if self.keeper:
            moves.append(self.keep)
        if self.disk:
            moves.append(self.serve_disk)
        if self.done:
            moves.append(lambda: self.apply(self.done.popleft()(self.world.time)))
        return moves

    def deliver(self, worker: Worker) -> None:
        event = worker.outbox.popleft()(self.world.time)
        worker.heard += isinstance(event, signals.Reported)
        worker.returned = worker.returned or isinstance(event, signals.Returned)
        self.echoes.append(event)
        self.apply(event)

    def work(self, worker: Worker) -> None:
        rules = self.rules
        last = min(rules.steps, rules.short.get(worker.rank, rules.steps))
        if worker.step >= last:
            worker.send(signals.Returned, value=worker.step)
            worker.end("returned")
            return
        gives, sync = rules.plan[worker.step][worker.rank]
        if gives:
            self.world.parts[self.epoch, worker.attempt, worker.reports, worker.rank] = Part()
            worker.waits_in = worker.reports
        worker.send(
            signals.Reported,
            report=worker.reports,
            metrics={"step": worker.step + 1, "score": (worker.step * 7) % 5},
            part_bytes=10 if gives else None,
            sync=gives and sync,
            free_bytes=rules.free_bytes,
        )
        worker.reports += 1
        worker.step += 1

    def raise_in(self, worker: Worker, why: str) -> None:
        worker.send(signals.Raised, traceback=why)
        worker.end("raised")

    def keep(self, failing: str = "") -> None:
        number, rank = self.keeper.pop(self.dice.randrange(len(self.keeper)))
        event = self.persist(number, rank, failing)
        self.done.append(lambda time: event)

    def persist(self, number: int, rank: int, failing: str = "") -> signals.Event:
        record = next(r for r in self.world.journal if r["kind"] == "staged" and r["number"] == number)
        part = self.world.parts.get((record["epoch"], record["attempt"], record["report"], rank))
        if part is None:
            require(number in self.world.committed | self.world.let_go, "a part is there until it is committed")
            return signals.StorageFailed(self.world.time, number, "gone", False)
        if failing:
            return signals.StorageFailed(self.world.time, number, "no space", failing == "passing")
        part.durable = True
        return signals.Durable(self.world.time, number, rank)

    def serve_disk(self) -> None:
        event = self.disk.popleft()()
        if event is not None:
            self.done.append(lambda time: event)

    def pass_time(self) -> None:
        """Nothing can happen but a `Tick`, or that a rank comes back from where it stalled."""
        deadline = self.state.deadline()
        stalled = [worker for worker in self.alive() if worker.stalled]
        require(deadline is not None or bool(stalled), "the run goes on as long as anything can happen")
        if deadline is None:
            stalled[0].stalled = False
        else:
            self.world.time = max(self.world.time, deadline)
            self.apply(signals.Tick(self.world.time))

    # ---- faults

    def fail(self) -> None:
        """Lets one thing go wrong."""
        faults = [
            self.kill_worker,
            self.kill_worker,
            self.raise_somewhere,
            self.stall,
            self.kill_keeper,
            self.refuse_part,
            self.refuse_part,
            self.refuse_commit,
            self.refuse_commit,
            self.rot,
            self.open_or_close,
            self.echo,
            self.press_ctrl_c,
            self.let_time_pass,
        ]
        self.dice.choice(faults)()

    def alive(self) -> Iterator[Worker]:
        return (worker for worker in self.workers if not worker.ended)

    def kill_worker(self) -> None:
        for worker in list(self.alive())[: self.dice.choice([1, 1, 3])]:
            worker.end("SIGKILL")

    def raise_somewhere(self) -> None:
        for worker in list(self.alive())[-1:]:
            self.raise_in(worker, "ValueError")

    def stall(self) -> None:
        if self.dice.random() < 0.3:
            for worker in list(self.alive())[:1]:
                worker.stalled = worker.waits_in is None

    def kill_keeper(self) -> None:
        if self.keeper_lives:
            self.keeper_deaths = self.dice.choice([1, 1, 2, 8])
            self.kill_keeper_once()

    def kill_keeper_once(self) -> None:
        self.keeper_deaths -= 1
        self.keeper_lives = False
        self.keeper.clear()
        self.done.append(self.bury_keeper)

    def bury_keeper(self, time: float) -> signals.Event:
        self.keeper_lives = True  # the next request starts another
        return signals.KeeperDied(time)

    def refuse_part(self) -> None:
        if self.keeper:
            self.keep(self.dice.choice(["passing", "passing", "passing", "for good"]))

    def refuse_commit(self) -> None:
        if self.disk and isinstance(self.disk[0], Commit):
            commit, passing = self.disk.popleft(), self.dice.random() < 0.8
            self.done.append(lambda time: signals.StorageFailed(time, commit.number, "no space", passing, "commit"))

    def rot(self) -> None:
        if self.dice.random() < 0.3:
            self.world.rotten |= {number for number in self.world.store if self.dice.random() < 0.5}

    def open_or_close(self) -> None:
        self.world.read ^= {number for number in self.world.store if self.dice.random() < 0.3}
        self.world.once_read |= self.world.read

    def echo(self) -> None:
        stale = [e for e in self.echoes if isinstance(e, signals.RankEvent) and e.attempt < self.state.folded.attempt]
        if stale:
            before = durable_half(self.state)
            self.apply(self.dice.choice(stale))
            require(durable_half(self.state) == before, "messages of an older attempt are dropped")

    def press_ctrl_c(self) -> None:
        if self.dice.random() < 0.2:
            self.world.trace.append("Ctrl-C")
            self.state.request_stop(self.world.time, "stopped by Ctrl-C")

    def let_time_pass(self) -> None:
        self.world.time += self.dice.choice([0.1, 5.0, 50.0])
        self.apply(signals.Tick(self.world.time))

    # ---- the end of a driver

    def die(self) -> None:
        """SIGKILL of the driver and its workers, anywhere in its loop; the keeper may finish what it was asked for."""
        self.world.trace.append("--- the driver is killed")
        records = self.collect()
        for record in records[: self.dice.randint(0, len(records))]:
            self.world.trace.append(f"  record {record}")
            self.world.write(record)
            written = record is records[-1]
            if written:
                for action in self.state.take_actions()[: self.dice.randint(0, 3)]:
                    self.obey(action)
        if self.disk and self.dice.random() < 0.5:
            self.disk.popleft()()
        for number, rank in self.keeper:
            if self.dice.random() < 0.5:
                record = next(r for r in self.world.journal if r["kind"] == "staged" and r["number"] == number)
                part = self.world.parts.get((record["epoch"], record["attempt"], record["report"], rank))
                if part is not None:
                    part.durable = True

    def check_end(self) -> None:
        world, run = self.world, self.state
        while self.disk:
            self.disk.popleft()()
        last = world.journal[-1]["kind"]
        require(last == ("finished" if run.goal == "finish" else "failed"), "the journal says how the run ended")
        require(not any(not held.committed for held in run.folded.held.values()), "a run ends after its commits")
        committed = {held.number for held in run.folded.committed}
        require(
            committed == world.committed - world.let_go - world.damaged, "what is committed and not forgotten is held"
        )
        require(committed <= world.store.keys(), "what is committed is there")
        ours = {number for number, origin in world.store.items() if origin is not None}
        require(ours - committed <= world.damaged | world.once_read, "what was let go is gone")
        require(not world.parts, "nothing staged is left over")
        require(all(worker.ended and not worker.outbox for worker in self.workers), "the workers are gone")
        require(world.promised <= world.committed | world.let_go, "what report returned for is committed, or abandoned")
        if run.goal == "finish":
            ours = {r["number"] for r in world.journal if r["kind"] == "staged" and r["epoch"] == self.epoch}
            require(not self.unsaid & ours, "an abandoned checkpoint is said")


def play(seed: int) -> World:
    """Plays one history to its end."""
    dice = Random(seed)
    rules, world = Rules.draw(dice), World()
    try:
        for life in range(rules.drivers):
            live(Driver(world, rules, dice), last=life == rules.drivers - 1)
        check_history(world)
    except Exception as error:
        story = "\n".join(world.trace)
        raise Violation(f"seed {seed}: {error}\n{rules}\n{story}") from error
    return world


def live(driver: Driver, *, last: bool) -> None:
    """One driver's life: until the run has ended, or (but for the last one) it is killed."""
    world, dice = driver.world, driver.dice
    if dice.random() < 0.1:
        world.store.setdefault(driver.state.folded.next_number + dice.randint(0, 2), None)
    faults, killed_at = dice.choice([0, 1, 3, 8]), LONGEST if last else dice.randint(0, 80)
    driver.apply(signals.Begun(world.time, tuple(world.store), tuple(world.store)))
    for moment in range(LONGEST):
        if moment == killed_at:
            driver.die()
            return
        driver.write_and_obey()
        if driver.state.phase == "ended":
            driver.check_end()
            return
        world.time += 0.001
        moves = driver.progress()
        if faults and dice.random() < 0.1:
            faults -= 1
            driver.fail()
        elif moves:
            for move in dice.sample(moves, 1):
                move()
        else:
            driver.pass_time()
    raise Violation("the run ends")


def check_history(world: World) -> None:
    rows = history(world.journal)
    # Smaller: rank 0 had returned already, and its last metrics stay those of the run.
    require(
        all(row.get("step", 0) <= row["training_iteration"] for row in rows), "steps count from the attempt's start"
    )
    steps = [row["training_iteration"] for row in rows]
    require(steps == list(range(1, len(steps) + 1)), "each step is in the history once, in order")
