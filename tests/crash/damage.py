"""Changes the files of a finished run, one byte at a time, and looks what the next `fit` makes of it."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast import train
from holdfast.errors import HoldfastError
from holdfast.train import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig

_STEPS = 3


def loop(config: dict[str, Any]) -> int:
    """Saves three small checkpoints; returns the step it was started from, or -1."""
    checkpoint = train.get_checkpoint()
    start = -1 if checkpoint is None else int(Path(checkpoint.path, "step").read_text())
    for step in range(start + 1, config["steps"]):
        with train.checkpoint_dir() as folder:
            Path(folder, "step").write_text(str(step))
            Path(folder, "weights").mkdir()
            Path(folder, "weights", "layer").write_bytes(bytes(range(40)))
            train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))
    return start


def fit(folder: Path, steps: int) -> tuple[int, str]:
    """Returns from which step the run began, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        result = DataParallelTrainer(
            loop,
            train_loop_config={"steps": steps},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=folder),
        ).fit()
    return result.return_value, said.getvalue()


def flip_every_byte(folder: Path, stride: int = 1) -> list[str]:
    """Flips bytes of every file of the newest checkpoint, its manifest included; returns what was wrong, in words."""
    pristine = _pristine(folder)
    newest = max(path.name for path in (pristine / "run").glob("checkpoint_*"))
    files = sorted(path.relative_to(pristine) for path in (pristine / "run" / newest).rglob("*") if path.is_file())
    wrong = []
    for file in files:
        size = (pristine / file).stat().st_size
        for position in range(0, size, min(stride, size)):
            for change in ("flip", "cut"):
                with _copy(pristine, folder) as copy:
                    data = bytearray((copy / file).read_bytes())
                    data[position] ^= 0x41
                    (copy / file).write_bytes(data[:position] if change == "cut" else data)
                    wrong += _fallback_is_wrong(copy, newest, f"{change} at byte {position} of {file}")
    return wrong


def _fallback_is_wrong(copy: Path, newest: str, what: str) -> list[str]:
    start, said = fit(copy, _STEPS - 1)
    wrong = []
    if start != _STEPS - 2:
        wrong.append(f"{what}: started from step {start}")
    if f"checkpoint {int(newest[-6:])}" not in said or "damaged" not in said.lower():
        wrong.append(f"{what}: not named in {said!r}")
    return wrong


def cut_journal_everywhere(folder: Path, stride: int = 1) -> list[str]:
    """Cuts the journal after each byte; returns what was wrong, in words.

    The run goes on from the newest checkpoint that is still named, says which are not, or says that it cannot go on.
    """
    pristine = _pristine(folder)
    (segment,) = (pristine / "run" / "journal").glob("*.jsonl")
    data = segment.read_bytes()
    wrong = []
    for length in range(0, len(data), stride):
        named = data[:length].count(b'"kind":"staged"') and _whole_lines_with(data[:length], b'"kind":"staged"')
        with _copy(pristine, folder) as copy:
            (copy / segment.relative_to(pristine)).write_bytes(data[:length])
            try:
                start, said = fit(copy, _STEPS)
            except HoldfastError as error:
                if named or "journal" not in str(error):
                    wrong.append(f"cut after {length} bytes: {error}")
                continue
            if start != named - 1:
                wrong.append(f"cut after {length} bytes: {named} checkpoints are named, started from step {start}")
            if named < _STEPS and "left alone" not in said:
                wrong.append(f"cut after {length} bytes: nobody said what was left alone: {said!r}")
    return wrong


def _whole_lines_with(data: bytes, words: bytes) -> int:
    return sum(words in line for line in data.split(b"\n")[:-1])


def _pristine(folder: Path) -> Path:
    pristine = folder / "pristine"
    fit(pristine, _STEPS)
    return pristine


@contextlib.contextmanager
def _copy(pristine: Path, folder: Path) -> Iterator[Path]:
    copy = folder / "copy"
    shutil.copytree(pristine, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


__all__ = ["cut_journal_everywhere", "flip_every_byte"]
