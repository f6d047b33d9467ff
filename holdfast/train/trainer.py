"""Trainers: a training function, how many workers, where it is kept; `fit` carries it out."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from holdfast import events
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.store import CheckpointStore
from holdfast.engines.base import Engine, ProcessSpec
from holdfast.engines.in_process import InProcessEngine
from holdfast.engines.local import LocalEngine
from holdfast.engines.logs import LogFollower
from holdfast.errors import ConfigError, EngineError, ExperimentError, OwnershipLost, StorageError, TrainingFailedError
from holdfast.observers.terminal import TerminalObserver
from holdfast.run import experiment
from holdfast.run.config import RunConfig, RunSpec, ScalingConfig
from holdfast.run.controller import WORKER, Ownership, Place, RunController, now
from holdfast.run.experiment import Experiment
from holdfast.run.result import Result, result_of
from holdfast.run.worker import takes_config
from holdfast.storage import journal
from holdfast.storage.journal import Journal, Record

_KIND = "train"
_INTERRUPTED = "stopped by Ctrl-C: what was reported is kept; the same script goes on from there"


class DataParallelTrainer:
    """Runs a training function on several workers, and starts them again from the newest checkpoint when one dies.

    Args:
        train_loop_per_worker: what each worker does; takes `train_loop_config` or nothing.
        train_loop_config: its configuration.
        scaling_config: how many workers, and what each may use.
        run_config: the name, where it is kept, what happens after failures.
        resume_from_checkpoint: where to start from as long as the run has no checkpoint of its own.

    Raises:
        ConfigError: an argument that cannot be; nothing was written.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., object],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        self._scaling = _of_kind(scaling_config, ScalingConfig)
        self._config = _of_kind(run_config, RunConfig)
        if train_loop_config is not None and not isinstance(train_loop_config, Mapping):
            raise ConfigError(f"train_loop_config is a {type(train_loop_config).__name__}; it must be a dict")
        if resume_from_checkpoint is not None and not isinstance(resume_from_checkpoint, Checkpoint):
            raise ConfigError(f"resume_from_checkpoint is a {type(resume_from_checkpoint).__name__}, not a Checkpoint")
        _require_callable(train_loop_per_worker)
        self._train_loop = train_loop_per_worker
        self._train_loop_config = train_loop_config
        self._resume_from = resume_from_checkpoint
        if self._scaling.num_workers > 0:
            LocalEngine.prepare([*sys.modules, *self.frameworks], max(1, int(self._scaling.cpus_per_worker)))

    frameworks: Sequence[str] = ()
    """Modules that workers need besides those the script has imported."""

    def wrap(self, train_loop: Callable[..., object]) -> Callable[..., object]:
        """Returns what workers call; a framework's trainer puts its set-up around the training function here."""
        return train_loop

    @property
    def function_name(self) -> str:
        """The training function's name: by it, one experiment is told from another."""
        return str(getattr(self._train_loop, "__name__", type(self._train_loop).__name__))

    def run_spec(self, params: Mapping[str, Any] | None = None) -> RunSpec:
        """Returns this trainer's run as a value.

        Args:
            params: take the place of what `train_loop_config` has under the same names.

        Raises:
            ConfigError: the training function, or its configuration, cannot be pickled.
        """
        config = (
            None
            if self._train_loop_config is None and not params
            else {**(self._train_loop_config or {}), **(params or {})}
        )
        start = self._resume_from
        if start is not None and not Path(start.path).is_dir():
            raise ConfigError(f"resume_from_checkpoint is {start}, but there is no such directory")
        return RunSpec(
            function=_pickled(self.wrap(self._train_loop), config, self.function_name),
            function_name=self.function_name,
            scaling=self._scaling,
            failures=self._config.failure_config,
            checkpoints=self._config.checkpoint_config,
            env=dict(self._config.worker_env),
            report_timeout_s=self._config.report_timeout_s,
            start_from=None if start is None else start.path,
            config=config,
        )

    def fit(self) -> Result:
        """Carries the run out, from the newest checkpoint if there is one under its name; returns what it has kept.

        Raises:
            ConfigError, ExperimentError: it cannot be, or not under this name; nothing was written.
            TrainingFailedError: it ended without finishing; carries the Result and each rank's traceback.
        """
        spec = self.run_spec()
        found = experiment.find(self._config, _KIND, self.function_name)
        if spec.scaling.num_workers == 0:
            in_process = InProcessEngine()
            return in_process.run(lambda: _carry_out(spec, found, self._config, in_process))
        engine = LocalEngine()
        _require_resources(engine, spec)
        return _carry_out(spec, found, self._config, engine)


