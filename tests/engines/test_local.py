from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from holdfast.engines import parent
from holdfast.engines.base import ChannelClosed, Exit, ProcessSpec
from holdfast.engines.connection import Connection, pair
from holdfast.engines.local import LocalEngine
from holdfast.errors import EngineError
from tests.engines.contract import (
    EngineContract,
    alive,
    descriptors,
    echo,
    heard,
    result,
    script,
    until,
    until_exit,
    whereabouts,
)

GRANDCHILD = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
channel.send(b"%d" % child.pid)
"""


class TestLocalEngine(EngineContract):
    pass


def test_the_ranks_of_a_gang_are_processes_with_a_group_each(engine: LocalEngine) -> None:
    spec = ProcessSpec("tests.engines.entries:say_where", b"", "rank")
    processes = engine.start_gang([spec, spec])
    came = until_exit(engine, processes)
    found = [json.loads(came[process.id][0]) for process in processes]  # type: ignore[arg-type]
    pids = [process.pid for process in processes]
    assert [rank["pid"] for rank in found] == pids
    assert [rank["group"] for rank in found] == pids
    assert os.getpid() not in {rank["parent"] for rank in found}
    assert len({os.getpid(), *pids}) == 3


def test_a_process_is_where_its_driver_is(engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--über", "\udcff"])
    monkeypatch.syspath_prepend(str(tmp_path))
    found = whereabouts(engine)
    assert (found["cwd"], found["argv"], found["path"]) == (str(tmp_path), sys.argv, sys.path)


def test_a_process_has_an_empty_main_module(engine: LocalEngine) -> None:
    assert whereabouts(engine)["main"] == []


def test_a_process_sees_no_standard_input(engine: LocalEngine) -> None:
    assert result(engine, script("import sys; channel.send(sys.stdin.read().encode())")) == [b"", 0]


@pytest.mark.parametrize(("cpus", "threads"), [(1.0, "1"), (3.0, "3"), (0.5, "1"), (2.9, "2")])
def test_omp_threads_follow_the_cpus(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, cpus: float, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert whereabouts(engine, cpus=cpus)["env"]["OMP_NUM_THREADS"] == threads


def test_omp_threads_set_by_the_user_stay(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert whereabouts(engine)["env"]["OMP_NUM_THREADS"] == "7"
    assert whereabouts(engine, env={"OMP_NUM_THREADS": "5"})["env"]["OMP_NUM_THREADS"] == "5"


def test_gpus_are_shared_out_and_hidden_from_ranks_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    monkeypatch.setenv("HOLDFAST_CPUS", "8")
    engine = LocalEngine()
    source = "import os; channel.send(os.environ['CUDA_VISIBLE_DEVICES'].encode())"
    processes = engine.start_gang([script(source, gpus=gpus) for gpus in (0, 0.5, 0.5, 2)])
    came = until_exit(engine, processes)
    assert [came[process.id][0] for process in processes] == [b"", b"4", b"4", b"5,7"]
    engine.close()


def test_output_is_appended_to_its_files_as_it_is_printed(engine: LocalEngine, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("before\n")
    source = (
        "import sys, os; print('line'); os.system('echo child'); print('error', file=sys.stderr); channel.receive()"
    )
    (process,) = engine.start_gang([script(source, stdout=out, stderr=err)])
    until(lambda: out.read_text() == "before\nline\nchild\n" and err.exists() and err.read_text() == "error\n")
    engine.stop([process])


def test_the_traceback_of_an_escaped_exception_is_in_the_file(engine: LocalEngine, tmp_path: Path) -> None:
    assert result(engine, script("raise ValueError('meant')", stderr=tmp_path / "err")) == [1]
    assert "ValueError: meant" in (tmp_path / "err").read_text()


def test_what_atexit_holds_runs_and_threads_are_waited_for(engine: LocalEngine, tmp_path: Path) -> None:
    source = """
    import atexit, threading, time
    from concurrent.futures import ThreadPoolExecutor
    atexit.register(print, "at exit")
    ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.05), print("in a pool")))
    """
    spec = script(source, stdout=tmp_path / "out")
    assert result(engine, spec) == [0]
    assert (tmp_path / "out").read_text() == "in a pool\nat exit\n"


def test_random_numbers_differ_between_ranks(engine: LocalEngine) -> None:
    source = "import random, numpy; channel.send(b'%f %f' % (random.random(), numpy.random.random()))"
    LocalEngine.prepare(["numpy"])
    processes = engine.start_gang([script(source)] * 3)
    numbers = [number for items in until_exit(engine, processes).values() for number in bytes(items[0]).split()]
    assert len(set(numbers)) == 6


def test_a_rank_has_no_descriptor_of_others(engine: LocalEngine) -> None:
    others = engine.start_gang([echo()] * 3)
    source = """
    import os
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
    names = [os.readlink(link) for link in links if os.path.lexists(link)]
    channel.send(b"%d" % sum(name.startswith(("socket", "anon_inode", "pipe")) for name in names))
    """
    (process,) = engine.start_gang([script(source)])
    assert until_exit(engine, [process])[process.id] == [b"1", 0]
    engine.stop(others)


def test_the_kill_of_a_rank_is_seen(engine: LocalEngine) -> None:
    first, second = engine.start_gang([echo("rank 0"), echo("rank 1")])
    os.kill(second.pid, signal.SIGKILL)
    assert until_exit(engine, [second])[second.id] == [-signal.SIGKILL]
    engine.send(first, b"alive?")
    assert heard(engine, first, 1) == [b"alive?"]


def test_a_rank_that_dies_in_the_middle_of_a_message_delivers_the_ones_before(engine: LocalEngine) -> None:
    source = """
    import os, signal, threading
    channel.send(b"whole")
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    channel.send(b"x" * 100_000_000)
    """
    (process,) = engine.start_gang([script(source)])
    until(lambda: not alive(process.pid))
    assert until_exit(engine, [process])[process.id] == [b"whole", -signal.SIGKILL]


def test_the_children_of_a_rank_die_with_it(engine: LocalEngine) -> None:
    (process,) = engine.start_gang([script(GRANDCHILD + "os.kill(os.getpid(), 9)")])
    child, status = until_exit(engine, [process])[process.id]
    assert status == -signal.SIGKILL
    until(lambda: not alive(int(child)))


def test_stop_returns_when_children_that_ignore_sigterm_are_gone(engine: LocalEngine) -> None:
    source = GRANDCHILD.replace("import time;", "import signal, time; signal.signal(15, signal.SIG_IGN);")
    (process,) = engine.start_gang([script(source + "channel.receive()")])
    (child,) = heard(engine, process, 1)
    engine.stop([process], grace_s=5.0)
    assert not alive(process.pid)
    assert not alive(int(child))
    assert engine.poll() == [Exit(process, -signal.SIGTERM)]


def test_a_rank_may_use_its_grace(engine: LocalEngine) -> None:
    source = """
    import signal, sys
    def last(number, frame):
        channel.send(b"last words")
        sys.exit(5)
    signal.signal(signal.SIGTERM, last)
    channel.send(b"ready")
    channel.receive()
    """
    (process,) = engine.start_gang([script(source)])
    assert heard(engine, process, 1) == [b"ready"]
    engine.stop([process], grace_s=20.0)
    assert until_exit(engine, [process])[process.id] == [b"last words", 5]


@pytest.mark.parametrize("size_bytes", [200, 1_000_000])
def test_a_signal_handler_may_send_in_the_middle_of_a_send(engine: LocalEngine, size_bytes: int) -> None:
    source = f"""
    import signal
    ticks = []
    def tick(number, frame):
        ticks.append(number)
        channel.send(b"tick")
    signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    while len(ticks) < 100: channel.send(b"x" * {size_bytes})
    signal.setitimer(signal.ITIMER_REAL, 0)
    """
    (process,) = engine.start_gang([script(source)])
    *messages, status = until_exit(engine, [process])[process.id]
    assert status == 0
    assert messages.count(b"tick") >= 100
    assert set(messages) == {b"tick", b"x" * size_bytes}


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace(engine: LocalEngine) -> None:
    source = "import signal; signal.signal(15, signal.SIG_IGN); channel.send(b'ready'); channel.receive()"
    (process,) = engine.start_gang([script(source)])
    heard(engine, process, 1)
    engine.stop([process], grace_s=0.05)
    assert engine.poll() == [Exit(process, -signal.SIGKILL)]


def test_the_death_of_the_parent_ends_its_ranks_and_the_next_gang_gets_a_new_one(engine: LocalEngine) -> None:
    processes = engine.start_gang([script(GRANDCHILD + "channel.receive()"), echo()])
    (child,) = heard(engine, processes[0], 1)
    found = int(Path(f"/proc/{processes[0].pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(found, signal.SIGKILL)
    assert until_exit(engine, processes) == {process.id: [-signal.SIGKILL] for process in processes}
    assert not any(alive(process.pid) for process in processes)
    until(lambda: not alive(int(child)))
    assert result(engine, script("channel.send(b'again')")) == [b"again", 0]


def test_a_notice_to_every_process_leaves_the_ranks_to_the_driver(engine: LocalEngine) -> None:
    (process,) = engine.start_gang([echo()])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(whereabouts(engine)["parent"], number)
    engine.send(process, b"alive?")
    assert heard(engine, process, 1) == [b"alive?"]


def test_a_rank_has_the_signal_handlers_of_a_fresh_interpreter(engine: LocalEngine) -> None:
    source = """
    import signal
    numbers = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
    found = [(int(number), str(signal.getsignal(number)).split(" at ")[0]) for number in numbers]
    """
    told = result(engine, script(source + "channel.send(repr(found).encode())"))
    fresh = [sys.executable, "-c", textwrap.dedent(source) + "print(end=repr(found))"]
    assert told == [subprocess.run(fresh, stdout=subprocess.PIPE, check=True, timeout=60).stdout, 0]


def test_a_parent_that_died_while_nothing_ran_is_replaced(engine: LocalEngine) -> None:
    found = whereabouts(engine)["parent"]
    os.kill(found, signal.SIGKILL)
    until(lambda: not alive(found))
    assert whereabouts(engine)["parent"] != found


def test_engines_of_one_driver_share_the_parent_and_not_their_ranks(engine: LocalEngine) -> None:
    other = LocalEngine()
    (kept,) = engine.start_gang([echo()])
    (ended,) = other.start_gang([echo()])
    assert whereabouts(engine)["parent"] == whereabouts(other)["parent"]
    other.close()
    assert not alive(ended.pid)
    engine.send(kept, b"alive?")
    assert heard(engine, kept, 1) == [b"alive?"]


DRIVER = """
import os, subprocess, sys, time
from holdfast.engines.base import ProcessSpec
from holdfast.engines.local import LocalEngine
engine = LocalEngine()
child = b'''
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
channel.send(b"%d" % child.pid)
while channel.receive(): pass
'''
outlive = b'''
import os
from holdfast.engines.base import ChannelClosed
try:
    channel.receive()
except ChannelClosed:
    print("the driver is gone", flush=True)
    os.system("while ! test -e %s; do sleep 0.05; done")
    print("and this was the end", flush=True)
''' % sys.argv[1].encode()
ranks = engine.start_gang([ProcessSpec("tests.engines.entries:do", child, "rank", cpus=0.1)] * 2)
service = engine.start_service(ProcessSpec("tests.engines.entries:do", outlive, "service", stdout=sys.argv[2]))
pids = [rank.pid for rank in ranks]
while len(pids) < 4:
    engine.wait(1)
    pids += [int(message.data) for message in engine.poll()]
