"""System calls that fail, or at which the process dies, one after the other."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

_OF_THE_SYSTEM = (
    *((os, name) for name in ("open", "read", "readv", "write", "fchmod", "fsync", "link", "listdir", "mkdir")),
    *((os, name) for name in ("lstat", "rename", "replace", "rmdir", "scandir", "sendfile", "stat", "fstat", "unlink")),
    (builtins, "open"),
    (io, "open"),
)


class Died(BaseException):
    """The process was killed here; nothing of ours may catch it."""


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


class Calls:
    """Counts system calls and lets one of them fail; `names` says which were made."""

    def __init__(
        self, fail_at: int | None, error: Callable[[], BaseException], *, and_all_after: bool, half: bool
    ) -> None:
        self.names: list[str] = []
        self._fail_at = fail_at
        self._error = error
        self._and_all_after = and_all_after
        self._half = half  # what fails was done, a write by half

    @property
    def failed(self) -> bool:
        """Whether there was a call to fail: the loop over all of them is over when there was none."""
        return self._fail_at is not None and len(self.names) > self._fail_at

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.names.append(name)
            number = len(self.names) - 1
            if self._fail_at is None or number < self._fail_at or (number > self._fail_at and not self._and_all_after):
                return call(*arguments, **options)
            if self._half and name == "write":
                call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif self._half:
                _closed(call(*arguments, **options))
            raise self._error()

        return counted


def _closed(result: Any) -> None:
    """Descriptors die with their process."""
    if hasattr(result, "close"):
        result.close()


@contextmanager
def failing_calls(
    fail_at: int | None,
    error: Callable[[], BaseException] = Died,
    *,
    more: Sequence[tuple[object, str]] = (),
    and_all_after: bool = False,
    half: bool = False,
) -> Iterator[Calls]:
    """Lets the system call number `fail_at` raise; None: none does, they are only counted.

    Args:
        fail_at: from 0 on.
        error: makes what is raised.
        more: other functions, as (module, name), that count as system calls.
        and_all_after: every later one raises too.
        half: what raises was done before, a write by half.
    """
    calls = Calls(fail_at, error, and_all_after=and_all_after, half=half)
    with pytest.MonkeyPatch.context() as patch:
        for place, name in (*_OF_THE_SYSTEM, *more):
            patch.setattr(place, name, calls.wrap(name, getattr(place, name)))
        yield calls
