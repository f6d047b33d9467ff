"""What a user may ask of a run, checked when it is said."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from holdfast.checkpoint.retention import Retention
from holdfast.errors import ConfigError

OnStorageError = Literal["wait", "fail"]
Resume = Literal["auto", "must", "never", "takeover"]
Verify = Literal["full", "sizes"]


_LONGEST_NAME_BYTES = 200  # what a file system takes is 255, and there is more to be put into some names


def default_root() -> Path:
    """Where experiments go without a `storage_path`: `HOLDFAST_STORAGE`, or `~/holdfast_results`."""
    return Path(os.environ.get("HOLDFAST_STORAGE") or "~/holdfast_results").expanduser()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _is_count(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _is_seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _require_choice(value: object, choices: object, name: str) -> None:
    allowed = get_args(choices)
    _require(value in allowed, f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True)
class ScalingConfig:
    """How many workers a run has and what each may use.

    Args:
        num_workers: ranked processes; 0: none, the training function runs in this process, where a debugger works.
        use_gpu: each worker gets a GPU, unless `resources_per_worker` says how many.
        resources_per_worker: for example `{"CPU": 2, "GPU": 0.5}`; one CPU each by default.

    Raises:
        ConfigError: a value that cannot be.
    """

    num_workers: int = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        _require(_is_count(self.num_workers, 0), f"num_workers is {self.num_workers!r}; it must be 0, 1, 2, ...")
        for name, amount in (self.resources_per_worker or {}).items():
            _require(name in ("CPU", "GPU"), f"resources_per_worker names {name!r}; a worker can have 'CPU' and 'GPU'")
            valid = isinstance(amount, (int, float)) and not isinstance(amount, bool) and amount >= 0
            _require(valid, f"resources_per_worker[{name!r}] is {amount!r}; it must be a number, 0 or more")
        gpus = (self.resources_per_worker or {}).get("GPU")
        _require(
            not (self.use_gpu and gpus == 0) and not (not self.use_gpu and gpus),
            f"use_gpu={self.use_gpu} and resources_per_worker={self.resources_per_worker} contradict each other",
        )

    @property
    def cpus_per_worker(self) -> float:
        return float((self.resources_per_worker or {}).get("CPU", 1))

    @property
    def gpus_per_worker(self) -> float:
        return float((self.resources_per_worker or {}).get("GPU", 1 if self.use_gpu else 0))


@dataclass(frozen=True)
class FailureConfig:
    """What happens after a failure.

    Args:
        max_failures: how often the workers are started again after one of them died; -1: always.
        on_storage_error: when a checkpoint cannot be written (disk full, storage away): `"wait"` for
            `storage_deadline_s` for that to pass, or `"fail"` at the next `report`.
        storage_deadline_s: how long `"wait"` waits, in seconds.

    Raises:
        ConfigError: a value that cannot be.
    """

    max_failures: int = 0
    on_storage_error: OnStorageError = "wait"
    storage_deadline_s: float = 1800.0

    def __post_init__(self) -> None:
        _require(
            _is_count(self.max_failures, -1),
            f"max_failures is {self.max_failures!r}; it must be a whole number, 0 or more, or -1 for any number",
        )
        _require_choice(self.on_storage_error, OnStorageError, "on_storage_error")
        _require(
            _is_seconds(self.storage_deadline_s), f"storage_deadline_s is {self.storage_deadline_s!r}; it must be > 0"
        )


@dataclass(frozen=True)
class CheckpointConfig:
    """Which checkpoints are kept.

    Args:
        num_to_keep: keep this many; None: all. The newest one is always kept besides.
        checkpoint_score_attribute: keep the best by this metric (`"eval/loss"` finds nested ones), not the most recent.
        checkpoint_score_order: `"max"` or `"min"`.
        verify: how a checkpoint is looked at before an attempt starts from it: `"full"` reads every byte once and
            compares hashes, `"sizes"` only looks whether the files are there.

    Raises:
        ConfigError: a value that cannot be.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"
    verify: Verify = "full"

    def __post_init__(self) -> None:
        _require(
            self.num_to_keep is None or _is_count(self.num_to_keep, 1),
            f"num_to_keep is {self.num_to_keep!r}; it must be 1 or more, or None to keep all",
        )
        attribute = self.checkpoint_score_attribute
        _require(
            attribute is None or (isinstance(attribute, str) and bool(attribute)),
            f"checkpoint_score_attribute is {attribute!r}; it must be the name of a metric",
        )
        _require_choice(self.checkpoint_score_order, Literal["max", "min"], "checkpoint_score_order")
        _require_choice(self.verify, Verify, "verify")

    @property
    def retention(self) -> Retention:
        return Retention(self.num_to_keep, self.checkpoint_score_attribute, self.checkpoint_score_order)


