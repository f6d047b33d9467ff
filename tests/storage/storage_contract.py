"""What every storage keeps to. A member's test class inherits this and offers a fixture `storage`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import AlreadyExists, NotFound, StorageError
from holdfast.storage.base import Storage


def names(storage: Storage, prefix: str = "") -> list[str]:
    return [entry.path for entry in storage.list(prefix)]


class StorageContract:
    def test_what_was_put_can_be_got(self, storage: Storage) -> None:
        for data in (b"", b"text", bytes(range(256)) * 10_000):
            storage.put("folder/name", data)
            assert storage.get("folder/name") == data

    def test_a_put_replaces_what_was_there(self, storage: Storage) -> None:
        storage.put("name", b"a longer first one")
        storage.put("name", b"second")
        assert storage.get("name") == b"second"

    def test_getting_nothing_is_not_found(self, storage: Storage) -> None:
        storage.put("folder/name", b"data")
        for path in ("nothing", "folder/nothing", "folder", "folder/name/below"):
            with pytest.raises(NotFound, match=path):
                storage.get(path)

    def test_a_put_if_absent_keeps_what_is_there(self, storage: Storage) -> None:
        storage.put("name", b"first", if_absent=True)
        with pytest.raises(AlreadyExists):
            storage.put("name", b"second", if_absent=True)
        assert storage.get("name") == b"first"
        assert names(storage) == ["name"]

    def test_of_many_puts_if_absent_one_succeeds(self, storage: Storage) -> None:
        def put(number: int) -> int | None:
            try:
                storage.put("new folder/name", b"%d" % number, if_absent=True)
            except AlreadyExists:
                return None
            return number

        with ThreadPoolExecutor(8) as threads:
            winners = [number for number in threads.map(put, range(32)) if number is not None]
        assert [b"%d" % number for number in winners] == [storage.get("new folder/name")]

    def test_a_listing_has_everything_below_a_folder_in_the_order_of_names(self, storage: Storage) -> None:
        for path in ("b/x/1", "b/y", "b-c", "b/x.txt", "b0", "a", "bc/d", "é/ü"):
            storage.put(path, path.encode())
        assert names(storage) == ["a", "b-c", "b/x.txt", "b/x/1", "b/y", "b0", "bc/d", "é/ü"]
        assert names(storage, "b") == ["b/x.txt", "b/x/1", "b/y"]
        assert names(storage, "b/x") == ["b/x/1"]
        assert [entry.size_bytes for entry in storage.list("b")] == [7, 5, 3]

    def test_listing_nothing_yields_nothing(self, storage: Storage) -> None:
        assert names(storage) == []
        storage.put("name", b"")
        assert names(storage, "nothing") == names(storage, "nam") == names(storage, "name") == []

    def test_what_was_deleted_is_gone_and_deleting_nothing_is_no_error(self, storage: Storage) -> None:
        storage.put("folder/name", b"data")
        storage.put("folder/other", b"data")
        storage.delete("folder/name")
        for path in ("folder/name", "folder/nothing", "nothing/name", "folder"):
            storage.delete(path)
        assert names(storage) == ["folder/other"]

    def test_a_copy_has_the_same_bytes_and_replaces(self, storage: Storage) -> None:
        storage.put("name", b"data")
        storage.put("folder/copy", b"something else")
        storage.copy("name", "folder/copy")
        storage.put("name", b"changed")
        assert storage.get("folder/copy") == b"data"

    def test_copying_nothing_is_not_found(self, storage: Storage) -> None:
        with pytest.raises(NotFound):
            storage.copy("nothing", "copy")
        assert names(storage) == []

    def test_files_go_up_and_come_down(self, storage: Storage, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "new folder" / "target"
        source.write_bytes(bytes(range(256)) * 10_000)
        storage.upload(source, "folder/name")
        storage.download("folder/name", target)
        assert target.read_bytes() == storage.get("folder/name") == source.read_bytes()
        assert [path.name for path in target.parent.iterdir()] == ["target"]

    def test_what_cannot_be_moved_is_an_error_and_changes_nothing(self, storage: Storage, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="missing file"):
            storage.upload(tmp_path / "missing file", "name")
        with pytest.raises(NotFound):
            storage.download("name", tmp_path / "target")
        assert names(storage) == []
        assert not (tmp_path / "target").exists()

    @pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a\0b"])
    def test_a_name_cannot_leave_the_storage(self, storage: Storage, path: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        calls: list[Callable[[], object]] = [
            lambda: storage.put(path, b""),
            lambda: storage.get(path),
            lambda: storage.delete(path),
            lambda: storage.copy(path, "b"),
            lambda: storage.copy("b", path),
            lambda: storage.upload(tmp_path / "file", path),
            lambda: storage.download(path, tmp_path / "target"),
            lambda: list(storage.list(path or "/")),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="not a name inside a storage"):
                call()

    def test_the_url_says_where_it_is(self, storage: Storage) -> None:
        assert "://" in storage.url
