"""One of two workers is killed by SIGKILL again and again; each time the function goes on from its checkpoint."""

import os
import random
import signal
import time
from pathlib import Path

import torch

from bench import limits
from bench.marks import CONFIG, mark
from holdfast import train
from holdfast.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer


def train_func(config):
    rank = train.get_context().get_world_rank()
    kills_before = len(Path(config["killed"]).read_text())
    mark("entered", rank=rank)
    checkpoint = train.get_checkpoint()
    state = load(checkpoint, rank) if checkpoint else save(config, rank)
    state["weights"][:1024].sum()
    mark("stepped", rank=rank, resumed=checkpoint is not None)
    if checkpoint and rank == 0:
        with checkpoint.as_directory() as directory:
            mark("read", seconds=limits.read_s(Path(directory) / "state.pt"))
    time.sleep(config["settle_s"] + random.random() * config["settle_s"])
    if kills_before < config["kills"]:
        die_or_wait(config, rank)
    train.report({"done": True})


def load(checkpoint, rank):
    start = time.monotonic()
    with checkpoint.as_directory() as directory:
        state = torch.load(os.path.join(directory, "state.pt"))
    mark("loaded", rank=rank, seconds=time.monotonic() - start)
    return state


def save(config, rank):
    state = {"weights": torch.zeros(config["size_bytes"] // 4), "step": 0}
    checkpoint = None
    directory = Path(config["directory"]) / f"rank-{rank}"
    directory.mkdir(exist_ok=True)
    if rank == 0:
        torch.save(state, directory / "state.pt")
        checkpoint = Checkpoint.from_directory(str(directory))
    train.report({"step": 0}, checkpoint=checkpoint)
    # A second report returns only when the first is known to the driver, in systems where a report is fetched.
    train.report({"step": 1})
    saved = Path(config["directory"]) / "saved"
    if rank == 0:
        saved.touch()
    while not saved.exists():
        time.sleep(0.01)
    return state


def die_or_wait(config, rank):
    if rank == 0:
        time.sleep(120)
    with open(config["killed"], "a") as killed:
        killed.write("x")
    mark("killed")
    os.kill(os.getpid(), signal.SIGKILL)


Path(CONFIG["directory"], "killed").touch()
trainer = TorchTrainer(
    train_func,
    train_loop_config={**CONFIG, "killed": os.path.join(CONFIG["directory"], "killed")},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="kills", storage_path=CONFIG["directory"], failure_config=FailureConfig(max_failures=CONFIG["kills"] + 2)
    ),
)
trainer.fit()
