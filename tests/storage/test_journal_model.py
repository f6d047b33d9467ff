"""The journal against a model: owners append, sync, die, come back, and write on after they were shut out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from holdfast.errors import HoldfastError, OwnershipLost, StorageError
from holdfast.sealed import seal
from holdfast.storage import journal
from holdfast.storage.base import Storage
from holdfast.storage.journal import Journal, Record, read
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import Fault, MemoryStorage, away, no_faults
from tests.storage.journal_contract import DEAD, is_prefix, numbered


class JournalModel(RuleBasedStateMachine):
    """`kept` is what every reader must find, `maybe` what it may find after that, in this order and nothing else."""

    storage: Storage

    def __init__(self) -> None:
        super().__init__()
        self.owner: Journal | None = None
        self.carrier: Journal | None = None  # whose segment is the newest that carries records
        self.shut_out: list[Journal] = []
        self.all: list[Journal] = []
        self.kept: list[Record] = []
        self.maybe: list[Record] = []
        self.next_number = 0

    def teardown(self) -> None:
        for one in self.all:
            with suppress(HoldfastError):
                one.close()

    def new_records(self, count: int) -> list[Record]:
        self.next_number += count
        return numbered(*range(self.next_number - count, self.next_number))

    def is_kept(self) -> None:
        self.kept += self.maybe
        self.maybe = []

    @rule()
    def open(self) -> None:
        try:
            owner = Journal.open(self.storage, driver=DEAD)
        except StorageError:
            self.notice_a_claim()
            return
        self.notice_a_claim()
        self.check(owner.earlier)
        self.kept, self.maybe = owner.earlier, []
        self.owner = self.carrier = owner
        self.all.append(owner)

    @rule()
    def die_in_the_middle_of_a_take_over(self) -> None:
        with pytest.MonkeyPatch.context() as dying, suppress(Died, StorageError):
            dying.setattr(journal, "_read_chain", die)
            Journal.open(self.storage, driver=DEAD)
        self.notice_a_claim()

    def notice_a_claim(self) -> None:
        if self.owner and journal._segments(self.storage, "journal").newest() > self.owner.epoch:
            self.shut_out.append(self.owner)
            self.owner = None

    @precondition(lambda self: self.owner)
    @rule(count=st.integers(0, 3))
    def append(self, count: int) -> None:
        assert self.owner
        records = self.new_records(count)
        self.maybe += records
        try:
            self.owner.append(records)
        except OwnershipLost:
            self.lost_by_a_late_claim()
        else:
            if isinstance(self.storage, LocalStorage):
                self.is_kept()

    @precondition(lambda self: self.owner)
    @rule()
    def sync(self) -> None:
        assert self.owner
        try:
            self.owner.sync()
        except OwnershipLost:
            self.lost_by_a_late_claim()
        except StorageError:
            assert isinstance(self.storage, MemoryStorage)
        else:
            self.is_kept()

    def lost_by_a_late_claim(self) -> None:
        assert isinstance(self.storage, MemoryStorage)
        self.owner = None

    @precondition(lambda self: self.owner)
    @rule()
    def close(self) -> None:
        assert self.owner
        try:
            self.owner.close()
        except (OwnershipLost, StorageError):
            assert isinstance(self.storage, MemoryStorage)
        else:
            self.is_kept()
        self.owner = None

    @precondition(lambda self: self.shut_out)
    @rule(count=st.integers(1, 3))
    def write_on_after_being_shut_out(self, count: int) -> None:
        stale = self.shut_out.pop()
        records = self.new_records(count)
        if stale is self.carrier:  # its successor claimed and died: these may be found or not
            self.maybe += records
        told = OwnershipLost if isinstance(self.storage, LocalStorage) else (OwnershipLost, StorageError)
        with pytest.raises(told):
            write_and_sync(stale, records)

    @invariant()
    def readers_find_what_is_kept(self) -> None:
        self.check(read(self.storage))

    def check(self, found: list[Record]) -> None:
        assert is_prefix(self.kept, found)
        assert is_prefix(found, self.kept + self.maybe)


class Died(BaseException):
    pass


def die(*arguments: object) -> None:
    raise Died


def write_and_sync(owner: Journal, records: list[Record]) -> None:
    owner.append(records)
    owner.sync()


class JournalInDirectory(JournalModel):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.storage = LocalStorage(self.folder)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def die_in_the_middle_of_an_append(self, data: st.DataObject) -> None:
        assert self.owner
        lines = b"".join(map(seal, self.new_records(2)))
        torn = lines[: data.draw(st.integers(1, lines.index(b"\n")))]
        with open(self.owner._tail.place, "ab") as tail:
            tail.write(torn)
        self.owner = self.carrier = None


class JournalOfObjects(JournalModel):
    def __init__(self) -> None:
        super().__init__()
        self.storage = self.objects = MemoryStorage()

    @rule(fault=st.sampled_from(Fault), step=st.sampled_from(["open", "sync", "close", "die", "stale"]))
    def go_wrong(self, fault: Fault, step: str) -> None:
        """One put of a step goes wrong."""
        left = [fault]
        self.objects.faults = lambda verb, path: left.pop() if verb == "put" and left else None
        self.take(step)
        self.objects.faults = no_faults

    @precondition(lambda self: self.owner)
    @rule()
    def sync_while_the_storage_is_away(self) -> None:
        self.objects.faults = away
        self.take("sync")
        self.objects.faults = no_faults

    @rule()
    def let_late_writes_land(self) -> None:
        self.objects.land_late_writes()

    def take(self, step: str) -> None:
        steps: dict[str, Callable[[], None]] = {
            "open": self.open,
            "die": self.die_in_the_middle_of_a_take_over,
            "sync": self.sync if self.owner else self.open,
            "close": self.close if self.owner else self.open,
            "stale": (lambda: self.write_on_after_being_shut_out(1)) if self.shut_out else self.open,
        }
        steps[step]()


@pytest.mark.parametrize("model", [JournalInDirectory, JournalOfObjects])
def test_the_journal_does_what_its_model_does(model: type[JournalModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal._ObjectTail, "group_age_s", 3600)  # the background would sync when nobody asked
    run_state_machine_as_test(
        model, settings=settings(max_examples=60, stateful_step_count=20, deadline=None, database=None)
    )
