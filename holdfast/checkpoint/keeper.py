"""The keeper: makes staged parts durable in the background, and nothing else.

It never commits and never deletes; only the journal's owner does. It saves time, it is never safety: what it did not
do, the next owner's does. `holdfast.run.keeper` is the process it lives in, one for each experiment and node.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.transfer import Tries, make_durable
from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.local import storage_error


@dataclass(frozen=True)
class PersistFailure:
    """Why a part could not be made durable. `passing`: another try may succeed."""

    reason: str
    passing: bool


class Keeper:
    """Makes parts durable; remembers, from one try to the next, what the earlier one found out."""

    def __init__(self) -> None:
        self._asked: dict[Path, _Asked] = {}
        self._lock = threading.Lock()

    def persist(self, part: Path) -> PersistFailure | None:
        """Makes a staged part durable; returns why not, or None when it is.

        Any number of threads may call it; of two calls for the same part the second waits for the first.
        """
        with self._lock:
            asked = self._asked.setdefault(part, _Asked())
        with asked.lock:
            failure = _persist(part, asked.tries)
        if failure is None or not failure.passing:
            with self._lock:
                self._asked.pop(part, None)
        return failure


@dataclass(frozen=True)
class _Asked:
    tries: Tries = field(default_factory=Tries)
    lock: threading.Lock = field(default_factory=threading.Lock)


def _persist(part: Path, tries: Tries) -> PersistFailure | None:
    try:
        make_durable(part, tries)
    except StorageError as error:
        return PersistFailure(str(error), error.transient)
    except OSError as error:
        failure: StorageError = storage_error("make durable", part, error)
        return PersistFailure(str(failure), failure.transient)
    except Exception as error:  # whatever it is: an answer that never came would make `report` wait for ever
        reason = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        return PersistFailure(reason, passing=False)
    return None
