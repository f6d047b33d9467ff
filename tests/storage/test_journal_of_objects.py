from __future__ import annotations

import pytest

from holdfast.errors import JournalDamaged, OwnershipLost, StorageError
from holdfast.storage.journal import read
from holdfast.storage.memory import Fault, Faults, MemoryStorage, away, no_faults
from tests.storage.journal_contract import (
    JournalContract,
    OpenJournal,
    contents,
    numbered,
    open_journal,
    written,
)

__all__ = ["open_journal"]


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


class TestJournalOfObjects(JournalContract):
    pass


def next_put(fault: Fault) -> Faults:
    left = [fault]
    return lambda verb, path: left.pop() if verb == "put" and left else None


def test_an_object_is_written_once_a_sync_and_the_names_count(
    storage: MemoryStorage, open_journal: OpenJournal
) -> None:
    owner = open_journal()
    owner.append(numbered(1))
    owner.append(numbered(2))
    owner.sync()
    owner.sync()
    assert list(contents(storage)) == [f"journal/00000001/{sequence:08d}.jsonl" for sequence in range(3)]


def test_lost_answers_are_settled_by_looking(storage: MemoryStorage, open_journal: OpenJournal) -> None:
    storage.faults = lambda verb, path: Fault.LOSE_ANSWER if verb == "put" else None
    written(written(open_journal(), 1), 2)
    owner = written(open_journal(), 3)
    assert (owner.epoch, owner.earlier) == (2, numbered(1, 2))
    assert read(storage) == numbered(1, 2, 3)


def test_a_lost_answer_of_a_claim_that_another_one_won_is_no_claim(
    storage: MemoryStorage, open_journal: OpenJournal
) -> None:
    first = open_journal()
    claims: list[str] = []

    def claim_before(verb: str, path: str) -> Fault | None:
        if verb != "put" or claims:
            return None
        claims.append(path)
        assert open_journal().epoch == 2
        return Fault.LOSE_ANSWER

    storage.faults = claim_before
    assert open_journal().epoch == 3
    with pytest.raises(OwnershipLost):
        first.look()


def test_a_put_that_failed_is_repeated_by_the_next_sync(storage: MemoryStorage, open_journal: OpenJournal) -> None:
    owner = open_journal()
    owner.append(numbered(1))
    storage.faults = next_put(Fault.FAIL)
    with pytest.raises(StorageError) as raised:
        owner.sync()
    assert raised.value.transient
    written(owner, 2)
    assert read(storage) == numbered(1, 2)


@pytest.mark.parametrize("lands_first", [True, False])
def test_a_late_put_and_its_repetition_are_one_object(
    storage: MemoryStorage, open_journal: OpenJournal, lands_first: bool
) -> None:
    owner = open_journal()
    owner.append(numbered(1))
    storage.faults = next_put(Fault.LATE)
    with pytest.raises(StorageError):
        owner.sync()
    owner.append(numbered(2))
    if lands_first:
        storage.land_late_writes()
    owner.sync()
    storage.land_late_writes()
    assert read(storage) == open_journal().earlier == numbered(1, 2)


def test_a_put_of_a_dead_owner_that_lands_after_the_take_over_is_void(
    storage: MemoryStorage, open_journal: OpenJournal
) -> None:
    dead = written(open_journal(), 1)
    dead.append(numbered(100))
    storage.faults = next_put(Fault.LATE)
    with pytest.raises(StorageError):
        dead.sync()
    owner = open_journal()
    storage.land_late_writes()
    written(owner, 2)
    assert any(b"100" in data for data in contents(storage).values())
    assert read(storage) == open_journal().earlier == numbered(1, 2)


def test_a_claim_that_lands_late_shuts_out_but_loses_nothing(storage: MemoryStorage, open_journal: OpenJournal) -> None:
    owner = written(open_journal(), 1)
    storage.faults = next_put(Fault.LATE)
    with pytest.raises(StorageError):
        open_journal()
    written(owner, 2)
    storage.land_late_writes()
    with pytest.raises(OwnershipLost):
        owner.look()
    assert read(storage) == numbered(1, 2)
    third = open_journal()
    assert (third.epoch, third.earlier) == (3, numbered(1, 2))


def test_while_the_storage_is_away_appends_are_refused_or_kept_until_it_is_back(
    storage: MemoryStorage, open_journal: OpenJournal
) -> None:
    owner = open_journal()
    storage.faults = away
    kept = []
    for number in range(3):
        owner.append(numbered(number))
        kept.append(number)
        with pytest.raises(StorageError) as raised:
            owner.sync()
        assert raised.value.transient
    storage.faults = no_faults
    owner.sync()
    assert read(storage) == numbered(*kept)


def test_a_failure_in_the_background_is_raised_once_and_tried_again(
    storage: MemoryStorage, open_journal: OpenJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.storage.journal._ObjectTail.group_age_s", 0.01)
    owner = open_journal()
    storage.faults = away
    owner.append(numbered(1))
    for _ in range(1000):
        if owner._flush_failure:
            break
        owner._closing.wait(0.02)
    with pytest.raises(StorageError, match="no answer"):
        owner.append(numbered(2))
    storage.faults = no_faults
    for _ in range(1000):
        if owner._durable == owner._written:
            break
        owner._closing.wait(0.02)
    assert read(storage) == numbered(1)


def test_a_missing_object_ends_the_newest_segment_and_is_damage_in_an_older_one(
    storage: MemoryStorage, open_journal: OpenJournal
) -> None:
    written(written(written(open_journal(), 1), 2), 3)
    storage.delete("journal/00000001/00000003.jsonl")
    assert read(storage) == numbered(1)
    assert open_journal().earlier == numbered(1)
    storage.delete("journal/00000001/00000002.jsonl")
    with pytest.raises(JournalDamaged, match=r"00000001/00000002.jsonl is missing"):
        read(storage)


def test_an_object_cut_at_any_byte_is_found(storage: MemoryStorage, open_journal: OpenJournal) -> None:
    written(written(open_journal(), 1, 2), 3).close()
    for path, data in contents(storage).items():
        for end in range(len(data)):
            storage.put(path, data[:end])
            with pytest.raises(JournalDamaged, match=path):
                read(storage)
        storage.put(path, data)
