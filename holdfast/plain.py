"""Plain data: what journals, manifests and messages can carry, as JSON that loses nothing.

JSON has no NaN and no infinities, and the fast encoders silently write null for them; here they are
`{"$float": "nan" | "inf" | "-inf"}`. A user's own key that begins with `$` is written with one `$` more.

>>> decode(encode({"loss": float("inf"), "$cost": 1}))
{'loss': inf, '$cost': 1}
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

Plain = Any  # None, bool, int, float, str, and lists and dicts of these: what `decode` returns

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode
_AS_THEY_ARE = (str, bool, type(None))
_INT64 = 1 << 63


def plain(value: object, where: str = "value") -> Plain:
    """Returns `value` as plain data; numpy and torch scalars become numbers, tuples become lists.

    Args:
        value: what to convert.
        where: the name of `value` in messages, for example `metrics`.

    Raises:
        TypeError: something inside cannot be carried; the message names where it is.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE or kind is int or kind is float:
        return value
    if kind is dict or isinstance(value, dict):
        return {_key(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}  # type: ignore[attr-defined]
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return _scalar(value, where)


def _key(key: object, where: str) -> str:
    if isinstance(key, str):
        return str(key)
    raise TypeError(f"{where} has the key {key!r}, a {type(key).__name__}: keys must be strings")


def _scalar(value: object, where: str) -> Plain:
    for own in (bool, int, float, str):  # subclasses: numpy.float64, IntEnum, numpy.str_
        if isinstance(value, own):
            return own(value)
    item = getattr(value, "item", None)  # numpy and torch scalars, and arrays of one element
    if callable(item) and getattr(value, "size", 1) is not None:
        try:
            number = item()
        except (ValueError, RuntimeError, TypeError):
            number = None
        if type(number) in (bool, int, float):
            return number
    shape = getattr(value, "shape", None)
    what = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    raise TypeError(
        f"{where} is a {what}; it must be a number, a string, a bool, None, or a list or dict of these. "
        "Reduce arrays to one number; put large objects into a checkpoint."
    )


def encode(value: Plain) -> bytes:
    """Returns plain data as JSON bytes on one line."""
    return _to_json(_escape(value) if _needs_escape(value) else value)


def decode(data: bytes) -> Plain:
    """Returns the plain data that `encode` was given.

    Raises:
        ValueError: the bytes are not JSON.
    """
    value = _from_json(data)
    return _unescape(value) if b'"$' in data else value


def _needs_escape(value: Plain) -> bool:
    kind = type(value)
    if kind is float:
        return not math.isfinite(value)
    if kind is int:
        return not -_INT64 <= value < 2 * _INT64
    if kind is dict:
        return any(key[:1] == "$" or _needs_escape(item) for key, item in value.items())
    return kind is list and any(map(_needs_escape, value))


def _escape(value: Plain) -> Plain:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, int) and not -_INT64 <= value < 2 * _INT64:
        return {"$int": str(value)}
    if isinstance(value, dict):
        return {"$" + key if key[:1] == "$" else key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return value


def _unescape(value: Plain) -> Plain:
    if isinstance(value, dict):
        if len(value) == 1:
            ((key, item),) = value.items()
            if key == "$float":
                return float(item)
            if key == "$int":
                return int(item)
        return {key[1:] if key[:1] == "$" else key: _unescape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unescape(item) for item in value]
    return value
