from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from holdfast.checkpoint import checkpoint as checkpoint_module
from holdfast.checkpoint import store as store_module
from holdfast.checkpoint.checkpoint import MANIFEST, METADATA, Checkpoint
from holdfast.checkpoint.store import STAGING, Commit
from holdfast.errors import AlreadyExists, CheckpointError, CheckpointForgotten, HoldfastError, StorageError
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import Fault, MemoryStorage, no_faults
from tests.checkpoint.faults import Died, failing_calls, io_error
from tests.checkpoint.store_contract import (
    MORE_CALLS,
    ONE,
    RANKS,
    Experiment,
    Files,
    StoreContract,
    assert_whole,
    left_of,
    merged,
    write,
)

DEADLINE_S = 30


class TestStoreInADirectory(StoreContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "experiment")


class TestStoreOfObjects(StoreContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()


# In a directory


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return Experiment(LocalStorage(tmp_path / "experiment"), tmp_path / "node")


def root(experiment: Experiment) -> Path:
    assert isinstance(experiment.storage, LocalStorage)
    return experiment.storage.root


def test_a_checkpoint_is_a_plain_directory(experiment: Experiment) -> None:
    experiment.committed(1, ONE)
    at = root(experiment) / "checkpoint_000001"
    assert experiment.store().open(1) == Checkpoint(at)
    found = {str(path.relative_to(at)): path.read_bytes() for path in at.rglob("*") if path.is_file()}
    del found[MANIFEST]
    assert found == {path: data for path, data in ONE.items() if data is not None}
    assert (at / "hollow" / "inner").is_dir()


def test_a_committed_checkpoint_can_be_copied_out(experiment: Experiment, tmp_path: Path) -> None:
    experiment.committed(1, *RANKS)
    copy = Path(experiment.store().open(1).to_directory(tmp_path / "copy"))
    assert not (copy / MANIFEST).exists()
    assert {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()} == (
        experiment.files(1)
    )
    assert (copy / "deep" / "hollow").is_dir()


def test_what_was_copied_out_can_be_committed_again(experiment: Experiment, tmp_path: Path) -> None:
    experiment.committed(1, ONE)
    whole_copy = shutil.copytree(experiment.store().open(1).path, tmp_path / "copy")  # with its manifest
    files: Files = {
        str(path.relative_to(whole_copy)): path.read_bytes() for path in Path(whole_copy).rglob("*") if path.is_file()
    }
    experiment.committed(2, files)
    assert_whole(experiment, 2, [{path: data for path, data in ONE.items() if data is not None}])
    assert experiment.store().manifest(2).number == 2


def test_notes_can_be_set_on_a_committed_checkpoint(experiment: Experiment) -> None:
    experiment.committed(1, {"a": b"a"})
    experiment.store().open(1).set_metadata({"good": True})
    assert experiment.store().verify(1) == []
    assert experiment.files(1).keys() == {"a", METADATA}


def test_an_empty_directory_that_is_missing_is_damage(experiment: Experiment) -> None:
    experiment.committed(1, ONE)
    (root(experiment) / "checkpoint_000001" / "hollow" / "inner").rmdir()
    assert experiment.store().verify(1) == ["the directory hollow/inner is missing"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [(MANIFEST, "the manifest of checkpoint_000001 is a directory"), ("model.pt", "model.pt is not a file")],
)
def test_a_directory_in_the_place_of_a_file_is_damage(experiment: Experiment, name: str, problem: str) -> None:
    experiment.committed(1, ONE)
    (root(experiment) / "checkpoint_000001" / name).unlink()
    (root(experiment) / "checkpoint_000001" / name).mkdir()
    assert experiment.store().verify(1) == [problem]


def test_whatever_call_fails_while_a_checkpoint_is_looked_at_it_is_not_called_damaged_or_missing(
    experiment: Experiment,
) -> None:
    experiment.committed(1, *RANKS)
    for number in itertools.count():
        with failing_calls(number, io_error) as calls, contextlib.suppress(StorageError):
            assert experiment.store().taken() == [1], calls.names[number]
            assert experiment.store().list() == [1], calls.names[number]
            assert experiment.store().verify(1) == [], calls.names[number]
            assert not calls.failed, calls.names[number]
        if not calls.failed:
            break
    assert number > 10


def test_an_empty_directory_in_the_place_of_a_checkpoint_is_not_replaced(experiment: Experiment) -> None:
    commit = experiment.staged(1, ONE)
    (root(experiment) / "checkpoint_000001").mkdir()
    with pytest.raises(AlreadyExists, match="exists, without a manifest: move it away"):
        experiment.store().commit(commit)
    (root(experiment) / "checkpoint_000001").rmdir()
    experiment.store().commit(commit)
    assert_whole(experiment, 1, [ONE])


def test_a_commit_that_was_made_before_is_made_durable_too(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = experiment.committed(1, ONE)
    synced: list[str] = []
    monkeypatch.setattr(store_module, "sync_directory", lambda path: synced.append(str(path)))
    experiment.store().commit(commit)
    assert synced == [str(root(experiment))]


def test_every_directory_is_synced_bottom_up_before_the_rename_and_the_folder_after_it(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = experiment.staged(1, ONE)
    steps: list[str] = []
    merged = experiment.staging / "1" / "1" / "merged"
    for name in ("sync_directory", "rename_exclusive"):
        act = getattr(store_module, name)
        monkeypatch.setattr(
            store_module, name, lambda path, *more, act=act: (steps.append(str(path)), act(path, *more))
        )
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    experiment.store().commit(commit)
    order = [steps.index(str(path)) for path in (merged / MANIFEST, merged / "deep" / "er", merged / "deep", merged)]
    assert order == sorted(order)
    assert {str(merged / "hollow"), str(merged / "hollow" / "inner")} < set(steps)
    renamed = [number for number, path in enumerate(steps) if path == str(merged)][-1]
    assert set(steps[renamed + 1 :]) == {str(root(experiment))}


@pytest.mark.parametrize("refusal", [errno.ENOENT, errno.EEXIST])
def test_a_rename_whose_answer_was_lost_is_a_commit(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    rename = store_module.rename_exclusive

    def answer_lost(source: Path, target: Path) -> None:
        rename(source, target)
        raise OSError(refusal, os.strerror(refusal))

    commit = experiment.staged(1, ONE)
    monkeypatch.setattr(store_module, "rename_exclusive", answer_lost)
    done = experiment.store().commit(commit)
    assert done.manifest == experiment.store().manifest(1)
    assert_whole(experiment, 1, [ONE])


def test_a_manifest_whose_fsync_failed_is_written_to_another_file(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, fsync = experiment.staged(1, ONE), os.fsync
    held: list[int] = []

    def fail_once(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(MANIFEST):
            held.append(os.dup(file))  # else its inode could come again
            if len(held) == 1:
                raise io_error()
        fsync(file)

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(OSError):
        experiment.store().commit(commit)
    experiment.store().commit(commit)
    assert len({os.fstat(file).st_ino for file in held}) == 2
    for file in held:
        os.close(file)


def test_what_a_reader_has_open_is_not_removed(experiment: Experiment) -> None:
    experiment.committed(1, ONE)
    experiment.committed(2, ONE)
    with experiment.store().open(1).as_directory():
        assert experiment.store().in_use([1, 2]) == {1}
        assert not experiment.store().remove(1)
        assert not experiment.store().discard(1, experiment.store().manifest(1).origin)
        assert_whole(experiment, 1, [ONE])
    assert experiment.store().in_use([1, 2]) == frozenset()
    assert experiment.store().remove(1)
    assert experiment.store().taken() == [2]


def test_a_reader_that_comes_while_a_checkpoint_is_removed_finds_nothing(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment.committed(1, ONE)
    opened, outcome = threading.Event(), []
    take = checkpoint_module._lock

    def tell_then_lock(*arguments: Any) -> None:
        opened.set()  # it has the manifest open, and waits for the lock
        take(*arguments)

    def read() -> None:
        try:
            with Checkpoint(root(experiment) / "checkpoint_000001").as_directory():
                outcome.append("read")
        except CheckpointForgotten:
            outcome.append("forgotten")

    reader = threading.Thread(target=read)
    rename = store_module.rename_exclusive

    def rename_with_a_reader_at_the_door(source: Path, target: Path) -> None:
        reader.start()
        assert opened.wait(DEADLINE_S)
        rename(source, target)

    monkeypatch.setattr(checkpoint_module, "_lock", tell_then_lock)
    monkeypatch.setattr(store_module, "rename_exclusive", rename_with_a_reader_at_the_door)
    assert experiment.store().remove(1)
    reader.join(DEADLINE_S)
    assert outcome == ["forgotten"]


@pytest.mark.parametrize(("refusal", "removed"), [(errno.ENOLCK, True), (errno.EOPNOTSUPP, True), (errno.EIO, False)])
def test_without_locks_there_are_no_readers_but_an_unknown_answer_keeps_it(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, refusal: int, removed: bool
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(refusal, os.strerror(refusal))

    experiment.committed(1, ONE)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert bool(experiment.store().in_use([1])) == (not removed)
    assert experiment.store().remove(1) == removed


def test_what_is_half_removed_is_finished_also_where_renames_are_not_exclusive(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_here(*names: Any) -> None:
        raise OSError(errno.EINVAL, "as NFS says")

    monkeypatch.setattr("holdfast.storage.local._rename_noreplace", not_here)
    experiment.committed(1, ONE)
    away = root(experiment) / ".forgotten_checkpoint_000001"
    away.mkdir()
    (away / "half").write_bytes(b"")
    assert experiment.store().remove(1)
    assert left_of(experiment, 1) == []
    away.mkdir()
    assert experiment.store().remove(1)
    assert left_of(experiment, 1) == []


def test_a_full_disk_is_no_obstacle_to_a_removal(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    experiment.committed(1, *RANKS)
    shutil.rmtree(root(experiment) / STAGING)
    monkeypatch.setattr(os, "mkdir", full)
    monkeypatch.setattr(os, "write", full)
    assert experiment.store().remove(1)
    assert os.listdir(root(experiment)) == []


def test_a_sweep_removes_what_an_earlier_owner_forgot_and_half_removed(experiment: Experiment) -> None:
    experiment.committed(1, ONE)
    theirs = [".forgotten_notes", "forgotten_checkpoint_000001"]
    for name in [".forgotten_checkpoint_000001", ".forgotten_checkpoint_1000000", *theirs]:
        write(root(experiment) / name, ONE)
    experiment.store().sweep(1, 2)
    experiment.store().sweep(1, None)
    assert sorted(os.listdir(root(experiment))) == sorted(["checkpoint_000001", *theirs])
    assert_whole(experiment, 1, [ONE])


ATTEMPTS = [(1, 2), (2, 1), (2, 2), (2, 10), (3, 1), (10, 1)]


@pytest.mark.parametrize(
    ("epoch", "attempt", "left"),
    [
        (2, 2, ATTEMPTS[2:]),
        (2, 3, ATTEMPTS[3:]),
        (2, 1, ATTEMPTS[1:]),
        (1, 1, ATTEMPTS),
        (2, None, ATTEMPTS[4:]),
        (9, 1, ATTEMPTS[5:]),
        (10, None, []),
    ],
)
def test_a_sweep_removes_what_was_staged_before_and_nothing_later_however_late_it_comes(
    experiment: Experiment, epoch: int, attempt: int | None, left: list[tuple[int, int]]
) -> None:
    staging = root(experiment) / STAGING
    for at in ATTEMPTS:
        write(staging / str(at[0]) / str(at[1]) / "1" / "0", ONE)
    experiment.store().sweep(epoch, attempt)
    assert sorted((int(path.parent.name), int(path.name)) for path in staging.glob("*/*")) == left
    assert {int(path.name) for path in staging.glob("*")} == {at[0] for at in left}
    assert staging.exists() == bool(left)


def test_a_sweep_leaves_the_folder_of_a_live_attempt_were_it_empty(experiment: Experiment) -> None:
    live = root(experiment) / STAGING / "1" / "2"
    live.mkdir(parents=True)
    experiment.store().sweep(1, 2)
    assert live.exists()
    experiment.store().sweep(1, None)
    assert os.listdir(root(experiment)) == []


def test_a_sweep_leaves_alone_what_it_does_not_know(experiment: Experiment, tmp_path: Path) -> None:
    (tmp_path / "user" / "1").mkdir(parents=True)
    staging = root(experiment) / STAGING
    unknown = ["note.txt", "01", "\N{ARABIC-INDIC DIGIT ONE}", "1²", "-1", "model"]
    for name in unknown:
        (staging / name / "1").mkdir(parents=True)
        (staging / "1" / name).mkdir(parents=True)
    (staging / "2").symlink_to(tmp_path / "user")
    (staging / "1" / "2").symlink_to(tmp_path / "user")
    (staging / "1" / "3").write_text("a file")
    experiment.store().sweep(9, None)
    assert (tmp_path / "user" / "1").is_dir()
    assert sorted(os.listdir(staging)) == sorted([*unknown, "1", "2"])
    assert sorted(os.listdir(staging / "1")) == sorted([*unknown, "2", "3"])


# Of objects


@pytest.fixture
def objects(tmp_path: Path) -> Experiment:
    return Experiment(MemoryStorage(), tmp_path / "node")


def memory(experiment: Experiment) -> MemoryStorage:
    assert isinstance(experiment.storage, MemoryStorage)
    return experiment.storage


class Nth:
    """Lets the n-th call of a storage go wrong."""

    def __init__(self, number: int, fault: Fault) -> None:
        self.left = number
        self.fault = fault
        self.came = False

    def __call__(self, verb: str, path: str) -> Fault | None:
        self.left -= 1
        self.came = self.came or self.left < 0
        return self.fault if self.left == -1 else None


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("late_lands", ["before the next try", "after it"])
def test_a_fault_of_any_call_of_a_commit_is_mended_by_the_next_try(
    objects: Experiment, fault: Fault, late_lands: str
) -> None:
    storage = memory(objects)
    for number in range(1, 100):
        commit = objects.staged(number, *RANKS)
        storage.faults = nth = Nth(number - 1, fault)
        with contextlib.suppress(StorageError):
            objects.store().commit(commit)
        storage.faults = no_faults
        if late_lands == "before the next try":
            storage.land_late_writes()
        if number in objects.store().list():
            assert objects.store().verify(number) == []
        done = objects.store().commit(commit)
        storage.land_late_writes()
        assert done.manifest == objects.store().manifest(number)
        assert_whole(objects, number, RANKS)
        if not nth.came:
            break
    assert number > 8


def test_a_late_manifest_that_lands_between_look_and_put_is_recognised_as_ours(objects: Experiment) -> None:
    storage, commit = memory(objects), objects.staged(1, ONE)
    storage.faults = lambda verb, path: Fault.LATE if path.endswith(MANIFEST) and verb == "put" else None
    with pytest.raises(StorageError):
        objects.store().commit(commit)

    def land_before_put(verb: str, path: str) -> None:
        if verb == "put":
            storage.faults = no_faults
            storage.land_late_writes()

    storage.faults = land_before_put
    done = objects.store().commit(commit)
    assert done.manifest == objects.store().manifest(1)
    assert_whole(objects, 1, [ONE])


def test_a_number_that_another_driver_takes_between_look_and_put_is_refused(objects: Experiment) -> None:
    storage = memory(objects)
    ours, theirs = objects.staged(1, ONE), objects.staged(1, {"other": b"bytes"}, attempt=2)

    def be_faster(verb: str, path: str) -> None:
        if verb == "put":
            storage.faults = no_faults
            objects.store().commit(theirs)

    storage.faults = be_faster
    with pytest.raises(AlreadyExists, match="another report"):
        objects.store().commit(ours)
    assert objects.store().manifest(1).origin == theirs.origin


def test_of_many_drivers_at_once_one_wins(objects: Experiment) -> None:
    commits = [objects.staged(1, {"same": b"same"}, attempt=attempt) for attempt in range(1, 9)]
    start, won = threading.Barrier(len(commits)), []

    def commit(one: Commit) -> None:
        start.wait(DEADLINE_S)
        with contextlib.suppress(AlreadyExists):
            won.append(objects.store().commit(one).manifest)

    threads = [threading.Thread(target=commit, args=(one,)) for one in commits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert won == [objects.store().manifest(1)]


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_of_any_call_of_a_removal_is_mended_by_the_next_try(objects: Experiment, fault: Fault) -> None:
    storage = memory(objects)
    for number in range(1, 100):
        objects.committed(number, *RANKS, {"-before the manifest in any listing": b""})
        storage.faults = nth = Nth(number - 1, fault)
        with contextlib.suppress(StorageError):
            objects.store().remove(number)
        storage.faults = no_faults
        for seen in objects.store().list():
            assert objects.store().verify(seen) == []
        assert objects.store().remove(number)
        storage.land_late_writes()
        assert objects.store().taken() == []
        if not nth.came:
            break


def test_a_sweep_removes_uploads_that_never_came_to_their_manifest(objects: Experiment) -> None:
    objects.committed(1, ONE)
    commit = objects.staged(2, ONE)
    memory(objects).faults = lambda verb, path: Fault.FAIL if verb == "put" else None
    with pytest.raises(StorageError):
        objects.store().commit(commit)
    memory(objects).faults = no_faults
    assert objects.store().taken() == [1, 2]
    objects.store().sweep(1, None)
    assert objects.store().taken() == [1]
    objects.store().commit(commit)
    assert_whole(objects, 2, [ONE])


def test_a_storage_that_is_away_is_not_damage(objects: Experiment) -> None:
    objects.committed(1, ONE)
    for verb in ("get", "download"):
        memory(objects).faults = lambda asked, path, verb=verb: Fault.FAIL if asked == verb else None  # type: ignore[misc]
        with pytest.raises(StorageError):
            objects.store().verify(1)


def test_objects_cannot_be_opened_yet(objects: Experiment) -> None:
    with pytest.raises(CheckpointError, match="memory://test cannot be opened yet"):
        objects.store().open(1)


# Against a model

contents = st.dictionaries(
    st.sampled_from(["a", "b", "deep/a", "deep/b", "deep/er/a"]), st.binary(max_size=5), max_size=4
)


class StoreModel(RuleBasedStateMachine):
    """Numbers are given once; what was staged is committed, at the latest at the second try, or removed."""

    experiment: Experiment

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-model-"))
        self.experiment = Experiment(self.make_storage(), self.folder / "node")
        self.next_number = 1
        self.staged: dict[int, tuple[Commit, list[Files]]] = {}
        self.whole: dict[int, list[Files]] = {}
        self.read: dict[int, contextlib.ExitStack] = {}

    def make_storage(self) -> Storage:
        raise NotImplementedError

    def teardown(self) -> None:
        for reader in self.read.values():
            reader.close()
        shutil.rmtree(self.folder)

    @rule(ranks=st.lists(contents, min_size=1, max_size=3))
    def stage(self, ranks: list[Files]) -> None:
        number, self.next_number = self.next_number, self.next_number + 1
        self.staged[number] = self.experiment.staged(number, *ranks), ranks

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.staged)))
        commit, ranks = self.staged.pop(number)
        done = self.experiment.store().commit(commit)
        assert done.manifest == self.experiment.store().manifest(number)
        self.whole[number] = ranks

    @precondition(lambda self: self.staged)
    @rule(data=st.data(), at=st.integers(0, 60), half=st.booleans())
    def die_in_a_commit(self, data: st.DataObject, at: int, half: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.staged)))
        with failing_calls(at, more=MORE_CALLS, half=half), contextlib.suppress(Died):
            self.experiment.store().commit(self.staged[number][0])
        if number in self.experiment.store().list():  # adopted
            self.whole[number] = self.staged[number][1]

    @precondition(lambda self: self.whole)
    @rule(data=st.data())
    def commit_again(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.whole)))
        if number in self.staged:
            self.experiment.store().commit(self.staged.pop(number)[0])

    @precondition(lambda self: self.next_number > 1)
    @rule(data=st.data(), dies_at=st.none() | st.integers(0, 30))
    def remove(self, data: st.DataObject, dies_at: int | None) -> None:
        number = data.draw(st.integers(1, self.next_number - 1))
        with failing_calls(dies_at, more=MORE_CALLS), contextlib.suppress(Died):
            assert self.experiment.store().remove(number) or number in self.read
        if number not in self.read and self.experiment.store().remove(number):
            self.staged.pop(number, None)
            self.whole.pop(number, None)

    @rule()
    def sweep(self) -> None:
        if not self.staged:
            self.experiment.store().sweep(1, None)

    @invariant()
    def every_checkpoint_is_whole_and_no_other_is_listed(self) -> None:
        store = self.experiment.store()
        assert store.list() == sorted(self.whole)
        assert set(store.taken()) <= self.whole.keys() | self.staged.keys()
        for number, ranks in self.whole.items():
            assert store.verify(number) == []
            assert self.experiment.files(number) == merged(ranks)
            assert store.manifest(number).origin.report == number


class StoreInADirectory(StoreModel):
    def make_storage(self) -> Storage:
        return LocalStorage(self.folder / "experiment")

    @precondition(lambda self: self.whole.keys() - self.read.keys())
    @rule(data=st.data())
    def begin_to_read(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.whole.keys() - self.read.keys())))
        self.read[number] = contextlib.ExitStack()
        self.read[number].enter_context(self.experiment.store().open(number).as_directory())
        assert number in self.experiment.store().in_use([number])

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        self.read.pop(data.draw(st.sampled_from(sorted(self.read)))).close()


class StoreOfObjects(StoreModel):
    def make_storage(self) -> Storage:
        return MemoryStorage()

    @precondition(lambda self: self.staged)
    @rule(data=st.data(), at=st.integers(0, 12), fault=st.sampled_from(Fault), lands=st.booleans())
    def go_wrong_in_a_commit(self, data: st.DataObject, at: int, fault: Fault, lands: bool) -> None:
        storage = memory(self.experiment)
        number = data.draw(st.sampled_from(sorted(self.staged)))
        storage.faults = Nth(at, fault)
        with contextlib.suppress(HoldfastError):
            self.experiment.store().commit(self.staged[number][0])
        storage.faults = no_faults
        if lands:
            storage.land_late_writes()
        commit, ranks = self.staged.pop(number)
        self.experiment.store().commit(commit)
        storage.land_late_writes()
        self.whole[number] = ranks


@pytest.mark.parametrize("model", [StoreInADirectory, StoreOfObjects])
def test_whatever_is_done_in_whatever_order_every_checkpoint_is_whole(model: Callable[[], StoreModel]) -> None:
    run_state_machine_as_test(
        model, settings=settings(max_examples=40, stateful_step_count=25, deadline=None, database=None)
    )
