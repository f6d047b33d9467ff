"""After a failure, what next? Pure."""

from __future__ import annotations

from typing import Literal

from holdfast.run.config import FailureConfig

Next = Literal["restart", "fail"]


def after_failure(config: FailureConfig, failures: int) -> Next:
    """Says what follows the `failures`-th failure of this `fit`: the workers start again, or the run fails."""
    return "restart" if config.max_failures == -1 or failures <= config.max_failures else "fail"
