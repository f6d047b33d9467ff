"""The training API: give a training function to a trainer, report from it, lose nothing.

The names are those of Ray Train; a script moves here by changing the root of its imports.
"""

from __future__ import annotations

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.errors import TrainingFailedError
from holdfast.run.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from holdfast.run.result import Result
from holdfast.run.session import TrainContext, checkpoint_dir, get_checkpoint, get_context, report
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
