"""A training script that can be killed: handwritten digits, a small convolutional net, two workers with DDP.

    python demo/digits.py

Run it again, after whatever happened to it, and it goes on from its newest good checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import train
from holdfast.train.torch import TorchTrainer, prepare_data_loader, prepare_model

NAME = "digits"
CONFIG = {"epochs": 8, "batch_size": 32, "learning_rate": 2e-3}


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images of 8 by 8 pixels: four of five to learn from, the others to be asked about."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    asked = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~asked], labels[~asked]), TensorDataset(images[asked], labels[asked])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(net: nn.Module, asked: TensorDataset) -> float:
    images, labels = asked.tensors
    return (net(images).argmax(1) == labels).float().mean().item()


def learn(config: dict[str, float]) -> None:
    rank = train.get_context().get_world_rank()
    torch.manual_seed(0)
    known, asked = digits()
    loader = prepare_data_loader(DataLoader(known, batch_size=int(config["batch_size"]), shuffle=True))
    net = network()
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])

    first_epoch, checkpoint = 0, train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            net.load_state_dict(torch.load(f"{folder}/model.pt"))
            state = torch.load(f"{folder}/training.pt")
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    tell("started", rank=rank, epoch=first_epoch, checkpoint=checkpoint and Path(checkpoint.path).name)

    for epoch in range(first_epoch, int(config["epochs"])):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"epoch": epoch, "loss": loss.item(), "accuracy": accuracy(net, asked)}
        if rank != 0:
            train.report(metrics)
            continue
        with train.checkpoint_dir() as folder:
            torch.save(net.state_dict(), f"{folder}/model.pt")
            tell("saving", rank=rank, epoch=epoch)
            torch.save({"epoch": epoch, "optimizer": optimizer.state_dict()}, f"{folder}/training.pt")
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(folder))
        tell("reported", rank=rank, **metrics)


def tell(event: str, **facts: object) -> None:
    """Tells the demo what happens here, and stands still where it asks for that. Without a demo, does nothing."""
    if "HOLDFAST_DEMO" not in os.environ:
        return
    notices = Path(os.environ["HOLDFAST_DEMO"])
    notice = notices / f"{time.time_ns()}-{event}.json"
    notice.with_suffix(".new").write_text(json.dumps({"event": event, "pid": os.getpid(), **facts}))
    notice.with_suffix(".new").rename(notice)
    deadline = time.monotonic() + 20
    while (notices / f"hold-{event}-{facts.get('epoch')}").exists() and time.monotonic() < deadline:
        time.sleep(0.001)


def main() -> None:
    trainer = TorchTrainer(
        learn,
        train_loop_config=CONFIG,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name=NAME,
            storage_path=sys.argv[1] if len(sys.argv) > 1 else None,
            failure_config=train.FailureConfig(max_failures=3),
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=3, checkpoint_score_attribute="accuracy", checkpoint_score_order="max"
            ),
        ),
    )
    result = trainer.fit()
    best, metrics = result.best_checkpoints[-1]
    print(f"accuracy {result.metrics['accuracy']:.3f}; the best, {metrics['accuracy']:.3f}, is {best.path}")
    tell("finished", accuracy=result.metrics["accuracy"], best=Path(best.path).name)


if __name__ == "__main__":
    main()
