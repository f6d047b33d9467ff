"""One run on two workers: what is reported, what is kept, what survives."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast import train
from holdfast.errors import ConfigError, ExperimentError, OutsideRunError
from holdfast.train import Checkpoint, CheckpointConfig, FailureConfig, TrainingFailedError
from tests.train import loops


def files_of(checkpoint: Checkpoint | None) -> list[str]:
    assert checkpoint is not None
    return sorted(name for name in os.listdir(checkpoint.path) if not name.startswith("."))


def test_a_run_keeps_its_metrics_its_checkpoints_and_what_it_returned(lab):
    result = lab.fit(loops.count, {"steps": 3})
    assert result.metrics == {"step": 2}
    assert result.checkpoint is not None
    assert files_of(result.checkpoint) == ["rank0", "step"]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [0, 1, 2]
    assert result.return_value == "did 3 steps"
    assert result.error is None
    assert result.path == str(lab.folder / "run")
    assert result.config is not None
    assert result.config["steps"] == 3
    assert lab.damage() == []


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_after_a_worker_died_the_run_goes_on_from_the_newest_checkpoint(lab, how, failing_rank):
    config = {"steps": 5, "fail_at": 2, "how": how, "failing_rank": failing_rank}
    result = lab.fit(loops.count, config, failures=FailureConfig(max_failures=1))
    assert result.metrics == {"step": 4}
    start, resumed = lab.starts()
    assert start == 0
    assert resumed == 3, "what the failed rank had reported was staged, although rank 1 does not wait for rank 0"
    assert lab.damage() == []


def test_what_rank_0_has_reported_is_kept_although_it_dies_and_rank_1_had_nothing_to_give(lab):
    lab.fit(loops.killed_right_after_report, failures=FailureConfig(max_failures=1))
    assert (lab.notes / "start1").exists()
    assert lab.damage() == []


def test_a_report_that_rank_1_never_reached_is_not_a_checkpoint(lab):
    result = lab.fit(loops.killed_before_report, failures=FailureConfig(max_failures=1))
    assert not (lab.notes / "second-returned-from-0").exists()
    assert (lab.notes / "second-returned-from-1").exists()
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [0, 1, 2]
    assert lab.damage() == []


def test_the_parts_of_all_ranks_are_one_directory(lab):
    result = lab.fit(loops.every_rank_saves, {"steps": 2})
    assert files_of(result.checkpoint) == ["rank0", "rank1", "step"]
    assert lab.damage() == []


def test_of_different_files_with_one_name_the_lowest_ranks_is_kept_and_a_warning_names_both(lab, capsys):
    result = lab.fit(loops.conflicting, verbose=1)
    assert files_of(result.checkpoint) == ["different", "own0", "own1", "same"]
    assert Path(result.checkpoint.path, "different").read_text() == "of rank 0"
    warnings = [line for line in capsys.readouterr().out.splitlines() if "different: rank" in line]
    assert len(warnings) == 1
    assert "rank 0" in warnings[0]
    assert "rank 1" in warnings[0]


def test_a_failed_run_raises_with_its_result_and_each_ranks_own_traceback(lab):
    with pytest.raises(TrainingFailedError, match="max_failures=0") as raised:
        lab.fit(loops.count, {"steps": 5, "fail_at": 2})
    error = raised.value
    assert error.result.error is error
    assert error.result.metrics["step"] in (2, 3)
    assert error.result.checkpoint is not None
    trace = error.failures[0].splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert "loops.py" in trace[1], "the user's own frame comes first"
    assert trace[-1] == "RuntimeError: rank 0 fails at step 2"
    assert "rank 0 fails at step 2" in str(error)


def test_a_second_fit_under_the_same_name_goes_on_where_the_first_has_stopped(lab):
    lab.fit(loops.count, {"steps": 2})
    result = lab.fit(loops.count, {"steps": 4})
    assert lab.starts() == [0, 2]
    assert [metrics["step"] for _, metrics in result.best_checkpoints] == [0, 1, 2, 3]
    again = lab.fit(loops.count, {"steps": 4})
    assert lab.starts() == [0, 2, 4]
    assert again.metrics == {"step": 3}, "a loop with nothing left keeps the last metrics"


def test_a_failed_run_is_gone_on_with_and_its_budget_counts_anew(lab):
    for fail_at in (0, 1):
        (lab.notes / "failed").unlink(missing_ok=True)
        with pytest.raises(TrainingFailedError):
            lab.fit(loops.count, {"steps": 4, "fail_at": fail_at})
    assert lab.fit(loops.count, {"steps": 4}).metrics == {"step": 3}
    assert lab.starts() == [0, 1, 2]


def test_unnamed_fits_never_resume_each_other(lab):
    first = lab.fit(loops.count, {"steps": 1}, name=None)
    second = lab.fit(loops.count, {"steps": 1}, name=None)
    assert first.path != second.path
    assert lab.starts() == [0, 0]


def test_a_checkpoint_of_another_run_can_be_started_from(lab):
    earlier = lab.fit(loops.count, {"steps": 3}, name="earlier")
    result = lab.fit(loops.count, {"steps": 5}, resume_from=earlier.checkpoint)
    assert lab.starts() == [0, 3]
    assert len(result.best_checkpoints) == 2
    lab.fit(loops.count, {"steps": 5}, resume_from=earlier.checkpoint)
    assert lab.starts()[-1] == 5, "the run's own checkpoints come before the one it once started from"


def test_a_run_with_no_worker_happens_in_this_process_with_full_checkpointing(lab):
    config = {"steps": 3, "fail_at": 1}
    result = lab.fit(loops.count, config, workers=0, failures=FailureConfig(max_failures=1))
    assert lab.starts() == [0, 2]
    assert result.metrics == {"step": 2}
    assert result.return_value == "did 3 steps"
    assert lab.damage() == []


def test_a_metrics_table_has_each_step_once(lab):
    pytest.importorskip("pandas")
    lab.fit(loops.count, {"steps": 4, "fail_at": 1}, failures=FailureConfig(max_failures=1))
    table = lab.fit(loops.count, {"steps": 6}).metrics_dataframe
    assert list(table["step"]) == [0, 1, 2, 3, 4, 5]
    assert list(table["training_iteration"]) == [1, 2, 3, 4, 5, 6]


def test_only_the_best_are_kept_and_the_newest_besides(lab):
    metrics = [{"eval": {"accuracy": value}} for value in (0.1, 0.9, 0.5, 0.7, 0.2)]
    checkpoints = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="eval/accuracy")
    result = lab.fit(loops.saves_with_metrics, {"metrics": metrics}, workers=1, checkpoints=checkpoints)
    assert [m["eval"]["accuracy"] for _, m in result.best_checkpoints] == [0.7, 0.9]
    assert Path(result.checkpoint.path, "step").read_text() == "4"
    assert len([name for name in os.listdir(result.path) if name.startswith("checkpoint_")]) == 3
    assert lab.damage() == []


def test_a_score_that_no_checkpoint_ever_had_is_an_error_at_the_end(lab):
    checkpoints = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="accuracy")
    with pytest.raises(TrainingFailedError, match=r"'accuracy'.*loss") as raised:
        lab.fit(loops.saves_with_metrics, {"metrics": [{"loss": 1.0}] * 3}, workers=1, checkpoints=checkpoints)
    assert raised.value.result.checkpoint is not None


def test_a_sync_report_returns_when_the_checkpoint_is_committed(lab):
    result = lab.fit(loops.sync_report, workers=1)
    assert result.metrics["files"] == [".holdfast.json", "rank0", "step"]


def test_a_directory_of_the_callers_own_is_copied_and_stays_its_own(lab):
    result = lab.fit(loops.from_temporary, workers=1)
    assert files_of(result.checkpoint) == ["step"]


def test_a_directory_that_was_never_reported_is_removed(lab):
    assert files_of(lab.fit(loops.leaves_a_directory, workers=1).checkpoint) == ["rank0", "step"]
    assert lab.damage() == []


def test_an_empty_directory_is_a_checkpoint(lab):
    assert files_of(lab.fit(loops.empty_checkpoint, workers=1).checkpoint) == []
    assert lab.damage() == []


def test_a_worker_knows_who_and_where_it_is(lab):
    metrics = lab.fit(loops.context_of, worker_env={"EXTRA": "yes"}).metrics
    assert metrics == {
        "name": "run",
        "world_size": 2,
        "rank": 0,
        "local_rank": 0,
        "local_world_size": 2,
        "node_rank": 0,
        "trial_dir": str(lab.folder / "run"),
        "storage_path": str(lab.folder),
        "extra": "yes",
    }


def test_a_checkpoint_directory_that_does_not_exist_is_named(lab):
    with pytest.raises(TrainingFailedError, match="/nowhere/at/all does not exist"):
        lab.fit(loops.missing_directory, workers=1)


def test_a_file_that_is_still_written_to_fails_its_checkpoint_by_name(lab):
    with pytest.raises(TrainingFailedError, match="log was still written to"):
        lab.fit(loops.still_writing, workers=1)


def test_numbers_of_numpy_are_numbers_and_what_cannot_be_kept_is_named(lab):
    numpy = pytest.importorskip("numpy")
    metrics = {"loss": numpy.float32(0.5), "n": numpy.int64(3), "nan": float("nan"), "list": (1, 2)}
    kept = lab.fit(loops.reports, {"metrics": [metrics]}, workers=1).metrics
    assert (kept["loss"], kept["n"], kept["list"]) == (0.5, 3, [1, 2])
    assert kept["nan"] != kept["nan"]
    with pytest.raises(TrainingFailedError, match=r"metrics\['bad'\] is a set"):
        lab.fit(loops.reports, {"metrics": [{"bad": {1}}]}, workers=1, name="bad")


def test_a_returned_object_that_cannot_be_kept_is_none_and_said(lab):
    result = lab.fit(loops.returns_an_object, workers=1)
    assert result.return_value is None
    assert "return_value" in (Path(result.path) / "rank0.stderr.log").read_text()


@pytest.mark.parametrize(
    "call", [lambda: train.report({}), train.get_checkpoint, train.get_context, train.checkpoint_dir]
)
def test_outside_a_run_a_call_says_where_it_belongs(call):
    with pytest.raises(OutsideRunError, match="training function"):
        call()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(lab, capsys):
    newest = lab.fit(loops.count, {"steps": 3}).checkpoint
    Path(newest.path, "rank0").write_text("rank 0 at step X")
    lab.fit(loops.count, {"steps": 3}, verbose=1)
    assert lab.starts() == [0, 2]
    assert "rank0 has other bytes" in capsys.readouterr().out
    assert Path(newest.path).exists(), "what is damaged is left where it is"


def test_the_journal_is_json_that_people_can_read(lab):
    lab.fit(loops.count, {"steps": 1})
    lines = (lab.folder / "run/journal/00000001.jsonl").read_text().splitlines()
    kinds = [json.loads(line)[2]["kind"] for line in lines]
    assert kinds == ["owner", "previous", "run", "attempt", "staged", "committed", "finished", "closed"]


def forgets_the_checkpoint(config):
    with train.checkpoint_dir() as folder:
        Path(folder, "weights").write_text("x")
        train.report({"loss": 1.0})


def test_a_checkpoint_that_was_written_and_never_reported_is_said(lab, capsys):
    lab.fit(forgets_the_checkpoint, workers=1, verbose=1)
    assert "never reported" in capsys.readouterr().out
    assert lab.damage() == []


def exits(config):
    train.report({"step": 0})
    raise SystemExit(config["status"])


def test_sys_exit_without_a_status_is_a_return_and_with_one_a_failure(lab):
    assert lab.fit(exits, {"status": 0}, workers=1).metrics == {"step": 0}
    with pytest.raises(TrainingFailedError, match="SystemExit: 3"):
        lab.fit(exits, {"status": 3}, workers=1)


def reports_from_a_fork(config):
    pid = os.fork()
    if pid == 0:
        try:
            train.report({"from": "the fork"})
        except OutsideRunError:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    train.report({"status": os.waitstatus_to_exitcode(status)})


def test_a_report_from_a_process_that_was_forked_is_refused(lab):
    assert lab.fit(reports_from_a_fork, workers=1).metrics == {"status": 7}


def test_a_run_is_opened_again_without_running_anything(lab):
    checkpoints = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    metrics = [{"loss": value} for value in (0.5, 0.1, 0.3, 0.9)]
    result = lab.fit(loops.saves_with_metrics, {"metrics": metrics}, workers=1, checkpoints=checkpoints)
    opened = train.Result.from_path(result.path)
    assert opened.metrics == {"loss": 0.9}
    assert opened.checkpoint == result.checkpoint
    assert opened.best_checkpoints == result.best_checkpoints
    assert opened.get_best_checkpoint("loss", "min") == result.best_checkpoints[-1][0]
    with pytest.raises(ConfigError, match="there are: loss"):
        opened.get_best_checkpoint("accuracy", "max")
    with pytest.raises(ExperimentError, match="no run at"):
        train.Result.from_path(lab.notes)


def test_a_failed_run_that_is_opened_again_says_why(lab):
    with pytest.raises(TrainingFailedError):
        lab.fit(loops.count, {"steps": 3, "fail_at": 1})
    assert "max_failures=0" in str(train.Result.from_path(lab.folder / "run").error)


def opens_two_at_once(config):
    with train.checkpoint_dir() as first:
        Path(first, "first").write_text("kept")
        with train.checkpoint_dir() as second:
            Path(second, "second").write_text("kept")
            train.report({"n": 2}, checkpoint=Checkpoint.from_directory(second))
        train.report({"n": 1}, checkpoint=Checkpoint.from_directory(first))


def test_a_checkpoint_directory_is_never_removed_while_its_block_runs(lab):
    result = lab.fit(opens_two_at_once, workers=1)
    assert [files_of(checkpoint) for checkpoint, _ in result.best_checkpoints] == [["second"], ["first"]]
    assert lab.damage() == []
