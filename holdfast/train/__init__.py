"""The training API: give a training function to a trainer, report from it, lose nothing.

The names are those of Ray Train; a script moves here by changing the root of its imports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.errors import TrainingFailedError
from holdfast.run.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from holdfast.run.session import TrainContext, checkpoint_dir, get_checkpoint, get_context, report

if TYPE_CHECKING:
    from holdfast.run.result import Result
    from holdfast.train.trainer import DataParallelTrainer

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "DataParallelTrainer",
    "FailureConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TrainContext",
    "TrainingFailedError",
    "checkpoint_dir",
    "get_checkpoint",
    "get_context",
    "report",
]


_LATER = {"DataParallelTrainer": "holdfast.train.trainer", "Result": "holdfast.run.result"}


def __getattr__(name: str) -> Any:
    """Loads what only a driver needs when it is first named: a worker, or a script that imports this, is quicker."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value
