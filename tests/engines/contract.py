"""What every engine must do. A member's test class inherits this one and gives it an `engine` fixture."""

from __future__ import annotations

import json
import os
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.engines.base import Engine, Exit, Message, Process, ProcessSpec
from holdfast.errors import EngineError

DEADLINE_S = 30.0
LARGE_BYTES = 50_000_000


def script(source: str, name: str = "rank 0", **given: Any) -> ProcessSpec:
    """A process that runs these lines."""
    return ProcessSpec("tests.engines.entries:do", textwrap.dedent(source).encode(), name, **given)


def echo(name: str = "rank 0", **given: Any) -> ProcessSpec:
    return ProcessSpec("tests.engines.entries:echo", b"", name, **given)


def until(condition: Callable[[], bool]) -> None:
    """Waits for something outside the engine."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def heard(engine: Engine, process: Process, count: int) -> list[bytes]:
    """The next messages of one process, no exit among them."""
    messages: list[bytes] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(messages) < count:
        assert time.monotonic() < deadline, f"{len(messages)} of {count} messages came in time"
        engine.wait(0.5)
        for event in engine.poll():
            assert isinstance(event, Message), f"after {len(messages)} messages: {event}"
            assert event.process == process
            messages.append(event.data)
    return messages


def until_exit(engine: Engine, processes: Sequence[Process]) -> dict[str, list[bytes | int]]:
    """All that comes until each of these processes has exited: its messages, then its status."""
    came: dict[str, list[bytes | int]] = {process.id: [] for process in processes}
    missing = set(came)
    deadline = time.monotonic() + DEADLINE_S
    while missing:
        assert time.monotonic() < deadline, f"no exit of {missing} in time; there came {came}"
        engine.wait(0.5)
        for event in engine.poll():
            assert event.process.id in missing, f"{event} after its exit"
            if isinstance(event, Exit):
                came[event.process.id].append(event.status)
                missing.remove(event.process.id)
            else:
                came[event.process.id].append(event.data)
    return came


def result(engine: Engine, spec: ProcessSpec) -> list[bytes | int]:
    """All that comes from one process, to its exit."""
    (process,) = engine.start_gang([spec])
    return until_exit(engine, [process])[process.id]


class EngineContract:
    """One process at a time: what also an engine without processes can do."""

    def test_what_a_process_sends_arrives_in_order_and_before_its_exit(self, engine: Engine) -> None:
        sent = result(engine, script("for number in range(20_000): channel.send(b'%d' % number)"))
        assert sent == [*(b"%d" % number for number in range(20_000)), 0]

    def test_messages_go_both_ways_in_order(self, engine: Engine) -> None:
        (process,) = engine.start_gang([echo()])
        messages = [b"%d" % number for number in range(5_000)]
        for message in messages:
            engine.send(process, message)
        assert heard(engine, process, len(messages)) == messages

    def test_empty_messages_arrive(self, engine: Engine) -> None:
        assert result(engine, script("channel.send(b''); channel.send(b'')")) == [b"", b"", 0]

    def test_large_messages_go_both_ways_at_once(self, engine: Engine) -> None:
        source = f"""
        channel.send(b"a" * {LARGE_BYTES})
        received = channel.receive()
        channel.send(b"%d %d" % (len(received), received.count(b"b")))
        """
        (process,) = engine.start_gang([script(source)])
        engine.send(process, b"b" * LARGE_BYTES)
        sizes = [item if isinstance(item, int) else len(item) for item in until_exit(engine, [process])[process.id]]
        assert sizes == [LARGE_BYTES, len(b"%d %d" % (LARGE_BYTES, LARGE_BYTES)), 0]

    def test_a_large_payload_arrives_whole(self, engine: Engine) -> None:
        spec = script("channel.send(b'ran')\n#" + "x" * 10_000_000)
        assert result(engine, spec) == [b"ran", 0]

    def test_threads_of_a_process_send_whole_messages(self, engine: Engine) -> None:
        source = """
        import threading
        def send(number):
            for size in range(0, 200_000, 10_000): channel.send(b"%d" % number * size)
        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        """
        *messages, status = result(engine, script(source))
        assert status == 0
        assert all(isinstance(message, bytes) and len(set(message)) <= 1 for message in messages)
        assert len(messages) == 80

    def test_receive_returns_none_when_nothing_came_in_time(self, engine: Engine) -> None:
        source = "channel.send(repr([channel.receive(0), channel.receive(0.01)]).encode())"
        assert result(engine, script(source)) == [b"[None, None]", 0]

    def test_an_exception_ends_the_process_with_status_1(self, engine: Engine) -> None:
        assert result(engine, script("raise ValueError('meant')")) == [1]

    def test_an_entry_that_cannot_be_found_ends_the_process_with_status_1(self, engine: Engine) -> None:
        assert result(engine, ProcessSpec("tests.engines.nowhere:nothing", b"", "rank 0")) == [1]

    @pytest.mark.parametrize(("end", "status"), [("sys.exit()", 0), ("sys.exit(3)", 3), ("sys.exit('said')", 1)])
    def test_sys_exit_gives_the_status(self, engine: Engine, end: str, status: int) -> None:
        assert result(engine, script(f"import sys; {end}")) == [status]

    def test_a_process_has_the_environment_of_the_driver_and_its_own(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FROM_DRIVER", "früh")
        monkeypatch.setenv("FROM_BOTH", "driver")
        found = whereabouts(engine, env={"FROM_BOTH": "spec", "FROM_SPEC": "spät"})
        chosen = {name: value for name, value in found["env"].items() if name.startswith("FROM_")}
        assert chosen == {"FROM_DRIVER": "früh", "FROM_BOTH": "spec", "FROM_SPEC": "spät"}

    def test_a_process_gets_its_payload(self, engine: Engine) -> None:
        assert whereabouts(engine)["payload"] == "payload"

    def test_wake_ends_a_wait_and_another_thread_may_call_it(self, engine: Engine) -> None:
        engine.wake()
        engine.wait(DEADLINE_S)
        assert engine.poll() == []

    def test_wait_ends_after_its_time(self, engine: Engine) -> None:
        engine.wait(0.01)
        assert engine.poll() == []

    def test_a_message_to_a_process_that_is_gone_is_dropped(self, engine: Engine) -> None:
        (process,) = engine.start_gang([script("pass")])
        until_exit(engine, [process])
        engine.send(process, b"too late")
        assert engine.poll() == []

    def test_a_stopped_process_still_delivers_what_it_had_sent(self, engine: Engine) -> None:
        source = "channel.send(b'early'); channel.send(b'ready'); channel.receive(); channel.receive()"
        (process,) = engine.start_gang([script(source)])
        engine.wait(DEADLINE_S)
        engine.stop([process])
        (first, *_, status) = until_exit(engine, [process])[process.id]
        assert first == b"early"
        assert status != 0

    def test_stopping_what_is_gone_does_nothing(self, engine: Engine) -> None:
        (process,) = engine.start_gang([script("pass")])
        until_exit(engine, [process])
        engine.stop([process], grace_s=1.0)
        assert engine.poll() == []

    def test_a_service_answers(self, engine: Engine) -> None:
        service = engine.start_service(echo("service"))
        engine.send(service, b"anyone?")
        assert heard(engine, service, 1) == [b"anyone?"]

    def test_the_end_of_a_service_is_seen(self, engine: Engine) -> None:
        service = engine.start_service(script("channel.send(b'last'); raise SystemExit(4)"))
        assert until_exit(engine, [service])[service.id] == [b"last", 4]

    def test_a_gang_that_does_not_fit_is_refused(self, engine: Engine) -> None:
        with pytest.raises(EngineError, match="9 workers"):
            engine.start_gang([echo(f"rank {rank}") for rank in range(9)])
        assert engine.poll() == []

    def test_closing_twice_is_closing(self, engine: Engine) -> None:
        engine.start_gang([script("channel.receive()")])
        engine.close()
        engine.close()


def whereabouts(engine: Engine, **given: Any) -> dict[str, Any]:
    """What a process finds around it."""
    found, status = result(engine, ProcessSpec("tests.engines.entries:say_where", b"payload", "rank 0", **given))
    assert status == 0
    assert isinstance(found, bytes)
    return dict(json.loads(found))


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))
