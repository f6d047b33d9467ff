"""How long `report` keeps the training function, and when what it got is safe. One worker; one `fit` for each case."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from bench import limits
from bench.marks import CONFIG, mark
from holdfast import train
from holdfast.train import Checkpoint, RunConfig, ScalingConfig
from holdfast.train.torch import TorchTrainer

GIVES_AWAY = hasattr(train, "checkpoint_dir")
COMMIT_DEADLINE_S = 120.0


class Place:
    """Where a run keeps its checkpoints: looked at from outside, to know when one is there."""

    def __init__(self, config):
        self.root = Path(config["directory"])
        self.run = self.root / config["case"]
        self.reported = 0

    def report(self, directory, size_bytes, **options):
        """Returns the seconds that `report` of a checkpoint blocks."""
        checkpoint = Checkpoint.from_directory(str(directory))
        metrics = {"loss": 0.5, "step": self.reported}
        self.reported += 1
        self.size_bytes = size_bytes
        return limits.timed(lambda: train.report(metrics, checkpoint=checkpoint, **options))

    def settle(self):
        """Returns when all that was reported is there, and the disk is idle."""
        deadline = time.monotonic() + COMMIT_DEADLINE_S
        while self.there() < self.reported:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.there()} of {self.reported} checkpoints after {COMMIT_DEADLINE_S} s")
            time.sleep(0.002)
        os.sync()
        for directory in self.checkpoints():
            limits.drop_pages(directory)

    def checkpoints(self):
        return list(self.run.glob("checkpoint_[0-9]*"))

    def there(self):
        directories = self.checkpoints()
        if GIVES_AWAY:
            return sum((directory / ".holdfast.json").exists() for directory in directories)
        return sum(_size_bytes(directory) >= self.size_bytes for directory in directories)


def _size_bytes(directory):
    return sum(entry.stat().st_size for entry in os.scandir(directory))


def metrics_only(config, place):
    seconds = [limits.timed(lambda step=step: train.report({"loss": 0.5, "step": step})) for step in range(config["n"])]
    mark("metrics_only", values=seconds[min(100, len(seconds) // 5) :], limit=limits.message_s(1000))


def small(config, place):
    """A 1 KB checkpoint from a temporary directory, with training steps of 0.1 s between."""
    for step in range(config["n"] + 2):
        with tempfile.TemporaryDirectory() as directory:
            limits.write(Path(directory) / "state.bin", 1 << 10)
            limit = limits.copy_s(Path(directory), place.root / "copy")
            seconds = place.report(directory, 1 << 10)
        time.sleep(0.1)
        if step >= 2:
            mark("small", values=[seconds], limit=[limit])


def given(config, place):
    """Bytes that are given away: written where they can stay, or uploaded in the background."""
    for step in range(config["n"] + 1):
        give = _given_here if GIVES_AWAY else _given_to_upload
        seconds = give(place, config["size_bytes"])
        returned = time.monotonic()
        place.settle()
        if step:
            mark("given", values=[seconds], limit=[limits.rename_s(place.root)], settled=time.monotonic() - returned)


def _given_here(place, size_bytes):
    with train.checkpoint_dir() as directory:
        limits.write(Path(directory) / "state.bin", size_bytes)
        return place.report(directory, size_bytes)


def _given_to_upload(place, size_bytes):
    directory = Path(tempfile.mkdtemp())
    limits.write(directory / "state.bin", size_bytes)
    return place.report(directory, size_bytes, checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC)


def copied(config, place):
    """Bytes that the caller keeps, in a temporary directory on the same file system, against a plain copy of them."""
    for step in range(config["n"] + 1):
        with tempfile.TemporaryDirectory() as directory:
            limits.write(Path(directory) / "state.bin", config["size_bytes"])
            limit_first = step % 2 == 0
            limit = _plain_copy_s(directory, place, config["size_bytes"]) if limit_first else 0.0
            prepare(place, config["size_bytes"])
            seconds = place.report(directory, config["size_bytes"])
            place.settle()
            limit = limit or _plain_copy_s(directory, place, config["size_bytes"])
        if step:
            mark("copied", values=[seconds], limit=[limit])


def prepare(place, size_bytes):
    """Before each measured write: an idle disk, and pages that have been touched."""
    os.sync()
    limits.warm_pages(place.root, size_bytes)


def _plain_copy_s(directory, place, size_bytes):
    prepare(place, size_bytes)
    return limits.copy_s(Path(directory), place.root / "copy")


def durable(config, place):
    """From the first byte of the user's own write until the checkpoint survives a power cut."""
    size_bytes = config["size_bytes"]
    _durable(config, place, "durable", lambda directory: limits.write(directory / "state.bin", size_bytes), size_bytes)


def files(config, place):
    """As `durable`, for 2,000 files of 64 KB."""
    _durable(config, place, "files", lambda directory: limits.write_many(directory, 2000, 64 << 10), 2000 * (64 << 10))


def _durable(config, place, name, write, size_bytes):
    for step in range(config["n"] + 1):
        limit_first = step % 2 == 0
        limit = _limit_s(name, place, size_bytes) if limit_first else 0.0
        prepare(place, 2 * size_bytes)
        seconds = limits.timed(lambda: _report_durably(place, write, size_bytes))
        place.settle()
        limit = limit or _limit_s(name, place, size_bytes)
        if step:
            mark(name, values=[seconds], limit=[limit])


def _limit_s(name, place, size_bytes):
    prepare(place, 2 * size_bytes)
    if name == "files":
        return limits.durable_write_many_s(place.root, 2000, 64 << 10)
    return limits.durable_write_s(place.root, size_bytes)


def _report_durably(place, write, size_bytes):
    if GIVES_AWAY:
        with train.checkpoint_dir() as directory:
            write(Path(directory))
            place.report(directory, size_bytes, sync=True)
        return
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory))
        place.report(directory, size_bytes)
    limits.sync_filesystem(place.root)


CASES = {case.__name__: case for case in (metrics_only, small, given, copied, durable, files)}


def train_func(config):
    CASES[config["case"]](config, Place(config))


for case, settings in CONFIG["cases"].items():
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"case": case, "directory": CONFIG["directory"], **settings},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=case, storage_path=CONFIG["directory"]),
    )
    trainer.fit()
    shutil.rmtree(os.path.join(CONFIG["directory"], case))
    os.sync()