holder = os.fork()  # it keeps every connection of the driver open
if holder == 0:
    time.sleep(600)
print(service.pid, holder, *pids, flush=True)
time.sleep(600)
"""


def test_when_the_driver_is_killed_its_ranks_and_their_children_end_and_its_service_lives_on(tmp_path: Path) -> None:
    end, output = tmp_path / "end", tmp_path / "output"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, end, output], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver, driver.stdout:
        service, holder, *pids = map(int, driver.stdout.readline().split())
        assert all(map(alive, pids))
        driver.kill()
        until(lambda: not any(map(alive, pids)))
        assert alive(service)
        os.kill(holder, signal.SIGKILL)
        until(lambda: output.exists() and output.read_text() == "the driver is gone\n")
        end.touch()
        until(lambda: not alive(service))
    assert output.read_text() == "the driver is gone\nand this was the end\n"


def test_a_driver_that_ends_leaves_nothing(tmp_path: Path) -> None:
    source = """
    from holdfast.engines.base import ProcessSpec
    from holdfast.engines.local import LocalEngine
    (rank,) = LocalEngine().start_gang([ProcessSpec("tests.engines.entries:echo", b"", "rank")])
    print(rank.pid)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60, check=True
    )
    until(lambda: not alive(int(done.stdout)))
    assert done.stderr == ""