@dataclass(frozen=True)
class RunConfig:
    """Where a run is kept and how it behaves.

    Args:
        name: of the experiment; a second `fit` under the same name goes on from the first. None: a fresh, dated name.
        storage_path: the folder that holds experiments; by default `HOLDFAST_STORAGE` or `~/holdfast_results`.
        failure_config: what happens after failures.
        checkpoint_config: which checkpoints are kept.
        worker_env: environment variables of the workers, over those of this process.
        verbose: 0: silence; 1: what matters, and what workers print; 2: every report.
        resume: what to do when the experiment exists: `"auto"` goes on, and starts one if there is none; `"must"`: an
            error if there is none; `"never"`: an error if there is one; `"takeover"`: as `"auto"`, also from a driver
            that is alive.
        report_timeout_s: how long a rank waits in `report` for the others before the run fails, in seconds.

    Raises:
        ConfigError: a value that cannot be.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    worker_env: Mapping[str, str] = field(default_factory=dict)
    verbose: int = 1
    resume: Resume = "auto"
    report_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        name = self.name
        _require(name is None or isinstance(name, str), f"name is {name!r}; it must be a string")
        plain = name is None or (bool(name) and "/" not in name and "\0" not in name and not name.startswith("."))
        _require(plain, f"name is {name!r}; it must be the name of a folder: not empty, no '/', no '.' at its start")
        fits = name is None or (name.isprintable() and len(name.encode(errors="replace")) <= _LONGEST_NAME_BYTES)
        _require(fits, f"name is {name!r}; it must be printable, and at most {_LONGEST_NAME_BYTES} bytes long")
        for value, kind in ((self.failure_config, FailureConfig), (self.checkpoint_config, CheckpointConfig)):
            _require(isinstance(value, kind), f"{value!r} is given where a {kind.__name__} belongs")
        for key, text in self.worker_env.items():
            _require(
                isinstance(key, str) and isinstance(text, str), f"worker_env[{key!r}] is {text!r}; it must be a string"
            )
        _require(_is_count(self.verbose, 0) and self.verbose <= 2, f"verbose is {self.verbose!r}; it must be 0, 1 or 2")
        _require_choice(self.resume, Resume, "resume")
        _require(
            self.resume != "must" or name is not None,
            "resume='must' without a name: an unnamed run gets a fresh name, so there is nothing to resume",
        )
        _require(_is_seconds(self.report_timeout_s), f"report_timeout_s is {self.report_timeout_s!r}; it must be > 0")


@dataclass(frozen=True)
class RunSpec:
    """A run, as a value: all that is needed to carry it out anywhere.

    Attributes:
        function: what workers do, pickled: a callable that takes the configuration or nothing, and that configuration.
        function_name: for people, and to tell one experiment from another.
        scaling: how many workers.
        failures: what happens after failures.
        checkpoints: which are kept.
        env: environment variables of the workers.
        report_timeout_s: how long a rank waits in `report`.
        start_from: a checkpoint's directory to start from while the run has none of its own.
        config: the training function's configuration, for `Result.config`.
    """

    function: bytes
    function_name: str
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    failures: FailureConfig = field(default_factory=FailureConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    env: Mapping[str, str] = field(default_factory=dict)
    report_timeout_s: float = 1800.0
    start_from: str | None = None
    config: Mapping[str, Any] | None = None

    @property
    def world_size(self) -> int:
        return max(1, self.scaling.num_workers)
