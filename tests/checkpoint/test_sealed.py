from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.sealed import is_whole, seal, unseal

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
plain_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
SAMPLE: dict[str, Any] = {"kind": "réport", "number": 7, "loss": math.inf, "$own": [1, 2.5, None, 'a", b']}


@given(plain_values)
def test_what_was_sealed_is_unsealed_and_is_one_line(value: Any) -> None:
    line = seal(value)
    assert unseal(line) == value
    assert is_whole(line)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1


def test_any_json_tool_reads_a_line() -> None:
    length, digest, value = json.loads(seal({"number": 7}))
    assert (length, value) == (len('{"number":7}'), {"number": 7})
    assert len(digest) == 16


def assert_refused(line: bytes) -> None:
    assert not is_whole(line)
    with pytest.raises(ValueError, match="torn or was changed"):
        unseal(line)


def test_every_change_of_every_byte_is_detected() -> None:
    line = seal(SAMPLE)
    for position in range(len(line)):
        for change in (0x01, 0x20, 0x80, 0xFF):
            assert_refused(line[:position] + bytes([line[position] ^ change]) + line[position + 1 :])


def test_every_cut_is_detected() -> None:
    line = seal(SAMPLE)
    for position in range(len(line)):
        assert_refused(line[:position])
        assert_refused(line[:position] + line[position + 1 :])
        assert_refused(line[position + 1 :])


@given(plain_values, st.binary(min_size=1, max_size=5), st.integers(0, 40))
def test_bytes_too_many_are_detected(value: Any, more: bytes, position: int) -> None:
    line = seal(value)
    changed = line[:position] + more + line[position:]
    if changed != line:
        assert_refused(changed)


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(line: bytes) -> None:
    assert_refused(line)