def test_the_kill_of_a_service_is_seen(engine: LocalEngine) -> None:
    service = engine.start_service(echo("service"))
    os.kill(service.pid, signal.SIGKILL)
    assert until_exit(engine, [service])[service.id] == [-signal.SIGKILL]


def test_a_service_is_in_a_session_of_its_own_and_writes_to_its_file(engine: LocalEngine, tmp_path: Path) -> None:
    source = "import os; print(os.getsid(0) == os.getpid())"
    service = engine.start_service(script(source, "service", stdout=tmp_path / "out"))
    assert until_exit(engine, [service])[service.id] == [0]
    assert (tmp_path / "out").read_text() == "True\n"


def test_a_service_ends_when_its_engine_is_closed(engine: LocalEngine) -> None:
    other = LocalEngine()
    service = other.start_service(echo("service"))
    other.send(service, b"up?")
    assert heard(other, service, 1) == [b"up?"]
    other.close()
    until(lambda: not alive(service.pid))


def test_too_many_cpus_are_refused_with_the_numbers_and_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CPUS", "2")
    engine = LocalEngine()
    message = (
        r"4 workers of 1 CPU need 4 CPUs, this machine has 2: lower num_workers or set "
        r"resources_per_worker=\{'CPU': 0.5\}"
    )
    with pytest.raises(EngineError, match=message):
        engine.check([echo()] * 4)
    engine.check([echo(cpus=0.5)] * 4)
    engine.close()


