"""Shows in the driver what the ranks write into their files."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

_CHUNK_BYTES = 1 << 18
_LONGEST_LINE_BYTES = 1 << 16


class LogFollower:
    """Follows the files of ranks in a thread, and prints each new line with its rank in front.

    What is in the files when it starts is not shown. A file that does not exist yet is followed once it does.
    """

    def __init__(self, stdout: Mapping[int, Path], stderr: Mapping[int, Path], interval_s: float = 0.1) -> None:
        self._files = [_Followed(path, f"[rank {rank}] ", "stdout") for rank, path in sorted(stdout.items())]
        self._files += [_Followed(path, f"[rank {rank}] ", "stderr") for rank, path in sorted(stderr.items())]
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="holdfast logs", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def drain(self) -> None:
        """Shows what has been written until now."""
        with self._lock:
            for file in self._files:
                file.show_new()

    def stop(self) -> None:
        """Shows the rest, also a last line without an end, and ends the thread."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            for file in self._files:
                file.show_rest()

    def _follow(self) -> None:
        while not self._ending.wait(self._interval_s):
            self.drain()


class _Followed:
    """One file, as far as it was shown."""

    def __init__(self, path: Path, prefix: str, stream: str) -> None:
        self._path = path
        self._prefix = prefix
        self._stream = stream
        self._held = b""
        self._file = self._open()
        if self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def _open(self) -> FileIO | None:
        try:
            return FileIO(self._path)
        except FileNotFoundError:
            return None

    def show_new(self) -> None:
        self._file = self._file or self._open()
        while self._file is not None and (chunk := self._file.read(_CHUNK_BYTES)):
            *lines, self._held = (self._held + chunk).split(b"\n")
            self._print(lines)
            if len(self._held) > _LONGEST_LINE_BYTES:
                self._held = _last_shown(self._held)[-_LONGEST_LINE_BYTES:]

    def show_rest(self) -> None:
        self.show_new()
        if self._held:
            self._print([self._held])
        self._held = b""
        if self._file is not None:
            self._file.close()

    def _print(self, lines: list[bytes]) -> None:
        texts = [f"{self._prefix}{_last_shown(line).decode(errors='replace')}\n" for line in lines]
        if texts:
            with contextlib.suppress(OSError, ValueError):  # nobody reads any more: training goes on
                stream = getattr(sys, self._stream)
                stream.write("".join(texts))
                stream.flush()


def _last_shown(line: bytes) -> bytes:
    """Returns what a terminal would show: a progress bar overwrites its line."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
