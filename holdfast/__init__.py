"""Training runs that lose nothing that was committed.

Names load on first use: importing this package costs next to nothing, and loads no framework.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers know this name; importing `typing` costs more than all the rest

if TYPE_CHECKING:
    from holdfast import storage as storage
    from holdfast import train as train
    from holdfast.checkpoint.checkpoint import Checkpoint
    from holdfast.errors import (
        AlreadyExists,
        CheckpointDamaged,
        CheckpointError,
        CheckpointFailed,
        CheckpointForgotten,
        ConfigError,
        DriverAlive,
        EngineError,
        ExperimentError,
        HoldfastError,
        JournalDamaged,
        NotFound,
        OutsideRunError,
        OwnershipLost,
        StorageError,
        TrainingFailedError,
    )

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointFailed",
    "CheckpointForgotten",
    "ConfigError",
    "DriverAlive",
    "EngineError",
    "ExperimentError",
    "HoldfastError",
    "JournalDamaged",
    "NotFound",
    "OutsideRunError",
    "OwnershipLost",
    "StorageError",
    "TrainingFailedError",
    "__version__",
    "storage",
    "train",
]

_ROOMS = ("storage", "train")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    if name in _ROOMS:
        return import_module(f"holdfast.{name}")
    home = import_module("holdfast.checkpoint.checkpoint" if name == "Checkpoint" else "holdfast.errors")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
