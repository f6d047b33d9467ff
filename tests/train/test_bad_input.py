"""What cannot be is said clearly, before anything is written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from holdfast import train
from holdfast.errors import ConfigError, DriverAlive, ExperimentError
from holdfast.train import Checkpoint, CheckpointConfig, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from tests.train import loops


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (ScalingConfig, {"num_workers": -1}, "num_workers is -1"),
        (ScalingConfig, {"num_workers": 1.5}, "num_workers is 1.5"),
        (ScalingConfig, {"resources_per_worker": {"TPU": 1}}, "'CPU' and 'GPU'"),
        (ScalingConfig, {"resources_per_worker": {"CPU": "2"}}, "must be a number"),
        (ScalingConfig, {"use_gpu": True, "resources_per_worker": {"GPU": 0}}, "contradict"),
        (ScalingConfig, {"resources_per_worker": {"GPU": 1}}, "contradict"),
        (FailureConfig, {"max_failures": -2}, "max_failures is -2"),
        (FailureConfig, {"on_storage_error": "retry"}, "'wait', 'fail'"),
        (FailureConfig, {"storage_deadline_s": 0}, "storage_deadline_s"),
        (CheckpointConfig, {"num_to_keep": 0}, "num_to_keep is 0"),
        (CheckpointConfig, {"checkpoint_score_order": "up"}, "'max', 'min'"),
        (CheckpointConfig, {"checkpoint_score_attribute": ""}, "name of a metric"),
        (CheckpointConfig, {"verify": "none"}, "'full', 'sizes'"),
        (RunConfig, {"name": "a/b"}, "name of a folder"),
        (RunConfig, {"name": ""}, "name of a folder"),
        (RunConfig, {"name": ".."}, "name of a folder"),
        (RunConfig, {"resume": "yes"}, "'auto', 'must', 'never', 'takeover'"),
        (RunConfig, {"resume": "must"}, "without a name"),
        (RunConfig, {"verbose": 3}, "verbose is 3"),
        (RunConfig, {"worker_env": {"A": 1}}, "worker_env"),
        (RunConfig, {"failure_config": {"max_failures": 1}}, "FailureConfig belongs"),
        (RunConfig, {"report_timeout_s": -1}, "report_timeout_s"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_when_it_is_said(kind, arguments, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        kind(**arguments)


def needs_two(config, more):
    """Not a training function."""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train_loop_per_worker": "train"}, "must be a function"),
        ({"train_loop_per_worker": needs_two}, r"needs \(config, more\)"),
        ({"train_loop_per_worker": loops.count, "train_loop_config": [1]}, "must be a dict"),
        ({"train_loop_per_worker": loops.count, "scaling_config": {"num_workers": 2}}, "ScalingConfig belongs"),
        ({"train_loop_per_worker": loops.count, "run_config": "here"}, "RunConfig belongs"),
        ({"train_loop_per_worker": loops.count, "resume_from_checkpoint": "here"}, "not a Checkpoint"),
    ],
)
def test_a_trainer_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        DataParallelTrainer(**arguments)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"lock": threading.Lock()}, {}, r"train_loop_config\['lock'\], a lock, cannot be sent"),
        ({}, {"workers": 10_000}, "10000 workers"),
        ({}, {"resume_from": Checkpoint("/nowhere/at/all")}, "no such directory"),
    ],
)
def test_a_run_that_cannot_be_writes_nothing(lab, config, options, words):
    with pytest.raises(ConfigError, match=words):
        lab.fit(loops.count, {"steps": 1, **config}, **options)
    assert sorted(os.listdir(lab.folder)) == ["notes"]


def test_a_function_that_cannot_be_sent_to_workers_is_named(lab):
    lock = threading.Lock()

    def holds_a_lock() -> None:
        with lock:
            pass

    with pytest.raises(ConfigError, match="training function holds_a_lock, or something it uses"):
        lab.fit(holds_a_lock)


def test_a_storage_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = DataParallelTrainer(
        loops.count, run_config=RunConfig(name="run", storage_path=tmp_path / "file", verbose=0)
    )
    with pytest.raises(ConfigError, match="is a file"):
        trainer.fit()


def test_a_storage_path_on_a_read_only_file_system_is_refused():
    trainer = DataParallelTrainer(
        loops.count, run_config=RunConfig(name="run", storage_path="/proc/holdfast", verbose=0)
    )
    with pytest.raises(ConfigError, match=r"cannot be written|cannot be a folder"):
        trainer.fit()


def test_an_object_store_is_refused_for_now():
    trainer = DataParallelTrainer(
        loops.count, run_config=RunConfig(name="run", storage_path="s3://bucket/x", verbose=0)
    )
    with pytest.raises(ConfigError, match="object store"):
        trainer.fit()


def test_another_function_under_the_same_name_is_refused(lab):
    lab.fit(loops.count, {"steps": 1})
    with pytest.raises(ExperimentError, match=r"'count', not 'every_rank_saves'"):
        lab.fit(loops.every_rank_saves, {"steps": 1})


def test_an_experiment_of_another_kind_is_refused(lab):
    lab.fit(loops.count, {"steps": 1})
    about = lab.folder / "run" / "experiment.json"
    about.write_text(about.read_text().replace('"train"', '"tune"'))
    with pytest.raises(ExperimentError, match=r"kind 'tune', not 'train'"):
        lab.fit(loops.count, {"steps": 1})


def test_an_experiment_that_must_exist_or_must_not_is_looked_for(lab):
    with pytest.raises(ExperimentError, match="there is no experiment"):
        lab.fit(loops.count, {"steps": 1}, resume="must")
    assert sorted(os.listdir(lab.folder)) == ["notes"]
    lab.fit(loops.count, {"steps": 1}, resume="never")
    with pytest.raises(ExperimentError, match="there is an experiment"):
        lab.fit(loops.count, {"steps": 1}, resume="never")
    lab.fit(loops.count, {"steps": 1}, resume="must")


def test_a_folder_that_is_no_experiment_is_left_alone(lab):
    (lab.folder / "run").mkdir()
    (lab.folder / "run" / "thesis.tex").write_text("x")
    with pytest.raises(ExperimentError, match="no experiment"):
        lab.fit(loops.count, {"steps": 1})
    assert os.listdir(lab.folder / "run") == ["thesis.tex"]


def test_a_journal_that_was_lost_is_not_silently_started_afresh(lab):
    lab.fit(loops.count, {"steps": 2})
    for segment in (lab.folder / "run" / "journal").iterdir():
        segment.unlink()
    with pytest.raises(ExperimentError, match="journal"):
        lab.fit(loops.count, {"steps": 2})


def test_a_driver_that_is_alive_is_not_shut_out_unless_it_is_asked_for(lab):
    script = (
        "import sys; from holdfast.storage.journal import Journal; from holdfast.storage.local import LocalStorage\n"
        "journal = Journal.open(LocalStorage(sys.argv[1])); print('owner', flush=True); sys.stdin.read()"
    )
    lab.fit(loops.count, {"steps": 1})
    with subprocess.Popen(
        [sys.executable, "-c", script, str(lab.folder / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"owner\n"
        with pytest.raises(DriverAlive, match=str(other.pid)):
            lab.fit(loops.count, {"steps": 2})
        assert lab.fit(loops.count, {"steps": 2}, resume="takeover").metrics == {"step": 1}
        other.kill()


def test_an_unknown_argument_of_report_is_refused():
    with pytest.raises(TypeError):
        train.report({}, chekpoint=None)
