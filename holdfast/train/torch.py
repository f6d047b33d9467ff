"""PyTorch: a process group around the training function, and the two lines that make a script data-parallel."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from holdfast.errors import ConfigError
from holdfast.run.session import TrainContext, current, get_context
from holdfast.run.worker import call_with
from holdfast.train.trainer import DataParallelTrainer

__all__ = ["TorchTrainer", "get_device", "prepare_data_loader", "prepare_model"]

_HOST = "127.0.0.1"  # all ranks are on this machine


class TorchTrainer(DataParallelTrainer):
    """Runs a PyTorch training function on several workers, in one process group (nccl with GPUs, otherwise gloo).

    The arguments are those of `DataParallelTrainer`.
    """

    frameworks = ("torch", "numpy")

    def wrap(self, train_loop: Callable[..., object]) -> Callable[..., object]:
        return _InProcessGroup(train_loop)


class _InProcessGroup:
    """A training function that finds a process group of all ranks."""

    def __init__(self, train_loop: Callable[..., object]) -> None:
        self.__wrapped__ = train_loop  # the name by which `inspect` looks through wrappers

    def __call__(self, config: Mapping[str, Any] | None = None) -> object:
        with _process_group(get_context()):
            return call_with(self.__wrapped__, config)


@contextlib.contextmanager
def _process_group(context: TrainContext) -> Iterator[None]:
    if dist.is_initialized():  # a script under a debugger (num_workers=0) may have its own
        yield
        return
    with _environment(context):
        rank, world_size = context.world_rank, context.world_size
        store = _rendezvous(context)
        if world_size == 1 or context.local_world_size == world_size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the machine's own name may not resolve
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=world_size
        )
        dist.barrier()  # else a rank that ends at once takes its connections away while others still make theirs
        yield
        # Not after an exception: other ranks may be in a collective call that then never ends.
        dist.destroy_process_group()


def _rendezvous(context: TrainContext) -> dist.Store:
    """The store in which ranks find each other: a file of the attempt, since a server would end with its rank."""
    session = current("TorchTrainer")
    port = session.broadcast("torch_port", _free_port() if context.world_rank == 0 else None)
    os.environ["MASTER_PORT"] = str(port)  # for libraries that make groups of their own
    return dist.FileStore(str(session.scratch / "process_group"), context.world_size)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _environment(context: TrainContext) -> Iterator[None]:
    """The variables by which other libraries find their rank."""
    values = {
        "RANK": context.world_rank,
        "WORLD_SIZE": context.world_size,
        "LOCAL_RANK": context.local_rank,
        "LOCAL_WORLD_SIZE": context.local_world_size,
        "NODE_RANK": context.node_rank,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": "",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_device() -> torch.device:
    """Returns the device this worker computes on: the GPU it was given, or the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool = True,
    parallel_strategy: Literal["ddp"] | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Moves a model to this worker's device and, with more than one worker, makes it data-parallel.

    With several workers the result is a `DistributedDataParallel`, and your own model is its `.module`.

    Args:
        model: your model.
        move_to_device: move it to `get_device()`.
        parallel_strategy: `"ddp"`, or None to leave the model as it is.
        parallel_strategy_kwargs: further arguments of `DistributedDataParallel`.

    Raises:
        ConfigError: another strategy.
    """
    if parallel_strategy not in ("ddp", None):
        raise ConfigError(f"parallel_strategy is {parallel_strategy!r}; 'ddp' and None are there")
    if move_to_device:
        model = model.to(get_device())
    if parallel_strategy is None or get_context().world_size == 1:
        return model
    devices = [get_device()] if torch.cuda.is_available() and move_to_device else None
    return torch.nn.parallel.DistributedDataParallel(
        model, **{"device_ids": devices, **(parallel_strategy_kwargs or {})}
    )


def prepare_data_loader(
    data_loader: DataLoader[Any], add_dist_sampler: bool = True, move_to_device: bool = True, auto_transfer: bool = True
) -> DataLoader[Any] | _OnDevice:
    """Gives each worker its share of the data, and moves batches to its device.

    A loader that shuffles goes on shuffling: call `loader.sampler.set_epoch(epoch)` before each epoch.

    Args:
        data_loader: your loader.
        add_dist_sampler: with more than one worker, take a `DistributedSampler`. An iterable dataset is left as it is.
        move_to_device: move tensors of each batch to `get_device()`.
        auto_transfer: copy them while the device still computes, where memory is pinned.

    Raises:
        ConfigError: the loader has a sampler of its own, whose order a `DistributedSampler` would lose.
    """
    if add_dist_sampler and get_context().world_size > 1 and not isinstance(data_loader.dataset, IterableDataset):
        data_loader = _distributed(data_loader)
    if move_to_device and get_device().type != "cpu":
        return _OnDevice(data_loader, get_device(), auto_transfer)
    return data_loader


def _distributed(loader: DataLoader[Any]) -> DataLoader[Any]:
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    plain_batches = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    if not (_is_plain(loader.sampler) and plain_batches):
        own = loader.sampler if plain_batches else loader.batch_sampler
        raise ConfigError(
            f"the data loader has a {type(own).__name__}, whose order a DistributedSampler would lose: "
            "make it give each rank its own share, and pass add_dist_sampler=False"
        )
    context = get_context()
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, context.world_size, context.world_rank, shuffle=shuffle, drop_last=False
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _is_plain(sampler: Any) -> bool:
    """Whether a sampler gives each item once, in order or shuffled: what a `DistributedSampler` does too."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


class _OnDevice:
    """A data loader whose batches are on a device."""

    def __init__(self, loader: DataLoader[Any], device: torch.device, non_blocking: bool) -> None:
        self._loader = loader
        self._device = device
        self._non_blocking = non_blocking

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return (self._moved(batch) for batch in self._loader)

    def _moved(self, batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return batch.to(self._device, non_blocking=self._non_blocking)
        if isinstance(batch, Mapping):
            return {name: self._moved(value) for name, value in batch.items()}
        if isinstance(batch, (list, tuple)):
            moved = [self._moved(value) for value in batch]
            return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
        return batch
