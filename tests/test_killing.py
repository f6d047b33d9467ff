"""A short sample of what `make test-crash` does at length: runs killed at random moments, files changed at every byte."""

from __future__ import annotations

import pytest

from tests.crash import damage, killing

SEED = 20


@pytest.mark.timeout(180)
def test_twenty_kills_of_everything_lose_nothing_whose_report_had_returned(tmp_path):
    outcome = killing.kill_everything(tmp_path, kills=20, size_bytes=400_000, seed=SEED)
    assert outcome.violations == []
    assert outcome.kills == 20


@pytest.mark.timeout(180)
def test_twenty_kills_of_a_worker_lose_nothing_whose_report_had_returned(tmp_path):
    outcome = killing.kill_workers(tmp_path, kills=20, size_bytes=400_000, seed=SEED)
    assert outcome.violations == []
    assert outcome.kills == 20


@pytest.mark.timeout(180)
def test_a_flipped_byte_of_the_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path):
    assert damage.flip_every_byte(tmp_path, stride=7) == []


@pytest.mark.timeout(180)
def test_a_journal_cut_anywhere_is_noticed_or_gone_on_with_from_what_it_still_names(tmp_path):
    assert damage.cut_journal_everywhere(tmp_path, stride=29) == []


def test_the_killing_tests_find_a_lost_checkpoint(tmp_path, monkeypatch):
    """A test that cannot fail proves nothing: a run that forgets what was committed is caught."""
    killing.kill_workers(tmp_path, kills=1, size_bytes=4_000, seed=SEED)
    (tmp_path / "returned").write_text("999999999\n")
    outcome = killing.kill_everything(tmp_path, kills=0, size_bytes=4_000, seed=SEED)
    assert any("report 999999999 had returned" in violation for violation in outcome.violations)