def test_what_others_have_is_not_given_twice_and_comes_back(engine: LocalEngine) -> None:
    first = engine.start_gang([echo()] * 6)
    with pytest.raises(EngineError, match=r"3 workers of 1 CPU need 3 CPUs, of its 8 this machine has left 2"):
        engine.start_gang([echo()] * 3)
    engine.stop(first)
    until_exit(engine, first)
    assert result(engine, script("pass", cpus=8)) == [0]


def test_too_many_gpus_are_refused(engine: LocalEngine) -> None:
    with pytest.raises(EngineError, match=r"2 workers of 1 GPU cannot be placed: this machine has 0"):
        engine.check([echo(gpus=1)] * 2)


def test_fifty_gangs_leave_no_process_and_no_descriptor(engine: LocalEngine) -> None:
    found = whereabouts(engine)["parent"]
    before = descriptors()
    parent_before = len(os.listdir(f"/proc/{found}/fd"))
    for _ in range(50):
        processes = engine.start_gang([echo(), script("pass")])
        until_exit(engine, processes[1:])
        engine.stop(processes)
        engine.poll()
    assert descriptors() == before
    assert len(os.listdir(f"/proc/{found}/fd")) == parent_before
    assert Path(f"/proc/{found}/task/{found}/children").read_text() == ""


def test_what_is_prepared_is_there_in_a_rank(engine: LocalEngine) -> None:
    LocalEngine.prepare(["json", "numpy", "os"])
    assert "numpy" in parent.HEAVY
    source = "import sys; channel.send(repr('numpy' in sys.modules).encode())"
    assert result(engine, script(source)) == [b"True", 0]


def test_a_channel_whose_driver_is_gone_says_so_after_its_last_message() -> None:
    mine, its_end = pair()
    channel = Connection(its_end)
    mine.sendall(b"\x02\0\0\0hi" + b"\x05\0\0\0cut")
    mine.shutdown(socket.SHUT_RDWR)
    assert channel.receive() == b"hi"
    with pytest.raises(ChannelClosed):
        channel.receive()
    with pytest.raises(ChannelClosed):
        channel.send(b"anyone?")
    mine.close()
    its_end.close()
