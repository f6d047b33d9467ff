"""One linear layer under DDP on random numbers, a checkpoint in every epoch: the smallest useful script."""

import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.optim import Adam

import holdfast.train.torch
from bench.marks import CONFIG, mark
from holdfast import train
from holdfast.train import Checkpoint, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer


def train_func(config):
    mark("first line", fit=config["fit"])
    features = torch.Tensor(np.random.normal(0, 1, size=(100, 4)))
    targets = torch.Tensor(np.random.uniform(0, 1, size=(100, 1)))
    model = holdfast.train.torch.prepare_model(nn.Linear(4, 1))
    criterion = nn.MSELoss()
    optimizer = Adam(model.parameters(), lr=3e-4)
    for _ in range(config["num_epochs"]):
        loss = criterion(model(features), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            train.report({"loss": loss.item()}, checkpoint=checkpoint)


for fit in range(CONFIG["fits"]):
    mark("constructing", fit=fit)
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"num_epochs": 5, "fit": fit},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=f"toy-{fit}", storage_path=CONFIG["directory"]),
    )
    mark("fitting", fit=fit)
    result = trainer.fit()
    mark("fitted", fit=fit, loss=result.metrics["loss"])
