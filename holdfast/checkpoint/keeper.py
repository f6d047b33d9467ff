"""The keeper: makes staged parts durable in the background, and nothing else.

It never commits and never deletes; only the journal's owner does. It saves time, it is never safety: what it did not
do, the next owner's does. `holdfast.run.keeper` is the process it lives in, one for each experiment and node.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.transfer import make_durable
from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.local import storage_error


@dataclass(frozen=True)
class PersistFailure:
    """Why a part could not be made durable. `passing`: another try may succeed."""

    reason: str
    passing: bool


class Keeper:
    """Makes parts durable; remembers, from one try to the next, the hashes of what a failed fsync may have lost."""

    def __init__(self) -> None:
        self._tries: dict[Path, _Tries] = {}
        self._lock = threading.Lock()

    def persist(self, part: Path, *, anew: bool) -> PersistFailure | None:
        """Makes a staged part durable; returns why not, or None when it is.

        Any number of threads may call it; of two calls for the same part the second waits for the first.

        Args:
            part: the part's directory.
            anew: an earlier try failed: its files are written anew, never synced a second time.
        """
        with self._lock:
            tries = self._tries.setdefault(part, _Tries())
        with tries.lock:
            failure = _persist(part, tries.known, anew=anew)
        if failure is None or not failure.passing:
            with self._lock:
                self._tries.pop(part, None)
        return failure


@dataclass(frozen=True)
class _Tries:
    """What one try to make a part durable leaves to the next."""

    known: dict[str, str] = field(default_factory=dict)  # file name -> hash
    lock: threading.Lock = field(default_factory=threading.Lock)


def _persist(part: Path, known: dict[str, str], *, anew: bool) -> PersistFailure | None:
    try:
        make_durable(part, known, anew=anew)
    except OSError as error:
        failure: StorageError = storage_error("make durable", part, error)
        return PersistFailure(str(failure), failure.transient)
    except Exception as error:  # whatever it is: an answer that never came would make `report` wait for ever
        reason = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        return PersistFailure(reason, passing=False)
    return None
