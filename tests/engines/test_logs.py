from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engines.logs import LogFollower
from tests.engines.contract import until


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[LogFollower]:
    append(tmp_path / "out0", "before\n")
    follower = LogFollower({0: tmp_path / "out0", 1: tmp_path / "out1"}, {0: tmp_path / "err0"}, interval_s=0.01)
    yield follower
    follower.stop()


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_new_lines_are_shown_with_their_rank(
    logs: LogFollower, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path / "out0", "first\nsecond\n")
    append(tmp_path / "out1", "of another\n")
    append(tmp_path / "err0", "wrong\n")
    logs.drain()
    shown = capsys.readouterr()
    assert shown.out == "[rank 0] first\n[rank 0] second\n[rank 1] of another\n"
    assert shown.err == "[rank 0] wrong\n"


def test_a_line_is_shown_when_it_is_whole_or_at_the_end(
    logs: LogFollower, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path / "out0", "one ")
    logs.drain()
    assert capsys.readouterr().out == ""
    append(tmp_path / "out0", "line\nrest")
    logs.drain()
    assert capsys.readouterr().out == "[rank 0] one line\n"
    logs.stop()
    assert capsys.readouterr().out == "[rank 0] rest\n"


def test_of_a_progress_bar_its_last_state_is_shown(
    logs: LogFollower, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path / "out0", "\r 1%" * 50_000)
    logs.drain()
    append(tmp_path / "out0", "\r100%\n")
    logs.drain()
    assert capsys.readouterr().out == "[rank 0] 100%\n"


def test_the_thread_shows_lines_by_itself(
    logs: LogFollower, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.start()
    append(tmp_path / "out0", "by itself\n")
    shown = ""

    def is_shown() -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return bool(shown)

    until(is_shown)
    assert shown == "[rank 0] by itself\n"


def test_bytes_that_are_no_text_are_shown_somehow(
    logs: LogFollower, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "out0").open("ab") as file:
        file.write(b"\xff ok\n")
    logs.drain()
    assert capsys.readouterr().out == "[rank 0] \ufffd ok\n"
