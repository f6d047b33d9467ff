"""What the machine itself needs for the same bytes: the limits that a figure is divided by. Standard library only."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

CHUNK_BYTES = 16 << 20
_content = bytearray()


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds that `action` takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write(path: Path, size_bytes: int, sync: bool = False) -> None:
    """Writes bytes that do not compress, from memory that has been touched."""
    if not _content:
        _content.extend(os.urandom(CHUNK_BYTES))
    _content[:8] = os.urandom(8)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size_bytes, CHUNK_BYTES):
            file.write(memoryview(_content)[: min(CHUNK_BYTES, size_bytes - start)])
        if sync:
            os.fsync(file.fileno())


def write_many(directory: Path, count: int, size_bytes: int) -> None:
    """Writes `count` files of `size_bytes` each."""
    for number in range(count):
        write(directory / f"{number:05d}.bin", size_bytes)


def sync_filesystem(path: Path) -> None:
    """Makes all of the file system under `path` durable."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(path, os.O_RDONLY)
    try:
        if libc.syncfs(file) != 0:
            raise OSError(ctypes.get_errno(), f"syncfs of {path} failed")
    finally:
        os.close(file)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read_s(path: Path) -> float:
    """Returns the seconds of reading a file once, into memory that has been touched and is used again."""
    buffer = bytearray(os.urandom(CHUNK_BYTES))
    start = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def drop_pages(directory: Path) -> None:
    """Takes what lies below a directory out of the page cache; it must have been synced.

    Files that are kept would hold their pages, and the next write would have to find pages never touched.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def warm_pages(directory: Path, size_bytes: int) -> None:
    """Writes a file and deletes it, so that what is written next gets pages which the host already backs.

    In a virtual machine the first touch of a page takes ten times as long as writing to it (2.2 s against 0.22 s for
    1 GB, seen), and the side that keeps its files would pay for it each time.
    """
    path = directory / "warm-pages"
    write(path, size_bytes)
    path.unlink()


def copy_s(source: Path, target: Path) -> float:
    """Returns the seconds of a plain copy of a directory; the copy is gone afterwards."""
    seconds = timed(lambda: shutil.copytree(source, target))
    shutil.rmtree(target)
    return seconds


def rename_s(directory: Path) -> float:
    """Returns the seconds of giving a directory another name."""
    source, target = directory / "rename-source", directory / "rename-target"
    source.mkdir()
    seconds = timed(lambda: source.rename(target))
    target.rmdir()
    return seconds


def durable_write_s(directory: Path, size_bytes: int) -> float:
    """Returns the seconds of writing one file in a new directory, with fsync of both; it is gone afterwards."""
    target = directory / "durable-write"

    def durable() -> None:
        target.mkdir()
        write(target / "state.bin", size_bytes, sync=True)
        sync_directory(target)

    seconds = timed(durable)
    shutil.rmtree(target)
    return seconds


def durable_write_many_s(directory: Path, count: int, size_bytes: int) -> float:
    """Returns the seconds of writing many files in a new directory and one syncfs; they are gone afterwards."""
    target = directory / "durable-write-many"

    def durable() -> None:
        target.mkdir()
        write_many(target, count, size_bytes)
        sync_filesystem(target)

    seconds = timed(durable)
    shutil.rmtree(target)
    return seconds


def message_s(count: int) -> list[float]:
    """Returns the seconds of each of `count` JSON messages handed to a Unix socket."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    seconds = []
    for step in range(count):
        start = time.perf_counter()
        here.sendall(json.dumps({"loss": 0.5, "step": step}).encode())
        seconds.append(time.perf_counter() - start)
        there.recv(4096)
    here.close()
    there.close()
    return seconds
