"""Starts `digits.py`, kills it twice, starts it again, and looks at what is left.

    python -m demo

The exit status is not 0 if anything that was promised did not hold.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.digits import CONFIG, NAME
from holdfast.checkpoint.store import CheckpointStore, checkpoint_name
from holdfast.storage.local import LocalStorage

ROOT = Path(__file__).parent.parent
KILL_WORKER_SAVING = 2  # the epoch in whose save a worker is killed
KILL_DRIVER_AFTER = 4  # the epoch after whose report the driver is killed
DEADLINE_S = 120
Notice = dict[str, Any]


@dataclass
class Attempt:
    """One life of the two workers, as the summary tells of it."""

    start: int
    epoch: int
    checkpoint: str | None
    newest_reported: int
    pid: int = 0
    reported: list[int] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    end: str = "finished"


class Show:
    """The script, what it tells, and what is done to it."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.notices = results / ".notices"
        self.notices.mkdir(parents=True)
        self.log = results / "output.txt"
        self.attempts: list[Attempt] = []
        self.reported: dict[int, float] = {}
        self.pids: set[int] = set()
        self.starts = 0
        self.half_saved = False
        self.finished: Notice = {}
        self.driver: subprocess.Popen[bytes] | None = None
        self._seen: set[str] = set()
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"  {time.monotonic() - self._began:5.1f} s   {text}", flush=True)

    @contextmanager
    def driving(self) -> Iterator[subprocess.Popen[bytes]]:
        """Starts the script; ends it, whatever happens here."""
        self.starts += 1
        self.say(f"start {self.starts}: python demo/digits.py")
        env = {**os.environ, "HOLDFAST_DEMO": str(self.notices)}
        command = [sys.executable, str(ROOT / "demo" / "digits.py"), str(self.results)]
        with self.log.open("ab") as log:
            self.driver = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield self.driver
        finally:
            self.driver.kill()
            self.driver.wait()

    def wait_for(self, event: str, **facts: object) -> Notice:
        """Returns the first new notice of this kind; takes in, and tells of, all before it."""
        while True:
            for notice in self._arrived():
                self._take(notice)
                if {"event": event, **facts}.items() <= notice.items():
                    return notice
            if self.driver is not None and self.driver.poll() is not None and not self._unread():
                raise AssertionError(f"the script ended ({self.driver.returncode}) before it was {event} {facts or ''}")
            if time.monotonic() - self._began > DEADLINE_S:
                raise AssertionError(f"the script was not {event} {facts or ''} within {DEADLINE_S} s")
            time.sleep(0.002)

    def gone_within(self, limit_s: float) -> bool:
        """Whether all workers are gone, or are so before `limit_s` has passed."""
        deadline = time.monotonic() + limit_s
        while any(map(alive, self.pids)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _unread(self) -> list[Path]:
        return sorted(path for path in self.notices.glob("*.json") if path.name not in self._seen)

    def _arrived(self) -> Iterator[Notice]:
        for path in self._unread():
            self._seen.add(path.name)
            yield json.loads(path.read_text())

    def _take(self, notice: Notice) -> None:
        take: dict[str, Callable[[Notice], None]] = {"started": self._started, "reported": self._reported}
        take.get(notice["event"], lambda _: None)(notice)

    def _started(self, notice: Notice) -> None:
        self.pids.add(notice["pid"])
        if notice["rank"] != 0:
            return
        newest = max(self.reported, default=-1)
        self.attempts.append(Attempt(self.starts, notice["epoch"], notice["checkpoint"], newest, notice["pid"]))
        origin = f"go on from {notice['checkpoint']}" if notice["checkpoint"] else "begin"
        self.say(f"two workers {origin}, at epoch {notice['epoch']}")

    def _reported(self, notice: Notice) -> None:
        epoch, accuracy = notice["epoch"], notice["accuracy"]
        self.reported[epoch] = accuracy
        self.attempts[-1].reported.append(epoch)
        self.attempts[-1].accuracies.append(accuracy)
        self.say(f"epoch {epoch}   accuracy {accuracy:.3f}")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_worker_while_it_saves(show: Show) -> None:
    epoch = KILL_WORKER_SAVING
    hold = show.notices / f"hold-saving-{epoch}"
    hold.touch()
    saving = show.wait_for("saving", epoch=epoch)
    written = {path.parent for path in (show.results / NAME / ".staging").rglob("model.pt")}
    show.half_saved = any(not (folder / "training.pt").exists() for folder in written)
    os.kill(saving["pid"], signal.SIGKILL)
    hold.unlink()
    show.attempts[-1].end = f"a worker killed while it saved epoch {epoch}"
    show.say(f"SIGKILL to worker 0 (pid {saving['pid']}): of epoch {epoch}, model.pt is written, training.pt is not")
    show.wait_for("started", rank=0)


def kill_driver(show: Show, driver: subprocess.Popen[bytes]) -> None:
    show.wait_for("reported", epoch=KILL_DRIVER_AFTER)
    driver.kill()
    driver.wait()
    show.attempts[-1].end = f"the driver killed after epoch {KILL_DRIVER_AFTER} was reported"
    show.say(f"SIGKILL to the driver (pid {driver.pid}), just after epoch {KILL_DRIVER_AFTER} was reported")


def play(show: Show) -> None:
    with show.driving() as driver:
        kill_worker_while_it_saves(show)
        kill_driver(show, driver)
    with show.driving() as driver:
        show.finished = show.wait_for("finished")
        driver.wait(30)
        assert driver.returncode == 0, f"the script ended with status {driver.returncode}"


@dataclass(frozen=True)
class Kept:
    """A checkpoint that is there at the end."""

    name: str
    epoch: int
    accuracy: float
    size_bytes: int
    damage: list[str]


def kept(store: CheckpointStore) -> Iterator[Kept]:
    for number in store.list():
        manifest = store.manifest(number)
        epoch, accuracy = manifest.metrics["epoch"], manifest.metrics["accuracy"]
        yield Kept(checkpoint_name(number), epoch, accuracy, manifest.size_bytes, store.verify(number))


def promises(show: Show, checkpoints: list[Kept]) -> list[tuple[bool, str]]:
    """What must be so now, and whether it is."""
    resumed = show.attempts[1:]
    last = int(CONFIG["epochs"]) - 1
    whole = bool(checkpoints) and not any(checkpoint.damage for checkpoint in checkpoints)
    return [
        (show.half_saved, "the worker was killed with half of its checkpoint written"),
        (len(resumed) == 2, "each of the two deaths cost one attempt"),
        (
            all(attempt.epoch > attempt.newest_reported for attempt in resumed),
            "each attempt went on from the newest checkpoint whose report had returned",
        ),
        (show.reported.keys() == set(range(last + 1)), f"every epoch from 0 to {last} was reported"),
        (last in [checkpoint.epoch for checkpoint in checkpoints], "the checkpoint of the last epoch is there"),
        (whole, "each checkpoint verifies: every byte read, every hash compared"),
        (show.finished["accuracy"] >= 0.9, "the accuracy is at least 0.9"),
        (not (show.results / NAME / ".staging").exists(), "no half-written file is left over"),
        (show.gone_within(5), "no worker is left over"),
    ]


def summary(show: Show, checkpoints: list[Kept], held: list[tuple[bool, str]]) -> str:
    best = show.results / NAME / show.finished["best"]
    good = all(ok for ok, _ in held)
    sections = {
        "What happened": _attempts(show.attempts),
        "Accuracy": _accuracies(show),
        f"Checkpoints in {show.results / NAME}": [_checkpoint(checkpoint, best.name) for checkpoint in checkpoints],
        "Promised and held" if good else "Promised, and NOT all of it held": [
            f"{'yes' if ok else 'NO '}   {sentence}" for ok, sentence in held
        ],
        "Lost": [_lost(show.attempts[1:]) if good else "see above"],
        "Look at it": [
            f"ls -A {best}",
            f"{sys.executable} -c \"import torch; print(torch.load('{best}/model.pt').keys())\"",
            f"less {show.log}",
        ],
    }
    return "\n".join(f"\n{title}\n\n" + "\n".join(f"  {line}" for line in lines) for title, lines in sections.items())


def _attempts(attempts: list[Attempt]) -> Iterator[str]:
    for number, attempt in enumerate(attempts, 1):
        origin = f"from {attempt.checkpoint}" if attempt.checkpoint else "from nothing"
        done = f"epochs {attempt.reported[0]} to {attempt.reported[-1]}" if attempt.reported else "no epoch"
        yield f"attempt {number}   start {attempt.start}   {origin:<22}   {done:<13}   {attempt.end}"


def _accuracies(show: Show) -> Iterator[str]:
    for earlier, later, death in zip(show.attempts, show.attempts[1:], ("the worker's", "the driver's"), strict=False):
        if earlier.accuracies and later.accuracies:
            yield f"{earlier.accuracies[-1]:.3f} before {death} death, {later.accuracies[0]:.3f} an epoch after it"
    yield f"{show.finished['accuracy']:.3f} at the end; always on images the net has not learned from"


def _checkpoint(checkpoint: Kept, best: str) -> str:
    state = "DAMAGED: " + "; ".join(checkpoint.damage) if checkpoint.damage else "verified"
    size = f"{checkpoint.size_bytes / 1000:.0f} KB"
    mark = "   the best" if checkpoint.name == best else ""
    return f"{checkpoint.name}   epoch {checkpoint.epoch}   accuracy {checkpoint.accuracy:.3f}   {size}   {state}{mark}"


def _lost(resumed: list[Attempt]) -> str:
    begun = " and ".join(str(attempt.epoch) for attempt in resumed)
    return f"nothing that was committed; epochs {begun} were under way at a kill and were done again"


def main() -> int:
    results = ROOT / "build" / "demo" / time.strftime("%Y-%m-%d_%H-%M-%S")
    print("Handwritten digits, two workers, a checkpoint every epoch. Two kills on the way.\n", flush=True)
    show = Show(results)
    try:
        play(show)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        print(f"\nThe demo failed: {error}\n\nThe last the script printed ({show.log}):\n", flush=True)
        print("\n".join(show.log.read_text(errors="replace").splitlines()[-40:]))
        return 1
    checkpoints = list(kept(CheckpointStore(LocalStorage(results / NAME))))
    held = promises(show, checkpoints)
    print(summary(show, checkpoints, held))
    return 0 if all(ok for ok, _ in held) else 1


if __name__ == "__main__":
    sys.exit(main())
