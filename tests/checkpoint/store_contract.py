"""What every CheckpointStore does, whatever its storage. A test class inherits it and says what `storage` is."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import store as store_module
from holdfast.checkpoint import transfer
from holdfast.checkpoint.checkpoint import MANIFEST, METADATA
from holdfast.checkpoint.manifest import Origin, part_directory
from holdfast.checkpoint.store import STAGING, CheckpointStore, Commit, checkpoint_name
from holdfast.checkpoint.transfer import Tries, make_durable, stage
from holdfast.errors import (
    AlreadyExists,
    CheckpointDamaged,
    CheckpointError,
    CheckpointFailed,
    HoldfastError,
    NotFound,
    StorageError,
)
from holdfast.sealed import seal, unseal
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from tests.checkpoint.faults import Died, failing_calls, io_error

Files = Mapping[str, bytes | None]  # None: an empty directory

ONE: Files = {"model.pt": b"weights", "deep/er/config": b"{}", "empty": b"", "hollow/inner": None, METADATA: b"{}"}
RANKS: tuple[Files, ...] = (
    {"shared.json": b"same", "rank0.pt": b"zero", "clash": b"kept", "shard/0": b"0"},
    {"shared.json": b"same", "rank1.pt": b"one!", "clash": b"lost", "shard/1": b"1", "deep/hollow": None},
    {"shared.json": b"same", "rank2.pt": b"two", "clash": b"lost too", "shard/2": b"2"},
)
MORE_CALLS = [(store_module, "rename_exclusive"), (store_module, "sync_directory"), (transfer, "sync_filesystem")]


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)
    return folder


class Experiment:
    """A storage with a staging directory beside it or in it, and what a driver does with both."""

    def __init__(self, storage: Storage, node: Path) -> None:
        self.storage = storage
        self.node = node
        self.staging = (storage.root if isinstance(storage, LocalStorage) else node) / STAGING / "1"

    def store(self) -> CheckpointStore:
        return CheckpointStore(self.storage)

    def staged(self, number: int, *ranks: Files, first_rank: int = 0, attempt: int = 1) -> Commit:
        """Stages and makes durable a part for each of `ranks`: report and number are the same."""
        parts = {}
        for rank, files in enumerate(ranks, first_rank):
            parts[rank] = part_directory(self.staging / str(attempt), number, rank)
            source = write(self.node / "user" / f"{attempt}-{number}-{rank}", files)
            stage(source, parts[rank], give=True)
            make_durable(parts[rank], Tries())
        return Commit(number, Origin("mnist", 1, attempt, number), parts, {"loss": 0.5 / number})

    def committed(self, number: int, *ranks: Files) -> Commit:
        commit = self.staged(number, *ranks)
        self.store().commit(commit)
        return commit

    def files(self, number: int) -> dict[str, bytes]:
        """What lies under a number, but for the manifest."""
        name = checkpoint_name(number)
        paths = [entry.path for entry in self.storage.list(name)]
        return {path[len(name) + 1 :]: self.storage.get(path) for path in paths if path != f"{name}/{MANIFEST}"}

    def change(self, number: int, path: str, change: Callable[[bytes], bytes | None]) -> None:
        name = f"{checkpoint_name(number)}/{path}"
        data = change(self.storage.get(name))
        self.storage.delete(name)
        if data is not None:
            self.storage.put(name, data)


def merged(ranks: Sequence[Files]) -> dict[str, bytes]:
    """What the files of ranks become, without folders over files."""
    files: dict[str, bytes] = {}
    for rank in ranks:
        for path, data in rank.items():
            if data is not None:
                files.setdefault(path, data)
    return files


def assert_whole(experiment: Experiment, number: int, ranks: Sequence[Files]) -> None:
    store = experiment.store()
    assert store.verify(number) == []
    assert experiment.files(number) == merged(ranks)
    assert {file.path for file in store.manifest(number).files} == merged(ranks).keys() - {METADATA}


class StoreContract:
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        raise NotImplementedError

    @pytest.fixture
    def experiment(self, storage: Storage, tmp_path: Path) -> Experiment:
        return Experiment(storage, tmp_path / "node")

    # Commit

    def test_a_commit_makes_exactly_the_files_and_the_manifest(self, experiment: Experiment) -> None:
        done = experiment.store().commit(experiment.staged(7, ONE))
        assert_whole(experiment, 7, [ONE])
        manifest = experiment.store().manifest(7)
        assert manifest == done.manifest
        assert (manifest.number, manifest.origin) == (7, Origin("mnist", 1, 1, 7))
        assert manifest.metrics == {"loss": 0.5 / 7}
        assert manifest.directories == ("hollow/inner",)
        assert done.conflicts == ()

    def test_an_empty_checkpoint_is_a_checkpoint(self, experiment: Experiment) -> None:
        experiment.committed(1, {})
        assert_whole(experiment, 1, [{}])
        assert experiment.store().list() == [1]

    def test_the_parts_of_all_ranks_become_one_directory(self, experiment: Experiment) -> None:
        done = experiment.store().commit(experiment.staged(1, *RANKS))
        assert_whole(experiment, 1, RANKS)
        assert experiment.store().manifest(1).directories == ("deep/hollow",)
        assert done.conflicts == (
            "clash: rank 0's was kept, rank 1's is different and was dropped",
            "clash: rank 0's was kept, rank 2's is different and was dropped",
        )

    def test_ranks_need_not_begin_at_zero(self, experiment: Experiment) -> None:
        experiment.store().commit(experiment.staged(1, *RANKS[1:], first_rank=5))
        assert_whole(experiment, 1, RANKS[1:])

    @pytest.mark.parametrize(
        "ranks",
        [
            ({"model": None}, {"model": b"file"}),
            ({"model": b"file"}, {"model": None}),
            ({"model/weights": b"w"}, {"model": b"file", "other": b"o"}),
            ({"model": b"file"}, {"model/weights": b"w", "other": b"o"}),
            ({"model": None}, {"model/weights": b"w"}),
            ({}, {"a/b/c": b"c"}, {"a/b": None}),
        ],
    )
    def test_files_and_folders_of_the_same_name_are_no_obstacle(
        self, experiment: Experiment, ranks: tuple[Files, ...]
    ) -> None:
        experiment.committed(1, *ranks)
        assert experiment.store().verify(1) == []
        manifest = experiment.store().manifest(1)
        assert {file.path for file in manifest.files} == experiment.files(1).keys()

    def test_a_second_commit_of_the_same_is_harmless(self, experiment: Experiment) -> None:
        commit = experiment.staged(1, *RANKS)
        first = experiment.store().commit(commit)
        assert experiment.store().commit(commit).manifest == first.manifest
        assert_whole(experiment, 1, RANKS)

    def test_what_was_committed_before_its_experiment_was_renamed_is_the_same(self, experiment: Experiment) -> None:
        commit = experiment.staged(1, ONE)
        first = experiment.store().commit(commit)
        renamed = replace(commit, origin=replace(commit.origin, experiment="new name"))
        again = experiment.store().commit(renamed)
        assert again == first
        assert again.manifest.origin.experiment == "mnist"

    def test_a_number_that_another_report_has_is_refused_and_nothing_changes(self, experiment: Experiment) -> None:
        experiment.committed(1, ONE)
        other = experiment.staged(1, {"other": b"bytes"}, attempt=2)
        with pytest.raises(AlreadyExists, match="checkpoint_000001 exists and comes from another report"):
            experiment.store().commit(other)
        assert_whole(experiment, 1, [ONE])

    def test_a_number_with_a_damaged_manifest_is_refused(self, experiment: Experiment) -> None:
        commit = experiment.committed(1, ONE)
        experiment.change(1, MANIFEST, lambda data: data[:-1])
        with pytest.raises(CheckpointDamaged, match="the manifest of checkpoint_000001"):
            experiment.store().commit(commit)

    def test_a_part_that_is_not_durable_is_not_committed(self, experiment: Experiment) -> None:
        commit = experiment.staged(1, *RANKS)
        (commit.parts[1] / transfer.DURABLE).unlink()
        with pytest.raises(CheckpointFailed, match=r"durable\.json"):
            experiment.store().commit(commit)
        assert experiment.store().list() == []

    def test_a_staged_file_that_is_gone_is_named(self, experiment: Experiment) -> None:
        commit = experiment.staged(1, *RANKS)
        (commit.parts[1] / transfer.FILES / "rank1.pt").unlink()
        with pytest.raises(HoldfastError, match=r"rank1\.pt"):
            experiment.store().commit(commit)
        assert experiment.store().list() == []

    @pytest.mark.parametrize("ranks", [(ONE,), RANKS], ids=["one rank", "three ranks"])
    @pytest.mark.parametrize("half", [False, True], ids=["before", "after"])
    def test_a_death_at_any_system_call_of_a_commit_ends_in_one_whole_checkpoint(
        self, experiment: Experiment, ranks: tuple[Files, ...], half: bool
    ) -> None:
        for number in itertools.count(1):
            commit = experiment.staged(number, *ranks)
            with failing_calls(number - 1, more=MORE_CALLS, half=half) as calls, contextlib.suppress(Died):
                experiment.store().commit(commit)
            if number in experiment.store().list():
                assert experiment.store().verify(number) == [], calls.names[-1]
            experiment.store().commit(commit)
            assert_whole(experiment, number, ranks)
            assert experiment.store().taken() == experiment.store().list() == list(range(1, number + 1))
            if not calls.failed:
                break

    @pytest.mark.parametrize("half", [False, True], ids=["before", "after"])
    def test_a_failure_of_any_system_call_of_a_commit_is_mended_by_the_next_try(
        self, experiment: Experiment, half: bool
    ) -> None:
        for number in itertools.count(1):
            commit = experiment.staged(number, *RANKS)
            with (
                failing_calls(number - 1, io_error, more=MORE_CALLS, half=half) as calls,
                contextlib.suppress(OSError, StorageError),  # never CheckpointFailed: that would be the end of it
            ):
                experiment.store().commit(commit)
            experiment.store().commit(commit)
            assert_whole(experiment, number, RANKS)
            if not calls.failed:
                break

    def test_deaths_at_two_system_calls_in_a_row_end_in_one_whole_checkpoint(self, experiment: Experiment) -> None:
        numbers = itertools.count(1)
        for first in itertools.count():
            last = True
            for second in itertools.count():
                number = next(numbers)
                commit = experiment.staged(number, *RANKS[:2])
                with failing_calls(3 * first, more=MORE_CALLS) as calls, contextlib.suppress(Died):
                    experiment.store().commit(commit)
                last = last and not calls.failed
                with failing_calls(3 * second, more=MORE_CALLS) as again, contextlib.suppress(Died):
                    experiment.store().commit(commit)
                experiment.store().commit(commit)
                assert_whole(experiment, number, RANKS[:2])
                if not again.failed:
                    break
            if last:
                break

    # List, taken

    def test_what_is_committed_is_listed_ascending(self, experiment: Experiment) -> None:
        store = experiment.store()
        assert store.list() == store.taken() == []
        for number in (2, 1_000_000, 10, 1):
            experiment.committed(number, {"file": b"%d" % number})
        assert store.list() == store.taken() == [1, 2, 10, 1_000_000]

    def test_what_has_no_manifest_is_taken_but_not_listed(self, experiment: Experiment) -> None:
        experiment.committed(1, ONE)
        experiment.committed(2, ONE)
        experiment.change(2, MANIFEST, lambda data: None)
        assert experiment.store().list() == [1]
        assert experiment.store().taken() == [1, 2]
        assert experiment.store().verify(2) == ["checkpoint_000002 is missing, or its manifest is"]

    def test_other_names_are_no_checkpoints(self, experiment: Experiment) -> None:
        for name in ("checkpoint_1", "checkpoint_", "checkpoint_00000²", "checkpoint_٠٠٠٠٠١", "model_000001", "000001"):
            experiment.storage.put(f"{name}/{MANIFEST}", b"")
        assert experiment.store().list() == experiment.store().taken() == []

    def test_a_manifest_of_another_number_is_damage(self, experiment: Experiment) -> None:
        experiment.committed(1, ONE)
        experiment.storage.copy(f"{checkpoint_name(1)}/{MANIFEST}", f"{checkpoint_name(2)}/{MANIFEST}")
        assert experiment.store().verify(2) == ["checkpoint_000002 holds the manifest of number 1"]

    def test_what_was_never_there_is_not_found(self, experiment: Experiment) -> None:
        with pytest.raises(NotFound):
            experiment.store().manifest(1)
        assert experiment.store().verify(1) == ["checkpoint_000001 is missing, or its manifest is"]

    # Verify

    def test_every_flipped_byte_of_every_file_is_named(self, experiment: Experiment) -> None:
        experiment.committed(1, *RANKS)
        for path, data in experiment.files(1).items():
            for position in range(len(data)):
                experiment.change(1, path, lambda data, at=position: flipped(data, at))  # type: ignore[misc]
                assert experiment.store().verify(1) == [f"{path} has other bytes than were committed"]
                assert experiment.store().verify(1, full=False) == []
                experiment.change(1, path, lambda data, at=position: flipped(data, at))  # type: ignore[misc]
        assert experiment.store().verify(1) == []

    def test_every_flipped_byte_of_the_manifest_is_named(self, experiment: Experiment) -> None:
        experiment.committed(1, {"a": b"a"})
        line = experiment.storage.get(f"{checkpoint_name(1)}/{MANIFEST}")
        for position in range(len(line)):
            experiment.change(1, MANIFEST, lambda data, at=position: flipped(line, at))  # type: ignore[misc]
            for full in (False, True):
                (problem,) = experiment.store().verify(1, full=full)
                assert problem.startswith("the manifest of checkpoint_000001 cannot be read")
            experiment.change(1, MANIFEST, lambda data, at=position: line[:at])  # type: ignore[misc]
            assert len(experiment.store().verify(1)) == 1

    def test_a_checkpoint_of_a_newer_version_is_not_damaged(self, experiment: Experiment) -> None:
        commit = experiment.committed(1, ONE)
        experiment.change(1, MANIFEST, lambda line: seal({**unseal(line), "version": 2}))
        for ask in (experiment.store().verify, experiment.store().manifest):
            with pytest.raises(CheckpointError, match="checkpoint_000001 was written by a newer holdfast") as refused:
                ask(1)
            assert not isinstance(refused.value, CheckpointDamaged)
        with pytest.raises(CheckpointError, match="newer holdfast"):
            experiment.store().commit(commit)
        assert experiment.store().list() == [1]

    def test_missing_and_truncated_files_are_named_by_size_alone(self, experiment: Experiment) -> None:
        experiment.committed(1, ONE)
        experiment.change(1, "model.pt", lambda data: data[:-1])
        experiment.change(1, "empty", lambda data: None)
        for full in (False, True):
            assert sorted(experiment.store().verify(1, full=full)) == [
                "empty is missing",
                "model.pt has 6 bytes, not 7",
            ]

    def test_the_notes_are_not_verified(self, experiment: Experiment) -> None:
        experiment.committed(1, ONE)
        experiment.change(1, METADATA, lambda data: b'{"changed": true}')
        assert experiment.store().verify(1) == []

    # Remove, sweep

    def test_what_is_removed_is_gone(self, experiment: Experiment) -> None:
        for number in (1, 2, 3):
            experiment.committed(number, *RANKS)
        assert experiment.store().remove(2)
        assert experiment.store().list() == experiment.store().taken() == [1, 3]
        assert experiment.files(2) == {}
        assert_whole(experiment, 3, RANKS)

    def test_removing_what_is_absent_is_no_error(self, experiment: Experiment) -> None:
        assert experiment.store().remove(1)
        experiment.committed(2, ONE)
        assert experiment.store().remove(1)
        assert experiment.store().remove(2)
        assert experiment.store().remove(2)

    def test_what_an_abandoned_report_has_committed_is_discarded(self, experiment: Experiment) -> None:
        commit = experiment.committed(1, *RANKS)
        experiment.committed(2, ONE)
        for _ in range(2):
            assert experiment.store().discard(1, replace(commit.origin, experiment="new name"))
            assert experiment.store().taken() == [2]

    @pytest.mark.parametrize("elsewhere", [{"epoch": 2}, {"attempt": 2}, {"report": 2}], ids=str)
    def test_what_comes_from_elsewhere_is_not_discarded(
        self, experiment: Experiment, elsewhere: dict[str, Any]
    ) -> None:
        commit = experiment.committed(1, ONE)
        assert experiment.store().discard(1, replace(commit.origin, **elsewhere))
        assert_whole(experiment, 1, [ONE])

    @pytest.mark.parametrize(
        "change",
        [lambda line: None, lambda line: line[:-1], lambda line: seal({**unseal(line), "version": 2})],
        ids=["none", "torn", "newer"],
    )
    def test_what_cannot_say_where_it_comes_from_is_not_discarded(
        self, experiment: Experiment, change: Callable[[bytes], bytes | None]
    ) -> None:
        commit = experiment.committed(1, ONE)
        experiment.change(1, MANIFEST, change)
        assert experiment.store().discard(1, commit.origin)
        assert experiment.store().taken() == [1]
        assert experiment.files(1) == merged([ONE])

    def test_what_never_came_to_its_manifest_can_be_removed(self, experiment: Experiment) -> None:
        experiment.committed(1, ONE)
        experiment.change(1, MANIFEST, lambda data: None)
        assert experiment.store().remove(1)
        assert experiment.store().taken() == []

    @pytest.mark.parametrize("half", [False, True], ids=["before", "after"])
    def test_a_death_at_any_system_call_of_a_removal_is_finished_by_the_next(
        self, experiment: Experiment, half: bool
    ) -> None:
        for number in itertools.count(1):
            experiment.committed(number, *RANKS)
            with failing_calls(number - 1, more=MORE_CALLS, half=half) as calls, contextlib.suppress(Died):
                experiment.store().remove(number)
            for seen in experiment.store().list():
                assert experiment.store().verify(seen) == [], calls.names[-1]
            assert experiment.store().remove(number)
            assert experiment.store().taken() == []
            assert left_of(experiment, number) == []
            if not calls.failed:
                break

    def test_a_sweep_leaves_what_is_committed(self, experiment: Experiment) -> None:
        experiment.committed(1, *RANKS)
        experiment.store().sweep(1, None)
        assert_whole(experiment, 1, RANKS)

    def test_nothing_is_in_use_when_nobody_reads(self, experiment: Experiment) -> None:
        experiment.committed(1, ONE)
        assert experiment.store().in_use([1, 2]) == frozenset()


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]


def left_of(experiment: Experiment, number: int) -> list[str]:
    """What is left of a checkpoint that was removed, also under the name it was renamed to."""
    if not isinstance(experiment.storage, LocalStorage):
        return [entry.path for entry in experiment.storage.list(checkpoint_name(number))]
    return [
        os.path.join(at, name)
        for at, folders, names in os.walk(experiment.storage.root)
        for name in (*folders, *names)
        if name.endswith(checkpoint_name(number))
    ]
