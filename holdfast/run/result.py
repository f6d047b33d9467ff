"""What a run has kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.run.state import Record

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Result:
    """What a run has kept.

    Attributes:
        metrics: of the last report of rank 0.
        checkpoint: the newest committed one, or None.
        best_checkpoints: `(checkpoint, metrics)` of the best `num_to_keep`, the best last; without a
            `checkpoint_score_attribute` the most recent; all with `num_to_keep=None`.
        path: the run's folder.
        error: why it ended without finishing, or None.
        return_value: what rank 0's training function returned, if it is plain data.
        config: the configuration the training function got.
    """

    metrics: Mapping[str, Any]
    checkpoint: Checkpoint | None
    best_checkpoints: list[tuple[Checkpoint, Mapping[str, Any]]]
    path: str
    error: Exception | None = None
    return_value: Any = None
    config: Mapping[str, Any] | None = None
    records: Callable[[], list[Record]] = field(default=list, repr=False, compare=False)

    @property
    def metrics_dataframe(self) -> pandas.DataFrame:
        """All reports of rank 0 as a table, one row for each step: what a later attempt did again is there once.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Result.metrics_dataframe needs pandas: pip install 'holdfast[pandas]'") from error
        return pandas.DataFrame(history(self.records()))


def history(records: list[Record]) -> list[dict[str, Any]]:
    """Returns the metrics of each step, in order, with `training_iteration`, `attempt` and `timestamp`.

    An attempt that goes on from step 5 takes the place of what an earlier one reported after step 5.
    """
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["kind"] == "attempt":
            rows = {step: row for step, row in rows.items() if step <= record["iteration"]}
        elif record["kind"] in ("report", "staged"):
            step = record["iteration"]
            origin = {"training_iteration": step, "attempt": record["attempt"], "timestamp": record["time"]}
            rows[step] = {**_flat(record["metrics"]), **origin}
    return [row for _, row in sorted(rows.items())]


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat
