"""What a training function may call: report, get_checkpoint, get_context, checkpoint_dir.

A worker process has one session, from before its training function is called until after it returned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.manifest import part_directory
from holdfast.checkpoint.transfer import stage
from holdfast.engines.base import Channel, ChannelClosed
from holdfast.errors import CheckpointFailed, HoldfastError, OutsideRunError
from holdfast.plain import Plain, decode, encode, plain
from holdfast.storage.local import storage_error

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_LISTEN_EVERY = 64  # metrics-only reports; each look costs a system call


class DriverGone(HoldfastError):
    """The driver of this worker is gone: the attempt is over. What was staged is committed by the next driver."""


@dataclass(frozen=True)
class StorageContext:
    """Where a run is kept.

    Attributes:
        storage_path: the folder that holds experiments.
        experiment_path: the experiment's own folder.
        trial_path: the folder of this run's checkpoints and logs.
    """

    storage_path: str
    experiment_path: str
    trial_path: str


@dataclass(frozen=True)
class TrainContext:
    """Who a worker is, among how many, and where its run is kept."""

    experiment_name: str
    world_size: int
    world_rank: int
    local_rank: int
    local_world_size: int
    node_rank: int
    storage: StorageContext

    def get_experiment_name(self) -> str:
        """The name of the experiment."""
        return self.experiment_name

    def get_world_size(self) -> int:
        """How many workers the run has."""
        return self.world_size

    def get_world_rank(self) -> int:
        """This worker's number among all, from 0."""
        return self.world_rank

    def get_local_rank(self) -> int:
        """This worker's number among those of its node, from 0."""
        return self.local_rank

    def get_local_world_size(self) -> int:
        """How many workers this node has."""
        return self.local_world_size

    def get_node_rank(self) -> int:
        """The number of this worker's node, from 0."""
        return self.node_rank

    def get_trial_dir(self) -> str:
        """The folder of this run's checkpoints and logs."""
        return self.storage.trial_path

    def get_storage(self) -> StorageContext:
        """Where the run is kept."""
        return self.storage


@dataclass(frozen=True)
class Assignment:
    """What a driver tells a worker about its place in an attempt.

    Attributes:
        attempt: its number, in every message.
        staging: the attempt's own folder, on the file system where checkpoints will lie; None: none is to be made.
        checkpoint: the directory of the checkpoint to start from.
        waits_for_storage_s: how long a full disk is waited for; 0: not at all.
    """

    attempt: int
    staging: str
    checkpoint: str | None
    waits_for_storage_s: float
    context: TrainContext

    def to_plain(self) -> Plain:
        context = {**vars(self.context), "storage": vars(self.context.storage)}
        return {**vars(self), "context": context}

    @classmethod
    def from_plain(cls, value: Plain) -> Assignment:
        context = {**value["context"], "storage": StorageContext(**value["context"]["storage"])}
        return cls(**{**value, "context": TrainContext(**context)})


