from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ConfigError, StorageError
from holdfast.storage import local, open_storage
from holdfast.storage.local import LocalStorage
from tests.storage.storage_contract import StorageContract, names


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "not yet" / "root")


class TestLocalStorage(StorageContract):
    pass


def failing(number: int) -> Callable[..., None]:
    def call(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(("number", "transient"), [(errno.ENOSPC, True), (errno.EIO, True), (errno.EACCES, False)])
@pytest.mark.parametrize("call", ["write", "fsync", "link", "replace"])
def test_a_put_that_fails_leaves_nothing_and_says_whether_to_try_again(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, call: str, number: int, transient: bool
) -> None:
    storage.put("name", b"before")
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(number))
        with pytest.raises(StorageError, match=f"could not write .*{errno.errorcode[number]}") as raised:
            storage.put("other" if call == "link" else "name", b"after", if_absent=call == "link")
    assert raised.value.transient is transient
    assert isinstance(raised.value.__cause__, OSError)
    assert os.listdir(storage.root) == ["name"]
    assert storage.get("name") == b"before"


def test_a_put_makes_the_file_then_the_name_then_new_folders_durable(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(file: int) -> None:
        calls.append("fsync " + Path(os.readlink(f"/proc/self/fd/{file}")).name.partition("-")[0])
        real_fsync(file)

    def replace(source: Path, target: Path) -> None:
        calls.append(f"replace {target.name}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    storage.put("folder/name", b"data")
    parents_first = [f"fsync {storage.root.parent.parent.name.partition('-')[0]}", "fsync not yet", "fsync root"]
    assert calls == [*parents_first, "fsync .tmp", "replace name", "fsync folder"]


def test_a_link_that_was_made_although_its_answer_was_lost_is_a_success(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_link = os.link

    def link_twice(source: Path, target: Path) -> None:
        real_link(source, target)
        real_link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    storage.put("name", b"data", if_absent=True)
    assert names(storage) == ["name"]


def test_what_a_dead_writer_left_is_not_listed_and_can_be_removed(storage: LocalStorage) -> None:
    storage.put("folder/name", b"data")
    dead = storage.root / "folder" / ".tmp-4194305-0123456789abcdef"  # above the largest pid of Linux
    living = storage.root / "folder" / f".tmp-{os.getpid()}-0123456789abcdef"
    of_a_user = storage.root / "folder" / ".tmp-4194305"
    for path in (dead, living, of_a_user):
        path.touch()
    assert names(storage) == ["folder/.tmp-4194305", "folder/name"]
    local.remove_temporaries(storage.root / "folder")
    assert not dead.exists()
    assert living.exists()
    assert of_a_user.exists()


def test_links_to_files_are_listed_and_circles_of_folders_are_not_followed(storage: LocalStorage) -> None:
    storage.put("folder/name", b"data")
    (storage.root / "link").symlink_to(storage.root / "folder" / "name")
    (storage.root / "folder" / "circle").symlink_to(storage.root)
    (storage.root / "broken").symlink_to("nowhere")
    assert names(storage) == ["folder/name", "link"]


@pytest.mark.parametrize("in_kernel", [True, False])
def test_an_exclusive_rename_refuses_even_an_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_kernel: bool
) -> None:
    if not in_kernel:
        monkeypatch.setattr(local, "_rename_noreplace", failing(errno.EINVAL))
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    with pytest.raises(FileExistsError):
        local.rename_exclusive(tmp_path / "source", tmp_path / "target")
    local.rename_exclusive(tmp_path / "source", tmp_path / "free")
    assert sorted(os.listdir(tmp_path)) == ["free", "target"]
    with pytest.raises(FileNotFoundError):
        local.rename_exclusive(tmp_path / "nothing", tmp_path / "elsewhere")


def test_syncs_work_on_what_is_there_and_raise_on_what_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    local.sync_file(tmp_path / "file")
    local.sync_directory(tmp_path)
    local.sync_filesystem(tmp_path)
    with open(tmp_path / "file", "rb") as file:
        local.begin_to_write_back(file.fileno())
        local.check_written_back(file.fileno())
    with pytest.raises(OSError):
        local.check_written_back(-1)
    for sync in (local.sync_file, local.sync_directory, local.sync_filesystem):
        with pytest.raises(FileNotFoundError):
            sync(tmp_path / "nothing")


def test_directories_are_not_made_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    local.make_directories(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(NotADirectoryError):
        local.make_directories(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        local.make_directories(tmp_path / "file" / "below")


def test_a_path_or_a_file_url_opens_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    storage = open_storage(tmp_path / "a b%")
    for url in (str(tmp_path / "a b%"), storage.url, "~/a b%", "a b%", "x/../a b%"):
        opened = open_storage(url)
        assert isinstance(opened, LocalStorage)
        assert opened.root == tmp_path / "a b%"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/x",
        "gs://bucket",
        "az://container",
        "abfs://x",
        Path("s3://bucket/x"),
        "http://host/x",
        "file://host/x",
        "file:///x?y",
        "",
    ],
)
def test_what_is_no_directory_is_refused(url: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"[Uu]se a directory|file:///"):
        open_storage(url)