def _carry_out(spec: RunSpec, found: Experiment, config: RunConfig, engine: Engine) -> Result:
    with contextlib.ExitStack() as ending:
        ending.callback(engine.close)
        store = CheckpointStore(found.storage)
        _require_journal(store, found)
        owned = Journal.open(found.storage, takeover=config.resume == "takeover")
        ending.callback(_let_go, owned)
        experiment.begin(found, _KIND, spec.function_name)
        place = Place(found.name, found.root, found.root)
        controller = RunController(
            spec, place, store, engine, Ownership(owned.epoch, owned.sync, owned.look), owned.earlier
        )
        ending.callback(controller.close)
        owned.append([_about(spec, found)])
        observers: list[events.Observer] = [TerminalObserver(sys.stdout, config.verbose)]
        began = now()
        _deliver(observers, [events.RunStarted(found.name, str(found.root), found.exists, spec.world_size, time=began)])
        with _following(place, spec, config.verbose) as logs, _interruptible(engine) as interrupted:
            _drive(controller, owned, [logs, *observers], interrupted)
        owned.sync()
        result = _result(spec, place, store, controller)
        _deliver(observers, [_last_event(controller, result, began)])
        if interrupted.is_set():
            raise KeyboardInterrupt(_INTERRUPTED)
        if result.error is not None:
            raise result.error
        return result


def _let_go(owned: Journal) -> None:
    # All that matters was synced before: what this cannot say must not take the place of a result or an error.
    with contextlib.suppress(StorageError, OwnershipLost):
        owned.close()


def _require_journal(store: CheckpointStore, found: Experiment) -> None:
    there = store.list()
    if there and not any(record["kind"] == "staged" for record in journal.read(found.storage)):
        raise ExperimentError(
            f"{found.root} has {len(there)} checkpoints, but its journal names none: it was lost or cut. Restore "
            f"{found.root / 'journal'} from a copy, or begin under another name with "
            f"resume_from_checkpoint={store.open(there[-1])!r}"
        )


def _drive(
    controller: RunController, owned: Journal, observers: list[events.Observer], interrupted: threading.Event
) -> None:
    """The loop of a run: what has happened is collected, written, and only then obeyed."""
    told = False
    while True:
        records = controller.collect()
        if records:
            _append(owned, records, controller, observers)
        _deliver(observers, controller.obey())
        if controller.ended:
            return
        if interrupted.is_set() and not told:
            told = True
            controller.interrupt(_INTERRUPTED)
        else:
            controller.wait()


def _append(owned: Journal, records: list[Record], controller: RunController, observers: list[events.Observer]) -> None:
    """Writes records, and waits for a full disk as long as the configuration says: nothing is obeyed meanwhile."""
    deadline, told = now() + controller.waits_for_storage_s, ""
    while True:
        try:
            owned.append(records)
            break
        except StorageError as error:
            if not error.transient or now() >= deadline:
                raise
            if not told:
                told = f"storage to take the journal ({error})"
                _deliver(observers, [events.Waiting(told, time=now())])
        time.sleep(0.25)
    if told:
        _deliver(observers, [events.WaitingOver(told, time=now())])


@contextlib.contextmanager
def _interruptible(engine: Engine) -> Iterator[threading.Event]:
    """Ctrl-C sets the event that is returned; a second one is an exception, as usual.

    An exception at once could come in the middle of a message to a worker.
    """
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # no worker processes, or a thread of the user's
        yield interrupted
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        engine.wake()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _about(spec: RunSpec, found: Experiment) -> dict[str, Any]:
    return {
        "kind": "run",
        "time": now(),
        "function": spec.function_name,
        "world_size": spec.world_size,
        "resources": {"CPU": spec.scaling.cpus_per_worker, "GPU": spec.scaling.gpus_per_worker},
        "resumed": found.exists,
        "retention": vars(spec.checkpoints.retention),
    }