class Session:
    """A worker's connection with its run."""

    def __init__(self, channel: Channel, assignment: Assignment) -> None:
        self.context = assignment.context
        self._channel = channel
        self._assignment = assignment
        self._staging = Path(assignment.staging)
        self._newest = assignment.checkpoint
        self._reports = 0
        self._answers: dict[int, Plain] = {}
        self._published: dict[str, Plain] = {}
        self._given: list[Path] = []  # directories of `checkpoint_dir` that were not dropped
        self._open: set[Path] = set()  # those whose block has not ended: they are their users'
        self._told_unreported = False
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a training function may report from a thread of its own

    # ---- what users call

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None, *, sync: bool) -> None:
        with self._lock:
            report, self._reports = self._reports, self._reports + 1
            try:
                message = self._message(report, metrics, checkpoint)
            except Exception as error:
                # Counted all the same, and told: the other ranks' report of this number must not become a checkpoint,
                # and the next one must be the next one on every rank, whoever catches this.
                self.send({"t": "report", "n": report, "m": {}, "failed": f"{type(error).__name__}: {error}"})
                raise
            if checkpoint is None:
                self.send(message)
                if report % _LISTEN_EVERY == 0:
                    self._listen(0)
                return
            self.send({**message, "sync": sync})
            self._await_answer(report)
            self._drop_given()

    def _message(self, report: int, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> dict[str, Plain]:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"report(metrics) got a {type(metrics).__name__}; it must be a dict of names and numbers")
        message: dict[str, Plain] = {"t": "report", "n": report, "m": plain(dict(metrics), "metrics")}
        if checkpoint is not None:
            size_bytes = self._stage(checkpoint, part_directory(self._staging, report, self._rank))
            message.update(bytes=size_bytes, free=_free_bytes(self._staging))
        return message

    def get_checkpoint(self) -> Checkpoint | None:
        with self._lock:
            self._listen(0)
            return None if self._newest is None else Checkpoint(self._newest)

    @contextlib.contextmanager
    def checkpoint_dir(self) -> Iterator[str]:
        self._drop_given()
        folder = self._staging / "new"
        folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"rank{self._rank}-", dir=folder))
        fresh.chmod(0o777 & ~_umask())
        self._given.append(fresh)
        self._open.add(fresh)
        try:
            yield str(fresh)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        finally:
            self._open.discard(fresh)

    def close(self) -> None:
        """Ends what the training function has begun: it has returned."""
        self._drop_given()

    # ---- what frameworks and the worker's entry call

    def broadcast(self, key: str, value: Plain = None) -> Plain:
        """Gives `value` of rank 0 to every rank; the others wait for it. Each key is used once."""
        if self._rank == 0:
            self.send({"t": "publish", "key": key, "value": value})
            return value
        with self._lock:
            while key not in self._published:
                self._listen(None)
            return self._published[key]

    @property
    def is_of_another_process(self) -> bool:
        """Whether this is a fork's copy of its parent's session: their messages would mix."""
        return os.getpid() != self._pid

    @property
    def scratch(self) -> Path:
        """A folder that all ranks of this attempt see; removed when the attempt is over."""
        return self._staging

    def send(self, message: dict[str, Plain]) -> None:
        try:
            self._channel.send(encode(message))
        except ChannelClosed:
            raise DriverGone("the driver of this worker is gone") from None

    # ---- staging

    @property
    def _rank(self) -> int:
        return self.context.world_rank

    def _stage(self, checkpoint: Checkpoint, part: Path) -> int:
        source = _directory_of(checkpoint)
        deadline = time.monotonic() + self._assignment.waits_for_storage_s
        delay_s, waiting = 0.1, ""
        while True:
            try:
                size_bytes = stage(source, part, give=source in self._given).size_bytes
                break
            except OSError as error:
                failure = storage_error("stage the checkpoint", source, error)
                if error.errno not in _NO_SPACE or time.monotonic() + delay_s > deadline:
                    raise failure from error
            if not waiting:
                waiting = f"space for a checkpoint of rank {self._rank} ({failure})"
                self.send({"t": "waiting", "what": waiting})
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, 5.0)
        if waiting:
            self.send({"t": "waited", "what": waiting})
        return size_bytes

    def _drop_given(self) -> None:
        """Removes what was written to be reported, and never was: most likely `checkpoint=` was forgotten."""
        for folder in [folder for folder in self._given if folder not in self._open]:
            if folder.exists() and any(folder.iterdir()) and not self._told_unreported:
                self._told_unreported = True
                what = "what was written into a checkpoint_dir() was never reported, and is removed: pass it on with "
                self.send({"t": "warn", "what": f"rank {self._rank}: {what}report(metrics, checkpoint=...)"})
            shutil.rmtree(folder, ignore_errors=True)
            self._given.remove(folder)

    # ---- messages

    def _await_answer(self, report: int) -> None:
        while report not in self._answers:
            self._listen(None)
        answer = self._answers.pop(report)
        if answer.get("error"):
            raise CheckpointFailed(answer["error"])

    def _listen(self, timeout_s: float | None) -> None:
        """Takes in what the driver has sent; waits for it with `timeout_s=None`."""
        try:
            message = self._channel.receive(timeout_s)
            while message is not None:
                self._take(decode(message))
                message = self._channel.receive(0)
        except ChannelClosed:
            raise DriverGone("the driver of this worker is gone") from None

    def _take(self, message: Plain) -> None:
        if message["t"] == "answer":
            self._answers[message["n"]] = message
        elif message["t"] == "committed":
            self._newest = message["path"]
        elif message["t"] == "published":
            self._published[message["key"]] = message["value"]


