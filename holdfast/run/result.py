"""What a run has kept."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.retention import Candidate, Retention, best, has_score, rank
from holdfast.checkpoint.store import CheckpointStore
from holdfast.errors import ConfigError, ExperimentError, TrainingFailedError
from holdfast.run.folded import Folded, Record
from holdfast.storage import journal
from holdfast.storage.local import LocalStorage

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

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Result:
        """Opens what a run has kept, finished or not. Nothing is run, nothing is written.

        Raises:
            ExperimentError: there is no run at `path`.
        """
        storage = LocalStorage(os.path.expanduser(path))
        records = journal.read(storage)
        about = [record for record in records if record["kind"] == "run"]
        if not about:
            raise ExperimentError(f"there is no run at {storage.root}: give the folder that holds its journal")
        folded = Folded()
        for record in records:
            folded.add(record)
        result = result_of(folded, Retention(**about[-1]["retention"]), CheckpointStore(storage))
        last = next(record for record in reversed(records) if record["kind"] in ("run", "finished", "failed"))
        if last["kind"] == "failed":
            return replace(result, error=TrainingFailedError(last["why"], result=result))
        return result

    def get_best_checkpoint(self, metric: str, mode: Literal["max", "min"]) -> Checkpoint:
        """Returns the kept checkpoint with the best `metric`; of equal ones the most recent.

        Args:
            metric: its name; `"eval/loss"` finds nested ones.
            mode: `"max"` or `"min"`.

        Raises:
            ConfigError: no kept checkpoint was reported with it, or `mode` is neither.
        """
        retention = Retention(None, metric, mode)
        kept = dict(enumerate(self.best_checkpoints))
        scored = [Candidate(n, metrics) for n, (_, metrics) in kept.items() if has_score(metrics, metric)]
        if not scored:
            there = sorted({name for _, metrics in self.best_checkpoints for name in metrics})
            raise ConfigError(f"no kept checkpoint has a number {metric!r}; there are: {', '.join(there) or 'none'}")
        return kept[rank(scored, retention)[-1]][0]

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


def result_of(folded: Folded, retention: Retention, store: CheckpointStore) -> Result:
    """Returns what a run has kept; a store in a directory."""
    metrics = {held.number: held.metrics for held in folded.committed}
    newest = max(metrics, default=None)
    return Result(
        metrics=folded.metrics,
        checkpoint=None if newest is None else store.open(newest),
        best_checkpoints=[(store.open(number), metrics[number]) for number in best(folded.candidates, retention)],
        path=str(getattr(store.storage, "root", store.storage.url)),
        return_value=folded.return_value,
        records=functools.partial(journal.read, store.storage),
    )


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
            flat = _flat(record["metrics"])
            rows[step] = {**flat, **origin, **flat}  # the user's metric goes before a column of ours with its name
    return [row for _, row in sorted(rows.items())]


def _flat(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{name}/"))
        else:
            flat[prefix + name] = value
    return flat
