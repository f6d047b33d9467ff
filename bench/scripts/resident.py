"""Two workers that have reported, and stay until they are told to go: what does it all weigh?"""

import os
import tempfile
import time

import numpy as np
import torch

from bench.marks import CONFIG, mark
from holdfast import train
from holdfast.train import Checkpoint, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer


def train_func(config):
    rank = train.get_context().get_world_rank()
    for step in range(3):
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if rank == 0:
                torch.save(torch.tensor(np.zeros(256)), os.path.join(directory, "state.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            train.report({"step": step}, checkpoint=checkpoint)
    mark("resident", rank=rank)
    deadline = time.monotonic() + 120
    while not os.path.exists(config["go"]) and time.monotonic() < deadline:
        time.sleep(0.05)


trainer = TorchTrainer(
    train_func,
    train_loop_config={"go": os.path.join(CONFIG["directory"], "go")},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="resident", storage_path=CONFIG["directory"]),
)
mark("fitting")
trainer.fit()