def _directory_of(checkpoint: Checkpoint) -> Path:
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"report(checkpoint=...) got a {type(checkpoint).__name__}; give it Checkpoint.from_directory(path)"
        )
    path = Path(checkpoint.path)
    if not path.is_dir():
        if path.exists():
            raise CheckpointFailed(
                f"the checkpoint {path} is a file: put it into a directory of its own, and report that"
            )
        raise CheckpointFailed(f"the checkpoint directory {path} does not exist: report it before it is removed")
    return path


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_session: Session | None = None


@contextlib.contextmanager
def entered(session: Session) -> Iterator[Session]:
    """Makes `session` the one that this process's training function finds."""
    global _session
    before, _session = _session, session
    try:
        yield session
    finally:
        _session = before


def current(what: str) -> Session:
    """Returns the session of this process.

    Raises:
        OutsideRunError: there is none; `what` was called.
    """
    if _session is not None and _session.is_of_another_process:
        raise OutsideRunError(
            f"{what} was called in a process that the training function has forked: call it in the worker itself"
        )
    if _session is None:
        raise OutsideRunError(
            f"{what} was called outside a run: call it in the training function that you give to a trainer, "
            "in a worker process of that run"
        )
    return _session


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, *, sync: bool = False) -> None:
    """Reports metrics, and a checkpoint with them, to the run.

    Every rank calls it equally often; the metrics of a run are those of rank 0. With a checkpoint it returns when the
    bytes are staged and every rank has come here: from then on the checkpoint will be committed, whoever dies. It is
    committed in the background.

    Args:
        metrics: names and numbers (or strings, bools, None, and lists and dicts of these); numpy and torch scalars
            become numbers.
        checkpoint: a directory of files; they are copied, unless it is a `checkpoint_dir()`, which is taken as it is.
            The files of all ranks become one directory. Of files of the same name with different bytes the lowest
            rank's is kept, and a warning names both.
        sync: return only when the checkpoint is committed: durable and verified.

    Raises:
        OutsideRunError: there is no run here.
        TypeError: a metric cannot be kept; it is named.
        CheckpointFailed: this checkpoint, or an earlier one, could not be made.
        StorageError: the disk is full, or was for longer than `FailureConfig(storage_deadline_s)`.
    """
    current("report").report(metrics, checkpoint, sync=sync)


def get_checkpoint() -> Checkpoint | None:
    """Returns the checkpoint to go on from, or None.

    At the start of an attempt it is the newest one that is committed and verified, the same on every rank. Later it is
    the newest committed one that this rank has heard of.

    Raises:
        OutsideRunError: there is no run here.
    """
    return current("get_checkpoint").get_checkpoint()


def get_context() -> TrainContext:
    """Returns who this worker is, among how many, and where its run is kept.

    Raises:
        OutsideRunError: there is no run here.
    """
    return current("get_context").context


def checkpoint_dir() -> contextlib.AbstractContextManager[str]:
    """Gives an empty directory on the file system where checkpoints lie: what is written there need not be copied.

        with train.checkpoint_dir() as folder:
            torch.save(model.state_dict(), f"{folder}/model.pt")
            train.report({"loss": loss}, checkpoint=Checkpoint.from_directory(folder))

    `report` takes the directory away. One that was not reported is removed, and that is said, when the next one is
    asked for, at the next `report` with a checkpoint, or at the end; never while its block runs.

    Raises:
        OutsideRunError: there is no run here.
    """
    return current("checkpoint_dir").checkpoint_dir()


__all__ = [
    "TrainContext",
    "checkpoint_dir",
    "get_checkpoint",
    "get_context",
    "report",
]