def _deliver(observers: Sequence[events.Observer], happened: Sequence[events.Event]) -> None:
    for event in happened:
        events.deliver(observers, event)


class _LogsFirst:
    """Shows what workers have printed before it is said that they failed, or have finished."""

    def __init__(self, follower: LogFollower | None) -> None:
        self._follower = follower

    def on_event(self, event: events.Event) -> None:
        if self._follower and isinstance(event, (events.AttemptFailed, events.RunFailed, events.RunFinished)):
            self._follower.drain()


@contextlib.contextmanager
def _following(place: Place, spec: RunSpec, verbose: int) -> Iterator[_LogsFirst]:
    if verbose == 0 or spec.scaling.num_workers == 0:
        yield _LogsFirst(None)
        return
    ranks = range(spec.world_size)
    stdout, stderr = ({rank: place.log(rank, stream) for rank in ranks} for stream in ("stdout", "stderr"))
    follower = LogFollower(stdout, stderr)
    follower.start()
    try:
        yield _LogsFirst(follower)
    finally:
        follower.stop()


def _result(spec: RunSpec, place: Place, store: CheckpointStore, controller: RunController) -> Result:
    state = controller.state
    result = replace(result_of(state.folded, spec.checkpoints.retention, store), config=spec.config)
    if state.goal == "finish":
        return result
    message = _failure_message(state.reason, state.failures, place)
    error = TrainingFailedError(message, result=result, failures=state.failures)
    error.result = failed = replace(result, error=error)
    return failed


def _failure_message(reason: str, failures: Mapping[int, str], place: Place) -> str:
    ranks = "".join(f"\n\nrank {rank}:\n{text}" for rank, text in sorted(failures.items()))
    return f"{reason}.{ranks}\n\nWhat was committed is kept in {place.folder}."


def _last_event(controller: RunController, result: Result, began: float) -> events.Event:
    state = controller.state
    if result.error is not None:
        return events.RunFailed(result.path, state.reason, time=now())
    return events.RunFinished(result.path, state.attempts_here, len(state.folded.committed), now() - began, time=now())


def _of_kind(value: Any, kind: type[Any]) -> Any:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ConfigError(f"{value!r} is given where a {kind.__name__} belongs")
    return value


def _require_callable(train_loop: object) -> None:
    if not callable(train_loop) or isinstance(train_loop, type):
        what = f"the class {train_loop.__name__}" if isinstance(train_loop, type) else f"a {type(train_loop).__name__}"
        raise ConfigError(f"train_loop_per_worker is {what}; it must be a function, or an object that can be called")
    try:
        takes_config(train_loop)
    except TypeError as error:
        raise ConfigError(f"train_loop_per_worker cannot be called: {error}") from error


def _require_resources(engine: LocalEngine, spec: RunSpec) -> None:
    scaling = spec.scaling
    rank = ProcessSpec(WORKER, b"", "rank", cpus=scaling.cpus_per_worker, gpus=scaling.gpus_per_worker)
    try:
        engine.check([rank] * spec.world_size)
    except EngineError as error:
        engine.close()
        raise ConfigError(str(error)) from error


def _pickled(train_loop: Callable[..., object], config: Mapping[str, Any] | None, name: str) -> bytes:
    import cloudpickle  # here: it takes 20 ms, which a script that only reads results does not owe

    buffer = io.BytesIO()
    try:
        cloudpickle.CloudPickler(buffer).dump((train_loop, config))
    except Exception as error:
        _refuse_pickle(name, config, error)
    return buffer.getvalue()


def _refuse_pickle(name: str, config: Mapping[str, Any] | None, error: Exception) -> NoReturn:
    import cloudpickle

    what = f"the training function {name}, or something it uses,"
    for key, value in (config or {}).items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            what = f"train_loop_config[{key!r}], a {type(value).__name__},"
    raise ConfigError(
        f"{what} cannot be sent to workers: {error}. Make such objects (open files, locks, connections) inside "
        "the training function"
    ) from error
