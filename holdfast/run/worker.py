"""The entry of a worker process: it unpacks the training function, calls it in a session, and tells how it ended."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pickle
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.engines.base import Channel
from holdfast.plain import Plain, decode, encode, plain
from holdfast.run.session import Assignment, DriverGone, Session, entered

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def pack(assignment: Assignment, function: bytes) -> bytes:
    """Returns what `main` needs: where the worker stands, and the pickled function with its configuration."""
    head = encode(assignment.to_plain())
    return len(head).to_bytes(4, "little") + head + function


def main(channel: Channel, payload: bytes) -> None:
    """Runs a training function; sends `returned` or `raised`."""
    length = int.from_bytes(payload[:4], "little")
    session = Session(channel, Assignment.from_plain(decode(payload[4 : 4 + length])))
    try:
        value = _call(session, payload[4 + length :])
    except DriverGone:
        return
    except (Exception, SystemExit) as error:  # a KeyboardInterrupt in this process is for the debugger's user
        _tell_raised(session, error)
    else:
        session.close()
        session.send({"t": "returned", "value": _plain_or_none(value)})


def _call(session: Session, function: bytes) -> object:
    with entered(session):
        train_loop, config = pickle.loads(function)
        _adopt_main(train_loop)
        try:
            return call_with(train_loop, config)
        except SystemExit as end:
            if end.code:
                raise
            return None  # as a script that calls sys.exit() has succeeded


def call_with(train_loop: Callable[..., object], config: Mapping[str, Any] | None) -> object:
    """Calls a training function, which takes its configuration or nothing."""
    return train_loop(dict(config or {})) if takes_config(train_loop) else train_loop()


def takes_config(train_loop: Callable[..., object]) -> bool:
    """Whether a training function takes one parameter; none is the other possibility.

    Raises:
        TypeError: it needs more than one.
    """
    try:
        parameters = inspect.signature(train_loop).parameters.values()
    except ValueError:  # written in C
        return True
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in needed):
        names = ", ".join(p.name for p in needed)
        raise TypeError(f"a training function takes its configuration or nothing; this one needs ({names})")
    return bool(by_position)


def _adopt_main(train_loop: object) -> None:
    """Puts what the driver's script defines into this process's `__main__`, so that pickling its classes works here."""
    inner = inspect.unwrap(train_loop) if callable(train_loop) else train_loop
    while isinstance(inner, functools.partial):
        inner = inner.func
    for holder in (inner, vars(type(inner)).get("__call__")):
        found = getattr(holder, "__globals__", {})
        if found.get("__name__") == "__main__":
            main_names = vars(sys.modules["__main__"])
            for name in found.keys() - main_names.keys():  # in the driver's own process they are all there
                main_names[name] = found[name]


def _plain_or_none(value: object) -> Plain:
    try:
        return plain(value, "the returned value")
    except TypeError as error:
        warnings.warn(f"Result.return_value will be None: {error}", stacklevel=2)
        return None


def _tell_raised(session: Session, error: BaseException) -> None:
    text = users_traceback(error)
    with contextlib.suppress(OSError):  # the log's disk may be full
        print(text, file=sys.stderr, flush=True)
    session.send({"t": "raised", "traceback": text})  # last: it has this process ended


def users_traceback(error: BaseException) -> str:
    """Returns a traceback as text, without the frames of this library that lie above the user's own."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames) and frames.tb_next is not None:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _is_ours(frames: types.TracebackType) -> bool:
    return os.path.abspath(frames.tb_frame.f_code.co_filename).startswith(_HERE + os.sep)
