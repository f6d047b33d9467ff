"""The driver's own deaths, and scripts as people write them: each is a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, pickle, sys
from pathlib import Path
from holdfast import train

class Box:
    def __init__(self, value):
        self.value = value

def helper(value):
    return Box(value)

def make_loop(offset):
    def loop(config):
        start = 0
        if checkpoint := train.get_checkpoint():
            with checkpoint.as_directory() as folder:
                start = pickle.loads(Path(folder, "box").read_bytes()).value + 1
        print("starts at", start, flush=True)
        for step in range(start, 4):
            with train.checkpoint_dir() as folder:
                Path(folder, "box").write_bytes(pickle.dumps(helper(step)))
                train.report({"step": step + offset}, checkpoint=train.Checkpoint.from_directory(folder))
            if step == 1 and start == 0 and os.environ.get("KILL_DRIVER"):
                os.kill(int(os.environ["KILL_DRIVER"]) if os.environ["KILL_DRIVER"] != "1" else driver, 9)
                import time; time.sleep(60)
    return loop

driver = os.getpid()
trainer = train.DataParallelTrainer(make_loop(100), run_config=train.RunConfig(name="script", storage_path=sys.argv[1]))
print("RESULT", trainer.fit().metrics)
"""


def run(folder: Path, script: str = SCRIPT, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, str(folder / "script.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_script_without_a_main_guard_works_with_closures_and_classes_of_its_own(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "RESULT {'step': 103}" in done.stdout
    assert done.stdout.count("RESULT") == 1
    assert "[rank 0] starts at 0" in done.stdout


def test_the_same_script_goes_on_after_its_driver_was_killed(tmp_path):
    killed = run(tmp_path, KILL_DRIVER="1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[rank 0] starts at 2" in done.stdout
    assert "RESULT {'step': 103}" in done.stdout
    assert not (tmp_path / "script" / ".staging").exists()


SLOW = """
import sys, time
from pathlib import Path
from holdfast import train

def loop():
    with train.checkpoint_dir() as folder:
        Path(folder, "x").write_text("x")
        train.report({"step": 0}, checkpoint=train.Checkpoint.from_directory(folder))
    Path(sys.argv[1], "saved").touch()
    time.sleep(60)

train.DataParallelTrainer(loop, run_config=train.RunConfig(name="slow", storage_path=sys.argv[1])).fit()
"""


@pytest.mark.parametrize("workers", [1, 0])
def test_ctrl_c_ends_the_workers_and_leaves_a_run_that_can_be_gone_on_with(tmp_path, workers):
    script = SLOW.replace("run_config=", f"scaling_config=train.ScalingConfig(num_workers={workers}), run_config=")
    (tmp_path / "script.py").write_text(script)
    driver = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "saved").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    driver.send_signal(signal.SIGINT)
    out, err = driver.communicate(timeout=30)
    assert driver.returncode != 0
    assert "Ctrl-C" in out + err or "KeyboardInterrupt" in err
    assert (tmp_path / "slow" / "checkpoint_000000" / "x").read_text() == "x"
    assert not (tmp_path / "slow" / ".staging").exists()
