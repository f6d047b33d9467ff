"""Thousands of random histories of a run: whatever is killed, refused or late, no promise is broken."""

from __future__ import annotations

import pytest

from tests.run.simulation import play

CHUNKS, PER_CHUNK = 8, 500


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_random_history_of_kills_and_refusals_breaks_a_promise(chunk):
    for seed in range(chunk * PER_CHUNK, (chunk + 1) * PER_CHUNK):
        play(seed)
