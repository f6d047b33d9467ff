"""Every exception a user may catch.

HoldfastError
├── ConfigError             what was asked for cannot be; nothing was written       (also a ValueError)
├── OutsideRunError         a session call where no run is                          (also a RuntimeError)
├── ExperimentError         the experiment under this name is not the one asked for
│   ├── DriverAlive         another driver of this experiment runs on this machine
│   └── OwnershipLost       another driver has taken this experiment over
├── StorageError            bytes could not be written or read; `transient` says whether to try again
│   ├── NotFound            there is nothing under that name
│   └── AlreadyExists       there is something under that name
├── JournalDamaged          a record before the end of a journal is not what was written
├── CheckpointError         about one checkpoint
│   ├── CheckpointDamaged   its bytes are not those of its manifest
│   ├── CheckpointForgotten it was let go by the retention policy while it was looked for
│   └── CheckpointFailed    it could not be made: the next `report` or the end of the run says so
├── EngineError             processes could not be started
└── TrainingFailedError     a run ended without finishing; carries `result` and `failures`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Result = Any


class HoldfastError(Exception):
    """The root of all exceptions of this library."""


class ConfigError(HoldfastError, ValueError):
    """What was asked for cannot be. Raised before anything is written."""


class OutsideRunError(HoldfastError, RuntimeError):
    """A function that belongs into a training function was called elsewhere."""


class ExperimentError(HoldfastError):
    """The experiment under this name is not the one asked for."""


class DriverAlive(ExperimentError):
    """Another driver of this experiment is alive on this machine."""


class OwnershipLost(ExperimentError):
    """Another driver has taken this experiment over; this one must stop."""


class StorageError(HoldfastError):
    """Bytes could not be written or read.

    Attributes:
        transient: whether the same call may succeed later (disk full, storage away).
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class NotFound(StorageError):
    """There is nothing under that name."""


class AlreadyExists(StorageError):
    """There is something under that name already."""


class JournalDamaged(HoldfastError):
    """A record before the end of a journal is not what was written."""


class CheckpointError(HoldfastError):
    """About one checkpoint."""


class CheckpointDamaged(CheckpointError):
    """The bytes of a checkpoint are not those its manifest names."""


class CheckpointForgotten(CheckpointError):
    """The checkpoint was let go by the retention policy."""


class CheckpointFailed(CheckpointError):
    """A checkpoint that was reported could not be made."""


class EngineError(HoldfastError):
    """Processes could not be started."""


class TrainingFailedError(HoldfastError):
    """A run ended without finishing.

    Attributes:
        result: what the run has kept: its metrics, its checkpoints, its path.
        failures: rank -> that rank's own traceback, of the last attempt.
    """

    def __init__(self, message: str, *, result: Result, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.result = result
        self.failures = dict(failures or {})
