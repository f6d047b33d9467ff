from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import StorageError
from holdfast.storage.memory import Fault, MemoryStorage, away, no_faults
from tests.storage.storage_contract import StorageContract, names


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


class TestMemoryStorage(StorageContract):
    pass


def put_with(storage: MemoryStorage, fault: Fault, path: str, data: bytes, *, if_absent: bool = False) -> None:
    storage.faults = lambda verb, path: fault
    with pytest.raises(StorageError) as raised:
        storage.put(path, data, if_absent=if_absent)
    assert raised.value.transient
    storage.faults = no_faults


def test_a_write_that_failed_did_not_happen(storage: MemoryStorage) -> None:
    put_with(storage, Fault.FAIL, "name", b"data")
    assert names(storage) == []


def test_a_write_whose_answer_was_lost_happened(storage: MemoryStorage) -> None:
    put_with(storage, Fault.LOSE_ANSWER, "name", b"data")
    assert storage.get("name") == b"data"
    put_with(storage, Fault.LOSE_ANSWER, "name", b"other", if_absent=True)
    assert storage.get("name") == b"data"


def test_a_late_write_lands_when_it_is_let(storage: MemoryStorage) -> None:
    put_with(storage, Fault.LATE, "name", b"late")
    assert names(storage) == []
    storage.put("name", b"between")
    assert storage.land_late_writes() == 1
    assert storage.get("name") == b"late"
    assert storage.land_late_writes() == 0


def test_a_late_put_if_absent_changes_nothing_that_is_there(storage: MemoryStorage) -> None:
    put_with(storage, Fault.LATE, "name", b"late", if_absent=True)
    storage.put("name", b"between", if_absent=True)
    storage.land_late_writes()
    assert storage.get("name") == b"between"


def test_a_storage_that_is_away_answers_nothing(storage: MemoryStorage, tmp_path: Path) -> None:
    storage.put("name", b"data")
    storage.faults = away
    calls: list[Callable[[], object]] = [
        lambda: storage.put("name", b""),
        lambda: storage.get("name"),
        lambda: list(storage.list()),
        lambda: storage.delete("name"),
        lambda: storage.copy("name", "copy"),
        lambda: storage.download("name", tmp_path / "target"),
    ]
    for call in calls:
        with pytest.raises(StorageError) as raised:
            call()
        assert raised.value.transient
    storage.faults = no_faults
    assert storage.get("name") == b"data"
    assert names(storage) == ["name"]
