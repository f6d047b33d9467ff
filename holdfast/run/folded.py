"""What a run's records add up to: the durable half of its state, the same live and after a restart. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field

from holdfast.checkpoint.retention import Candidate, has_score
from holdfast.errors import JournalDamaged

Record = dict[str, Any]


class Held(Struct):
    """A checkpoint that was staged and is not forgotten."""

    number: int
    epoch: int
    attempt: int
    report: int
    iteration: int
    ranks: tuple[int, ...]
    metrics: Mapping[str, Any]
    size_bytes: int
    committed: bool = False
    committing: bool = False
    durable: set[int] = field(default_factory=set)
    staged_at: float = 0.0
    asked_at: float | None = None  # when the keeper was asked for it
    missed: bool = False  # whether it was said that the keeper takes long

    @property
    def is_durable(self) -> bool:
        return self.committed or self.durable.issuperset(self.ranks)


class Folded:
    """The fold of a run's records.

    Args:
        score_attribute: the metric by which checkpoints are kept, to see whether one ever had it.

    Attributes:
        held: the checkpoints that were staged and neither abandoned, damaged nor forgotten, by number.
        staged: those of them that are not committed, the oldest first.
        damaged: number -> what was wrong.
        next_number: the one that is given next.
        skipped: numbers below it that were never given.
        attempt, iteration, metrics: of the last attempt and the last report.
        return_value: of rank 0, once the run has finished.
        scored: whether a committed checkpoint ever had a score.
    """

    def __init__(self, score_attribute: str | None = None) -> None:
        self._score_attribute = score_attribute
        self.held: dict[int, Held] = {}
        self.staged: dict[int, Held] = {}
        self.damaged: dict[int, str] = {}
        self.next_number = 0
        self.skipped: list[range] = []
        self.attempt = 0
        self.iteration = 0
        self.metrics: Mapping[str, Any] = {}
        self.return_value: Any = None
        self.scored = False

    @property
    def committed(self) -> list[Held]:
        """The checkpoints that exist, the newest last."""
        return [held for _, held in sorted(self.held.items()) if held.committed]

    @property
    def candidates(self) -> list[Candidate]:
        return [Candidate(held.number, held.metrics) for held in self.committed]

    def was_let_go(self, number: int) -> bool:
        """Returns whether the journal gave this number and has forgotten or abandoned it."""
        given = number < self.next_number and not any(number in skipped for skipped in self.skipped)
        return given and number not in self.held and number not in self.damaged

    def add(self, record: Record) -> None:
        """Takes in one record of the journal.

        Raises:
            JournalDamaged: it does not fit the ones before it.
        """
        fold = getattr(self, f"_fold_{record.get('kind')}", None)
        if fold is None:  # records that carry no state: `run`, `attempt_failed`
            return
        try:
            fold(record)
        except (KeyError, TypeError, ValueError) as error:
            raise JournalDamaged(f"the record {record!r} does not fit the ones before it ({error!r})") from error

    def _fold_attempt(self, record: Record) -> None:
        self.attempt = int(record["attempt"])
        self.iteration = int(record["iteration"])

    def _fold_report(self, record: Record) -> None:
        if record["iteration"] >= self.iteration:  # else rank 0, which did not wait, has been further already
            self.iteration = record["iteration"]
            self.metrics = record["metrics"]

    def _fold_staged(self, record: Record) -> None:
        self._fold_report(record)
        number = int(record["number"])
        self.next_number = max(self.next_number, number + 1)
        # Whole numbers only: they are made into paths, and a journal may come from anywhere.
        self.held[number] = self.staged[number] = Held(
            number=number,
            epoch=int(record["epoch"]),
            attempt=int(record["attempt"]),
            report=int(record["report"]),
            iteration=int(record["iteration"]),
            ranks=tuple(int(rank) for rank in record["parts"]),
            metrics=record["metrics"],
            size_bytes=record["size_bytes"],
            staged_at=record["time"],
        )

    def _fold_committed(self, record: Record) -> None:
        held = self.staged.pop(record["number"])
        held.committed = True
        held.size_bytes = record["size_bytes"]
        attribute = self._score_attribute
        self.scored = self.scored or (attribute is not None and has_score(held.metrics, attribute))

    def _fold_abandoned(self, record: Record) -> None:
        del self.held[record["number"]], self.staged[record["number"]]

    def _fold_damaged(self, record: Record) -> None:
        del self.held[record["number"]]
        self.damaged[record["number"]] = record["why"]

    def _fold_forgotten(self, record: Record) -> None:
        for number in record["numbers"]:
            del self.held[number]

    def _fold_skipped(self, record: Record) -> None:
        self.skipped.append(range(self.next_number, record["next_number"]))
        self.next_number = record["next_number"]

    def _fold_finished(self, record: Record) -> None:
        self.return_value = record["return_value"]
