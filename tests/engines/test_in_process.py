from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from holdfast.engines.base import Exit, Message
from holdfast.engines.in_process import InProcessEngine
from holdfast.errors import EngineError
from tests.engines.contract import DEADLINE_S, EngineContract, heard, result, script, until_exit

T = TypeVar("T")


class TestInProcessEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[InProcessEngine]:
        """An engine whose loop is the test; another thread runs the entries."""
        engine = InProcessEngine()
        done = threading.Event()
        runner = threading.Thread(target=engine.run, args=(done.wait,))
        runner.start()
        yield engine
        done.set()
        runner.join()
        engine.close()


def run(loop: Callable[[InProcessEngine], T]) -> T:
    """Runs a loop with an engine, as a driver does."""
    engine = InProcessEngine()
    try:
        return engine.run(lambda: loop(engine))
    finally:
        engine.close()


def test_the_entry_runs_in_the_thread_that_called_run() -> None:
    source = "import threading; channel.send(b'%d' % threading.get_ident())"
    assert run(lambda engine: result(engine, script(source))) == [b"%d" % threading.get_ident(), 0]


def test_run_returns_what_the_loop_returns() -> None:
    assert run(lambda engine: "value") == "value"


def test_run_raises_what_the_loop_raises() -> None:
    def loop(engine: InProcessEngine) -> None:
        raise ValueError("meant")

    with pytest.raises(ValueError, match="meant"):
        run(loop)


def test_the_entry_ends_at_its_next_call_when_the_loop_has_failed() -> None:
    def loop(engine: InProcessEngine) -> None:
        (process,) = engine.start_gang([script("channel.send(b'ready'); channel.receive()")])
        assert heard(engine, process, 1) == [b"ready"]
        raise ValueError("meant")

    with pytest.raises(ValueError, match="meant"):
        run(loop)


def test_the_environment_of_an_entry_is_set_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAD", "before")
    monkeypatch.delenv("HAD_NOT", raising=False)
    spec = script("raise ValueError", env={"HAD": "now", "HAD_NOT": "now"})
    assert run(lambda engine: result(engine, spec)) == [1]
    assert os.environ["HAD"] == "before"
    assert "HAD_NOT" not in os.environ


def test_what_an_entry_prints_goes_where_the_driver_prints(capsys: pytest.CaptureFixture[str]) -> None:
    run(lambda engine: result(engine, script("print('shown')")))
    assert capsys.readouterr().out == "shown\n"


def test_one_entry_after_another() -> None:
    def loop(engine: InProcessEngine) -> list[list[bytes | int]]:
        return [result(engine, script(f"channel.send(b'{number}')")) for number in range(3)]

    assert run(loop) == [[b"0", 0], [b"1", 0], [b"2", 0]]


def test_stop_returns_when_the_entry_has_returned() -> None:
    source = """
    channel.send(b"ready")
    try:
        channel.receive()
    finally:
        import sys
        sys.ended_by_test = True
    """

    def loop(engine: InProcessEngine) -> bool:
        (process,) = engine.start_gang([script(source)])
        heard(engine, process, 1)
        engine.stop([process])
        assert engine.poll() == [Exit(process, 1)]
        return bool(sys.__dict__.pop("ended_by_test"))

    assert run(loop)


def test_control_c_in_the_entry_is_told_to_the_loop_and_then_raised() -> None:
    seen: list[Message | Exit | str] = []

    def loop(engine: InProcessEngine) -> None:
        source = "import os, signal; os.kill(os.getpid(), signal.SIGINT); channel.receive()"
        (process,) = engine.start_gang([script(source)])
        seen.append(Exit(process, -signal.SIGINT))
        assert until_exit(engine, [process])[process.id] == [-signal.SIGINT]
        with pytest.raises(EngineError, match="stopped by Ctrl-C"):
            engine.start_gang([script("pass")])
        seen.append("the loop went on")

    with pytest.raises(KeyboardInterrupt):
        run(loop)
    assert seen[1:] == ["the loop went on"]


def test_control_c_while_no_entry_runs_is_seen_by_the_next_start() -> None:
    def loop(engine: InProcessEngine) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        engine.wait(DEADLINE_S)  # woken by the interrupt
        with pytest.raises(EngineError, match="stopped by Ctrl-C"):
            engine.start_gang([script("pass")])

    with pytest.raises(KeyboardInterrupt):
        run(loop)


def test_only_one_rank_can_run_here() -> None:
    engine = InProcessEngine()
    with pytest.raises(EngineError, match="2 workers were to be started in this process"):
        engine.check([script("pass"), script("pass")])
    engine.close()
