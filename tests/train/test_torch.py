"""PyTorch on two workers, written as scripts for Ray Train are, with another root in the imports."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import holdfast.train.torch  # noqa: E402
from holdfast import train  # noqa: E402
from holdfast.errors import ConfigError  # noqa: E402
from holdfast.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from holdfast.train.torch import TorchTrainer  # noqa: E402

TWO = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})


def line_fit(config: dict[str, Any]) -> None:
    """Learns a line; saves model, optimizer and epoch from rank 0, and goes on from them."""
    inputs, targets = torch.randn(64, 4), torch.rand(64, 1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = holdfast.train.torch.prepare_model(model)
    epoch = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            model.module.load_state_dict(torch.load(os.path.join(folder, "model.pt")))
            optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt")))
            epoch = torch.load(os.path.join(folder, "extra.pt"))["epoch"] + 1
        Path(config["notes"], f"resumed-at-{epoch}").touch()
    while epoch < config["epochs"]:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0 and epoch % config.get("every", 1) == 0:
                torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
                torch.save(optimizer.state_dict(), os.path.join(folder, "optimizer.pt"))
                torch.save({"epoch": epoch}, os.path.join(folder, "extra.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)
        if epoch == config.get("fail_at"):
            raise RuntimeError("on purpose")
        epoch += 1


def shards(config: dict[str, Any]) -> None:
    """Every rank saves its own part of a model."""
    rank = train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"weights": torch.full((3,), float(rank))}, os.path.join(folder, f"model-rank={rank}.pt"))
        train.report({"rank": rank}, checkpoint=Checkpoint.from_directory(folder))


def scored(config: dict[str, Any]) -> None:
    for epoch, accuracy in enumerate(config["accuracies"]):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                Path(folder, "epoch").write_text(str(epoch))
                checkpoint = Checkpoint.from_directory(folder)
            train.report({"mean_accuracy": accuracy}, checkpoint=checkpoint)


def fit(lab: Any, loop: Any, config: dict[str, Any], **run: Any) -> train.Result:
    return TorchTrainer(
        loop,
        train_loop_config={"notes": str(lab.notes), **config},
        scaling_config=run.pop("scaling", TWO),
        run_config=RunConfig(name="torch", storage_path=lab.folder, verbose=0, **run),
    ).fit()


def test_a_data_parallel_model_is_saved_and_can_be_loaded(lab):
    result = fit(lab, line_fit, {"epochs": 3, "every": 2})
    assert result.metrics["epoch"] == 2
    with result.checkpoint.as_directory() as folder:
        assert set(torch.load(os.path.join(folder, "model.pt"))) == {"weight", "bias"}
    copied = result.checkpoint.to_directory()
    assert sorted(os.listdir(copied)) == ["extra.pt", "model.pt", "optimizer.pt"]
    assert len(result.best_checkpoints) == 2


def test_after_an_error_training_goes_on_with_the_state_it_had_saved(lab):
    result = fit(lab, line_fit, {"epochs": 4, "fail_at": 1}, failure_config=FailureConfig(max_failures=1))
    assert result.metrics["epoch"] == 3
    assert [name for name in os.listdir(lab.notes)] == ["resumed-at-2"]
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1, 2, 3]
    assert lab.damage("torch") == []


def test_the_shards_of_all_ranks_are_one_checkpoint(lab):
    checkpoint = fit(lab, shards, {}).checkpoint
    with checkpoint.as_directory() as folder:
        assert sorted(name for name in os.listdir(folder) if name.endswith(".pt")) == [
            "model-rank=0.pt",
            "model-rank=1.pt",
        ]
        assert torch.load(os.path.join(folder, "model-rank=1.pt"))["weights"].tolist() == [1.0, 1.0, 1.0]


def test_the_best_checkpoints_by_a_metric_are_kept(lab):
    best_two = CheckpointConfig(
        num_to_keep=2, checkpoint_score_attribute="mean_accuracy", checkpoint_score_order="max"
    )
    result = fit(lab, scored, {"accuracies": [0.1, 0.8, 0.3, 0.9, 0.2]}, checkpoint_config=best_two)
    assert [metrics["mean_accuracy"] for _, metrics in result.best_checkpoints] == [0.8, 0.9]
    assert Path(result.checkpoint.path, "epoch").read_text() == "4"


def prepared(config: dict[str, Any]) -> None:
    context = train.get_context()
    data = torch.utils.data.TensorDataset(torch.arange(8))
    loader = holdfast.train.torch.prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=2))
    seen = sorted(int(value) for (batch,) in loader for value in batch)
    model = holdfast.train.torch.prepare_model(torch.nn.Linear(1, 1))
    total = torch.tensor([float(context.get_world_rank() + 1)])
    torch.distributed.all_reduce(total)
    Path(config["notes"], f"seen-by-{context.get_world_rank()}").write_text(repr(seen))
    variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    train.report(
        {
            "parallel": type(model).__name__,
            "sum": total.item(),
            "device": str(holdfast.train.torch.get_device()),
            "threads": torch.get_num_threads(),
            **variables,
        }
    )


def test_each_rank_sees_its_share_of_the_data_and_all_are_in_one_process_group(lab):
    metrics = fit(lab, prepared, {}).metrics
    assert (metrics["parallel"], metrics["sum"]) == ("DistributedDataParallel", 3.0)
    assert (metrics["RANK"], metrics["WORLD_SIZE"], metrics["LOCAL_RANK"]) == ("0", "2", "0")
    shares = [eval((lab.notes / f"seen-by-{rank}").read_text()) for rank in range(2)]
    assert shares == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_one_worker_has_a_plain_model_and_all_of_the_data(lab):
    metrics = fit(lab, prepared, {}, scaling=ScalingConfig(num_workers=1)).metrics
    assert (metrics["parallel"], metrics["sum"]) == ("Linear", 1.0)


def samples_of_its_own(config: dict[str, Any]) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8))
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)
    holdfast.train.torch.prepare_data_loader(torch.utils.data.DataLoader(data, sampler=sampler))


def test_a_sampler_that_would_be_lost_is_refused(lab):
    with pytest.raises(train.TrainingFailedError, match="WeightedRandomSampler"):
        fit(lab, samples_of_its_own, {})


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigError, match="'fsdp'"):
        holdfast.train.torch.prepare_model(torch.nn.Linear(1, 1), parallel_strategy="fsdp")


def reports_tensors(config: dict[str, Any]) -> None:
    train.report({"loss": torch.tensor(0.5), "n": torch.tensor([3])})


def test_a_scalar_tensor_is_a_number(lab):
    assert fit(lab, reports_tensors, {}).metrics == {"loss": 0.5, "n": 3}
