"""One line of JSON that shows whether it is whole: `[length in bytes, "xxh3_64 of them", value]`.

Journals, manifests and the notes beside staged files are made of such lines. People read them with any JSON tool.

>>> unseal(seal({"number": 7}))
{'number': 7}
"""

from __future__ import annotations

from xxhash import xxh3_64_hexdigest

from holdfast.plain import Plain, decode, encode


def seal(value: Plain) -> bytes:
    """Returns `value` as one sealed line, its newline included."""
    return _framed(encode(value))


def unseal(line: bytes) -> Plain:
    """Returns the value of a sealed line.

    Raises:
        ValueError: the line is not, to the byte, what `seal` once wrote.
    """
    body = _body(line)
    if _framed(body) != line:
        raise ValueError("the sealed line is torn or was changed: its length or checksum is wrong")
    return decode(body)


def is_whole(line: bytes) -> bool:
    """Whether `line` is, to the byte, what `seal` once wrote."""
    return _framed(_body(line)) == line


def _framed(body: bytes) -> bytes:
    return b'[%d, "%s", %s]\n' % (len(body), xxh3_64_hexdigest(body).encode(), body)


def _body(line: bytes) -> bytes:
    return line[line.find(b'", ') + 3 : -2]
