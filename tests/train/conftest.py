from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.store import CheckpointStore
from holdfast.storage.local import LocalStorage
from holdfast.train import CheckpointConfig, DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig


class Lab:
    """A folder for experiments, and a short way to run one there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notes = folder / "notes"
        self.notes.mkdir()

    def trainer(
        self,
        loop: Any,
        config: dict[str, Any] | None = None,
        *,
        workers: int = 2,
        name: str | None = "run",
        failures: FailureConfig | None = None,
        checkpoints: CheckpointConfig | None = None,
        resume_from: Any = None,
        **run: Any,
    ) -> DataParallelTrainer:
        return DataParallelTrainer(
            loop,
            train_loop_config={"notes": str(self.notes), **(config or {})},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                name=name,
                storage_path=self.folder,
                failure_config=failures or FailureConfig(),
                checkpoint_config=checkpoints or CheckpointConfig(),
                verbose=run.pop("verbose", 0),
                **run,
            ),
            resume_from_checkpoint=resume_from,
        )

    def fit(self, loop: Any, config: dict[str, Any] | None = None, **options: Any) -> Result:
        return self.trainer(loop, config, **options).fit()

    def starts(self) -> list[int]:
        return [int(line) for line in (self.notes / "starts").read_text().split()]

    def damage(self, name: str = "run") -> list[str]:
        """What is wrong with an experiment's checkpoints, and what was left over."""
        store = CheckpointStore(LocalStorage(self.folder / name))
        at = self.folder / name
        left = [f"{path.name} is left over" for path in (*at.glob(".staging"), *at.glob(".forgotten_*"))]
        return left + [problem for number in store.list() for problem in store.verify(number)]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)
