"""The folder of an experiment: what kind it is, and whether it may be gone on with."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import AlreadyExists, ConfigError, ExperimentError, NotFound
from holdfast.plain import Plain, decode, encode
from holdfast.run.config import Resume, RunConfig, default_root
from holdfast.storage import open_storage
from holdfast.storage.local import LocalStorage, is_temporary

FILE = "experiment.json"
VERSION = 1


@dataclass(frozen=True)
class Experiment:
    """All that is kept under a name.

    Attributes:
        name: the experiment's.
        storage: its folder.
        exists: whether an earlier `fit` has begun it.
    """

    name: str
    storage: LocalStorage
    exists: bool

    @property
    def root(self) -> Path:
        return self.storage.root


def find(config: RunConfig, kind: str, function_name: str) -> Experiment:
    """Looks where an experiment is, or would be; writes nothing.

    Args:
        config: names it and says whether it may or must exist.
        kind: `"train"` or `"tune"`.
        function_name: of the training function.

    Raises:
        ConfigError: the storage cannot be written.
        ExperimentError: it exists and must not, or does not and must, or is another one.
    """
    name = config.name or fresh_name(function_name)
    root = open_storage(default_root() if config.storage_path is None else os.fspath(config.storage_path))
    assert isinstance(root, LocalStorage)
    _require_writable(root.root)
    experiment = LocalStorage(root.root / name)
    there = _read(experiment)
    _require_resumable(experiment, there, config.resume)
    if there is not None:
        _require_same(experiment, there, kind, function_name)
    return Experiment(name, experiment, there is not None)


def begin(experiment: Experiment, kind: str, function_name: str) -> None:
    """Writes down what an experiment is, if nobody has."""
    about = {
        "version": VERSION,
        "kind": kind,
        "name": experiment.name,
        "function": function_name,
        "created": time.time(),
    }
    try:
        experiment.storage.put(FILE, encode(about) + b"\n", if_absent=True)
    except AlreadyExists:
        there = _read(experiment.storage)
        assert there is not None
        _require_same(experiment.storage, there, kind, function_name)


def fresh_name(function_name: str) -> str:
    """Returns a name no other `fit` gets: dated for people, with the process and a random part."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    return f"{function_name.strip('<>')}_{stamp}_{os.urandom(3).hex()}"


def _read(storage: LocalStorage) -> Plain:
    try:
        about = decode(storage.get(FILE))
    except NotFound:
        return None
    except ValueError as error:
        raise ExperimentError(
            f"{storage.root / FILE} is damaged ({error}): restore it from a copy, or move it away"
        ) from error
    version = about.get("version") if isinstance(about, dict) else None
    if version != VERSION:
        raise ExperimentError(f"{storage.root / FILE} has format {version}; this holdfast reads format {VERSION}")
    return about


def _require_writable(root: Path) -> None:
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError(f"storage_path {root} cannot be a folder: {nearest} is a file")
    try:
        # A file without a name: `os.access` says yes to root on a file system that takes no files.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ConfigError(f"storage_path {root} cannot be written: {nearest}: {error.strerror}") from error


def _require_resumable(storage: LocalStorage, there: Plain, resume: Resume) -> None:
    if there is None and resume == "must":
        raise ExperimentError(f"resume='must', but there is no experiment at {storage.root}")
    if there is not None and resume == "never":
        raise ExperimentError(
            f"resume='never', but there is an experiment at {storage.root}: choose another name, or go on with 'auto'"
        )
    if there is None and storage.root.exists() and not _only_a_beginning(storage.root):
        raise ExperimentError(f"{storage.root} holds something that is no experiment: choose another name, or move it")


def _only_a_beginning(root: Path) -> bool:
    """Whether a driver died here before it had written what the experiment is: a temporary file at most."""
    return root.is_dir() and all(is_temporary(name) for name in os.listdir(root))


def _require_same(storage: LocalStorage, there: Plain, kind: str, function_name: str) -> None:
    for what, asked in (("kind", kind), ("function", function_name)):
        if there[what] != asked:
            raise ExperimentError(
                f"the experiment at {storage.root} has {what} {there[what]!r}, not {asked!r}. Choose another name; to "
                "go on from a checkpoint there, give it as resume_from_checkpoint"
            )
