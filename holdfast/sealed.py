"""One line of JSON that shows whether it is whole: `[length in bytes, "hash", value]`.

Journals, manifests and the notes beside staged files are made of such lines. People read them with any JSON tool.

>>> unseal(seal({"number": 7}))
{'number': 7}
"""

from __future__ import annotations

import xxhash

from holdfast.plain import Plain, decode, encode


def seal(value: Plain) -> bytes:
    """Returns `value` as one sealed line, its newline included."""
    body = encode(value)
    return b'[%d,"%s",%s]\n' % (len(body), xxhash.xxh3_64_hexdigest(body).encode(), body)


def unseal(line: bytes) -> Plain:
    """Returns the value of a sealed line.

    Raises:
        ValueError: the line is not, to the byte, what `seal` once wrote.
    """
    length, comma, rest = line.partition(b",")
    body = rest[19:-2]
    if (
        not comma
        or length != b"[%d" % len(body)
        or rest[:19] != b'"%s",' % xxhash.xxh3_64_hexdigest(body).encode()
        or rest[-2:] != b"]\n"
    ):
        raise ValueError("a sealed line is torn or was changed")
    return decode(body)
