"""The run that the killing tests kill: two ranks that report checkpoints as fast as the disk takes them.

It checks itself: every start must be from the newest checkpoint whose `report` had returned, and every byte of it must
be right. What it finds wrong it appends to `violations`, next to its other notes.

    python -m tests.crash.program FOLDER SIZE_BYTES ITERATIONS MAX_FAILURES
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast import train
from holdfast.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

FILES = 2  # for each rank


def note(folder: str, name: str, line: str) -> None:
    """Appends a line with one write: it is there as soon as this returns, whoever dies next."""
    file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)


def notes(folder: str | Path, name: str) -> list[str]:
    path = Path(folder) / name
    return path.read_text().splitlines() if path.exists() else []


def content(iteration: int, rank: int, file: int, size_bytes: int) -> bytes:
    seed = f"{iteration}/{rank}/{file};".encode()
    return (seed * (size_bytes // len(seed) + 1))[:size_bytes]


def check_start(folder: str, size_bytes: int, world_size: int) -> int:
    """Returns the iteration to go on from; notes what is wrong with the checkpoint it is started from."""
    returned = [int(line) for line in notes(folder, "returned")]
    checkpoint = train.get_checkpoint()
    start = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start = int(Path(directory, "iteration").read_text())
            for rank in range(world_size):
                for file in range(FILES):
                    if Path(directory, f"rank{rank}-{file}").read_bytes() != content(start, rank, file, size_bytes):
                        note(folder, "violations", f"{directory}: rank{rank}-{file} has wrong bytes")
    if start < max(returned, default=0):
        note(folder, "violations", f"started from {start}, but report {max(returned)} had returned")
    return start


def loop(config: dict[str, object]) -> None:
    folder, size_bytes = str(config["folder"]), int(str(config["size_bytes"])) // (2 * FILES)
    context = train.get_context()
    rank = context.get_world_rank()
    start = check_start(folder, size_bytes, context.get_world_size()) if rank == 0 else None
    note(folder, "workers", f"{rank} {os.getpid()}")
    checkpoint = train.get_checkpoint()
    if start is None:
        start = 0 if checkpoint is None else int(Path(checkpoint.path, "iteration").read_text())
    for iteration in range(start + 1, int(str(config["iterations"])) + 1):
        with train.checkpoint_dir() as directory:
            for file in range(FILES):
                Path(directory, f"rank{rank}-{file}").write_bytes(content(iteration, rank, file, size_bytes))
            Path(directory, "iteration").write_text(str(iteration))
            train.report({"iteration": iteration}, checkpoint=Checkpoint.from_directory(directory))
        if rank == 0:
            note(folder, "returned", str(iteration))
        if Path(folder, "stop").exists():
            return


def main(folder: str, size_bytes: str, iterations: str, max_failures: str) -> None:
    trainer = train.DataParallelTrainer(
        loop,
        train_loop_config={"folder": folder, "size_bytes": int(size_bytes), "iterations": int(iterations)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name="killed",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=int(max_failures)),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            verbose=0,
        ),
    )
    result = trainer.fit()
    note(folder, "finished", str(result.metrics["iteration"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
