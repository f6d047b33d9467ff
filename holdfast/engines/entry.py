"""What a new process does: becomes what its spec says, calls its entry, ends."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from holdfast import plain
from holdfast.engines.base import Channel, ProcessSpec


@dataclass(frozen=True)
class Surroundings:
    """What a process is given besides its payload; goes over its channel before that."""

    entry: str
    name: str
    env: dict[str, str]
    cwd: str
    path: list[str]
    argv: list[str]
    stdout: str | None
    stderr: str | None

    def encode(self) -> bytes:
        """Returns it as bytes; names of files are bytes to the system, and need not be Unicode."""
        return plain.encode({key: _each(_to_json, value) for key, value in vars(self).items()})

    @classmethod
    def decode(cls, data: bytes) -> Surroundings:
        """Returns what `encode` was given."""
        return cls(**{key: _each(_from_json, value) for key, value in plain.decode(data).items()})

    @classmethod
    def of(cls, spec: ProcessSpec, defaults: Mapping[str, str], assigned: Mapping[str, str]) -> Surroundings:
        """Returns those of this process, changed as `spec` says.

        Args:
            spec: what is to be started; its variables win over all others.
            defaults: variables that the environment of this process wins over.
            assigned: variables that win over the environment of this process.
        """
        return cls(
            entry=spec.entry,
            name=spec.name,
            env={**defaults, **os.environ, **assigned, **spec.env},
            cwd=os.getcwd(),
            path=list(sys.path),
            argv=list(sys.argv),
            stdout=None if spec.stdout is None else os.path.abspath(spec.stdout),
            stderr=None if spec.stderr is None else os.path.abspath(spec.stderr),
        )

    def enter(self) -> None:
        """Makes this process have them."""
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.cwd)
        sys.path[:] = self.path
        sys.argv[:] = self.argv
        redirect(self.stdout, 1)
        redirect(self.stderr, 2)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        fresh_main(self.argv)


def _each(change: Callable[[str], str], value: plain.Plain) -> plain.Plain:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): change(item) for key, item in value.items()}
    return [change(item) for item in value] if isinstance(value, list) else value


def _to_json(text: str) -> str:
    return os.fsencode(text).decode("latin-1")


def _from_json(text: str) -> str:
    return os.fsdecode(text.encode("latin-1"))


def redirect(path: str | None, descriptor: int) -> None:
    """Makes `descriptor` append to the file, if one is given."""
    if path is None:
        return
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(opened, descriptor)
    os.close(opened)


def fresh_main(argv: Sequence[str]) -> None:
    """Replaces `__main__` by an empty module: the entry fills it with what the script defines."""
    module = ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    module.__file__ = argv[0] if argv else None
    sys.modules["__main__"] = module


def find(entry: str) -> Callable[[Channel, bytes], object]:
    """Returns the function that `package.module:function` names."""
    module, _, function = entry.partition(":")
    found: Callable[[Channel, bytes], object] = getattr(importlib.import_module(module), function)
    return found


def call(entry: str, channel: Channel, payload: bytes) -> int:
    """Calls the entry and returns the exit status: what ends it is printed as Python would."""
    try:
        find(entry)(channel, payload)
    except SystemExit as end:
        return status_of(end)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def status_of(end: SystemExit) -> int:
    """Returns the exit status that `SystemExit` asks for; prints its message, if it is one."""
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def finish(status: int) -> None:
    """Ends this process: threads that are no daemons first, then what `atexit` holds, as at the end of a script.

    The interpreter is not torn down: with the threads of native libraries that may hang or crash.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # no public call: joining by hand waits for idle pools forever
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
