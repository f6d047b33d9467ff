"""A run on a disk that is too small, and gets space back; and one whose system calls fail now and then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.crash.killing import ROOT, what_is_wrong

RUN = """
import sys, tempfile
from pathlib import Path
from holdfast import train

folder, size = sys.argv[1], int(sys.argv[2])

def loop(config):
    checkpoint = train.get_checkpoint()
    first = 1 if checkpoint is None else 1 + int(Path(checkpoint.path, "n").read_text())
    for step in range(first, 9):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "n").write_text(str(step))
            Path(directory, "data").write_bytes(bytes(size))
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(directory))

config = train.RunConfig(name="killed", storage_path=folder, checkpoint_config=train.CheckpointConfig(num_to_keep=2),
                         failure_config=train.FailureConfig(max_failures=100))
print(train.DataParallelTrainer(loop, run_config=config).fit().metrics)
"""


def full_disk(folder: Path) -> str:
    """A tmpfs of 24 MB that something else fills; the run waits, and goes on when there is space again."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "holdfast", str(disk)], check=True)
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(21 << 20))
        run = _start(folder, disk, 2 << 20)
        _await(lambda: "waiting for space" in _said(folder) or run.poll() is not None, run)
        time.sleep(1)  # it is to be found waiting, not failed
        if run.poll() is not None:
            return f"the run did not wait: {_said(folder)}"
        ballast.unlink()
        run.wait(60)
        return "; ".join(what_is_wrong(disk / "killed")) if run.returncode == 0 else _said(folder)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def failing_calls(folder: Path) -> str:
    """Every 7th fsync, fdatasync and rename of a run's processes fails with EIO; nothing reported is lost."""
    for call in ("fsync", "fdatasync", "rename,renameat2"):
        inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={call}:error=EIO:when=9+7"]
        for prefix in (inject, []):  # a second start, with a disk that is well again, finishes the work
            run = _start(folder / call, folder / call, 1 << 16, prefix)
            run.wait(120)
        wrong = what_is_wrong(folder / call / "killed") if run.returncode == 0 else [_said(folder / call)]
        if wrong:
            return f"{call}: {'; '.join(wrong)}"
    return ""


def _said(folder: Path) -> str:
    return (folder / "output").read_text()[-2000:]


def _start(folder: Path, disk: Path, size_bytes: int, prefix: list[str] | None = None) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "output", "ab") as output:
        return subprocess.Popen(
            [*(prefix or []), sys.executable, "-c", RUN, str(disk), str(size_bytes)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )


def _await(condition: object, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            run.kill()
            raise TimeoutError("waited 60 s for a full disk")
        time.sleep(0.05)
