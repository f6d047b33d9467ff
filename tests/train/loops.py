"""Training functions for tests. They write numbers into small files, and go on from what they find."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from holdfast import train
from holdfast.train import Checkpoint


def rank() -> int:
    return train.get_context().get_world_rank()


def first_step() -> int:
    checkpoint = train.get_checkpoint()
    return 0 if checkpoint is None else int(Path(checkpoint.path, "step").read_text()) + 1


def save(step: int, metrics: dict[str, Any] | None = None, **options: Any) -> None:
    """Reports a checkpoint that holds `step`, and a file of this rank."""
    with train.checkpoint_dir() as folder:
        Path(folder, "step").write_text(str(step))
        Path(folder, f"rank{rank()}").write_text(f"rank {rank()} at step {step}")
        train.report(metrics or {"step": step}, checkpoint=Checkpoint.from_directory(folder), **options)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.002)


def count(config: dict[str, Any]) -> str:
    """Rank 0 saves every step, the others only report; `starts` tells from where each attempt began."""
    start = first_step()
    if rank() == 0:
        with open(Path(config["notes"], "starts"), "a") as notes:
            notes.write(f"{start}\n")
    for step in range(start, config["steps"]):
        if rank() == 0:
            save(step)
        else:
            train.report({"step": step})
        failed = Path(config["notes"], "failed")
        if step == config.get("fail_at") and rank() == config.get("failing_rank", 0) and not failed.exists():
            failed.touch()
            if config.get("how") == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"rank {rank()} fails at step {step}")
    return f"did {config['steps']} steps"


def every_rank_saves(config: dict[str, Any]) -> None:
    for step in range(first_step(), config["steps"]):
        save(step)


def killed_right_after_report(config: dict[str, Any]) -> None:
    """Rank 0 dies in the instruction after its `report` returned; rank 1 has nothing to give."""
    start = first_step()
    if rank() == 0:
        Path(config["notes"], f"start{start}").touch()
        save(start)
        if start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        train.report({})
        if start == 0:
            time.sleep(60)


def killed_before_report(config: dict[str, Any]) -> None:
    """Rank 1 dies while rank 0 waits for it in its second report."""
    start = first_step()
    notes = Path(config["notes"])
    (notes / f"rank{rank()}-start{start}").touch()
    save(start) if rank() == 0 else train.report({})
    if rank() == 0:
        (notes / "in-second").touch()
        save(start + 1)
        (notes / f"second-returned-from-{start}").touch()
    elif start == 0:
        await_file(notes / "in-second")
        time.sleep(0.05)  # rank 0 is most likely in `report` by now; the test holds either way
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        train.report({})


def conflicting(config: dict[str, Any]) -> None:
    with train.checkpoint_dir() as folder:
        Path(folder, "same").write_text("same on all ranks")
        Path(folder, "different").write_text(f"of rank {rank()}")
        Path(folder, f"own{rank()}").write_text("mine")
        train.report({}, checkpoint=Checkpoint.from_directory(folder))


def context_of(config: dict[str, Any]) -> None:
    context = train.get_context()
    train.report(
        {
            "name": context.get_experiment_name(),
            "world_size": context.get_world_size(),
            "rank": context.get_world_rank(),
            "local_rank": context.get_local_rank(),
            "local_world_size": context.get_local_world_size(),
            "node_rank": context.get_node_rank(),
            "trial_dir": context.get_trial_dir(),
            "storage_path": context.get_storage().storage_path,
            "extra": os.environ.get("EXTRA"),
        }
    )


def reports(config: dict[str, Any]) -> None:
    for metrics in config["metrics"]:
        train.report(metrics)


def saves_with_metrics(config: dict[str, Any]) -> None:
    for step, metrics in enumerate(config["metrics"]):
        save(step, metrics)


def sync_report(config: dict[str, Any]) -> None:
    save(0, sync=True)
    newest = train.get_checkpoint()
    assert newest is not None
    found = sorted(os.listdir(newest.path))
    train.report({"files": found})


def leaves_a_directory(config: dict[str, Any]) -> None:
    with train.checkpoint_dir() as folder:
        Path(folder, "never reported").write_text("x")
    save(0)


def from_temporary(config: dict[str, Any]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "step").write_text("0")
        train.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder))
        assert Path(folder, "step").read_text() == "0", "the caller keeps its files"


def empty_checkpoint(config: dict[str, Any]) -> None:
    with train.checkpoint_dir() as folder:
        train.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(folder))


def missing_directory(config: dict[str, Any]) -> None:
    train.report({}, checkpoint=Checkpoint.from_directory("/nowhere/at/all"))


def still_writing(config: dict[str, Any]) -> None:
    """Goes on writing to a file that it has given away: a mistake that must be named."""
    with train.checkpoint_dir() as folder:
        file = open(Path(folder, "log"), "w")  # noqa: SIM115
        file.write("x" * 100)
        file.flush()
        train.report({}, checkpoint=Checkpoint.from_directory(folder))
        file.write("y" * 100)
        file.close()
    for _ in range(200):
        time.sleep(0.01)
        save(1)


def returns_an_object(config: dict[str, Any]) -> object:
    return object()
