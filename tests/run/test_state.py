"""The state machine of one run, event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast import events
from holdfast.errors import JournalDamaged
from holdfast.run import signals, state
from holdfast.run.config import CheckpointConfig, FailureConfig
from holdfast.run.folded import Record
from holdfast.run.policies import after_failure
from holdfast.run.signals import Answer, Discard, Look, MakeCommit, Persist, Remove, StartGang, StopGang, Sweep, Tell
from holdfast.run.state import RunState

PLENTY = 10**9


class Play:
    """A run whose events happen when a test says so. Each returns what it led to; records are kept as written."""

    def __init__(
        self,
        world_size: int = 1,
        *,
        after: Play | None = None,
        present: tuple[int, ...] = (),
        taken: tuple[int, ...] = (),
        report_timeout_s: float = 1800.0,
        failures: FailureConfig | None = None,
        **checkpoints: Any,
    ) -> None:
        self.world_size = world_size
        self.journal: list[Record] = list(after.journal) if after else []
        epoch = after.epoch + 1 if after else 1
        self.epoch, self.time = epoch, after.time if after else 100.0
        self.run = RunState(
            world_size, epoch, failures or FailureConfig(), CheckpointConfig(**checkpoints), report_timeout_s
        )
        for record in self.journal:
            self.run.fold(record)
        self.due: list[Record] = []
        self.told: list[events.Event] = []
        self.begun = self.happens(signals.Begun, taken=taken or present, present=present)

    def happens(self, event: type[signals.Event], **values: Any) -> list[signals.Action]:
        if issubclass(event, signals.RankEvent):
            values.setdefault("attempt", self.run.folded.attempt)
        self.run.apply(event(self.time, **values))
        return self.obey()

    def obey(self) -> list[signals.Action]:
        self.due = json.loads(json.dumps(self.run.take_records()))
        self.journal += self.due
        self.told = self.run.take_events()
        return self.run.take_actions()

    def report(self, rank: int, report: int, *, gives: bool = False, **values: Any) -> list[signals.Action]:
        values.setdefault("metrics", {"loss": report / 10, "rank": rank})
        values.setdefault("free_bytes", PLENTY)
        return self.happens(signals.Reported, rank=rank, report=report, part_bytes=10 if gives else None, **values)

    def stage(self, report: int, **values: Any) -> list[signals.Action]:
        """Every rank reports a part."""
        ranks = range(self.world_size)
        return [action for rank in ranks for action in self.report(rank, report, gives=True, **values)]

    def durable(self, number: int, *ranks: int) -> list[signals.Action]:
        return [a for rank in ranks or (0,) for a in self.happens(signals.Durable, number=number, rank=rank)]

    def commit(self, number: int, in_use: frozenset[int] = frozenset()) -> list[signals.Action]:
        return self.happens(signals.Committed, number=number, path=f"checkpoint_{number}", size_bytes=11, in_use=in_use)

    def keep(self, report: int, **values: Any) -> list[signals.Action]:
        """Every rank reports a part of a checkpoint, which is then made durable and committed."""
        actions = self.stage(report, **values)
        number = self.run.folded.next_number - 1
        actions += self.durable(number, *self.run.folded.held[number].ranks)
        return actions + self.commit(number)

    def refuse(self, number: int, *, passing: bool = True, step: Any = "persist") -> list[signals.Action]:
        return self.happens(signals.StorageFailed, number=number, reason="disk full", passing=passing, step=step)

    def tick(self, after_s: float = 0.0) -> list[signals.Action]:
        self.time += after_s
        return self.happens(signals.Tick)

    def looked(self, number: int, *problems: str) -> list[signals.Action]:
        return self.happens(signals.Looked, number=number, problems=problems)

    def kill(self, rank: int) -> list[signals.Action]:
        return self.happens(signals.Exited, rank=rank, how="ended by SIGKILL")

    def kill_all(self) -> list[signals.Action]:
        return [action for rank in range(self.world_size) for action in self.kill(rank)]

    def finish(self, *ranks: int) -> list[signals.Action]:
        actions: list[signals.Action] = []
        for rank in ranks or range(self.world_size):
            actions += self.happens(signals.Returned, rank=rank, value=f"of {rank}")
            actions += self.happens(signals.Exited, rank=rank, how="")
        return actions

    def request_stop(self) -> list[signals.Action]:
        self.run.request_stop(self.time, "stopped by Ctrl-C")
        return self.obey()

    def kinds(self) -> list[str]:
        return [record["kind"] for record in self.journal]

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.journal if record["kind"] == kind]


def of(kind: type[Any], actions: list[Any]) -> list[Any]:
    return [action for action in actions if type(action) is kind]


def numbers(play: Play) -> list[int]:
    return [held.number for held in play.run.folded.committed]


# ---- reports


def test_a_fresh_run_writes_its_attempt_and_starts_without_a_checkpoint():
    play = Play(2)
    assert play.kinds() == ["attempt"]
    assert of(StartGang, play.begun) == [StartGang(1, None)]
    assert of(Look, play.begun) == []


def test_reports_of_all_ranks_make_one_record_with_the_metrics_of_rank_0_and_the_others_beside_them():
    play = Play(2)
    play.report(1, 0)
    assert play.due == []
    play.report(0, 0)
    assert [record["kind"] for record in play.due] == ["report"]
    assert play.due[0]["metrics"]["rank"] == 0
    assert play.due[0]["others"]["1"]["rank"] == 1
    assert play.run.folded.iteration == 1


def test_reports_are_recorded_in_their_order_however_far_one_rank_is_ahead():
    play = Play(2)
    for report in range(5):
        play.report(0, report)
    for report in range(5):
        play.report(1, report)
    assert [record["report"] for record in play.of_kind("report")] == [0, 1, 2, 3, 4]


def test_a_checkpoint_is_staged_once_every_rank_has_reported_also_those_with_metrics_only():
    play = Play(2)
    assert play.report(0, 0, gives=True) == []
    actions = play.report(1, 0)
    assert play.of_kind("staged")[0]["parts"] == [0]
    assert of(Answer, actions) == [Answer(0, 0, 0)]


def test_a_rank_with_metrics_only_is_owed_no_answer_and_goes_on():
    play = Play(2)
    assert of(Answer, play.report(1, 0)) == []
    assert of(Answer, play.report(1, 1)) == []
    assert [answer.rank for answer in of(Answer, play.report(0, 0, gives=True))] == [0]


def test_the_staged_record_is_due_before_the_answer_can_be_taken():
    play = Play(1)
    play.run.apply(signals.Reported(1.0, 1, 0, 0, {}, 10, False, PLENTY))
    assert play.run.take_records()[-1]["kind"] == "staged"
    assert of(Answer, play.run.take_actions()) == [Answer(0, 0, 0)]


def test_a_rank_that_returned_holds_no_other_up():
    play = Play(2)
    play.report(0, 0, gives=True)
    actions = play.finish(1)
    assert of(Answer, actions) == [Answer(0, 0, 0)]
    assert of(Answer, play.report(0, 1, gives=True)) == [Answer(0, 1, 1)]


def test_a_report_that_not_every_rank_reached_is_never_staged_and_its_metrics_are_recorded_at_the_end_of_the_attempt():
    play = Play(2)
    play.report(0, 0, gives=True, metrics={"loss": 0.5})
    play.kill(1)
    play.kill(0)
    assert play.of_kind("staged") == []
    assert [record["metrics"] for record in play.of_kind("report")] == [{"loss": 0.5}]
    assert play.run.folded.next_number == 0


def test_an_incomplete_report_without_rank_0_leaves_no_record():
    play = Play(2)
    play.report(1, 0, gives=True)
    play.kill_all()
    assert play.of_kind("report") == play.of_kind("staged") == []


def test_a_report_that_the_last_rank_reaches_while_the_gang_is_stopped_is_staged_all_the_same():
    play = Play(2)
    play.report(0, 0, gives=True)
    play.kill(0)
    play.report(1, 0, gives=True)
    assert play.of_kind("staged")[0]["parts"] == [0, 1]


def test_messages_of_an_older_attempt_are_dropped():
    play = Play(2, failures=FailureConfig(max_failures=-1))
    play.kill_all()
    assert play.run.folded.attempt == 2
    before = list(play.journal)
    for event, values in (
        (signals.Reported, {"report": 0, "metrics": {}, "part_bytes": 10}),
        (signals.Returned, {}),
        (signals.Raised, {"traceback": "late"}),
        (signals.Exited, {"how": "late"}),
    ):
        for rank in (0, 1):
            assert play.happens(event, attempt=1, rank=rank, **values) == []
    assert play.journal == before
    assert play.run.phase == "running"


# ---- numbers


def test_numbers_are_given_in_order_and_never_again_after_abandoned_damaged_and_forgotten():
    play = Play(1, num_to_keep=2, failures=FailureConfig(max_failures=-1))
    play.keep(0)
    play.keep(1)
    play.stage(2)
    play.refuse(2, passing=False)
    play.kill_all()
    play.looked(1, "a byte was flipped")
    play.looked(0)
    play.stage(0)
    assert [record["number"] for record in play.of_kind("staged")] == [0, 1, 2, 3]
    restored = Play(1, after=play)
    restored.durable(3)
    restored.commit(3)
    restored.looked(3)
    restored.stage(0)
    assert restored.of_kind("staged")[-1]["number"] == 4


def test_a_number_that_a_stranger_took_is_skipped_and_said():
    play = Play(1, taken=(0, 2), present=(2,))
    assert any(isinstance(event, events.Warned) and "0, 2" in event.message for event in play.told)
    assert of(Remove, play.begun) == []
    play.stage(0)
    assert play.of_kind("staged")[0]["number"] == 3


# ---- commits


def test_a_checkpoint_is_committed_when_the_part_of_every_rank_is_durable():
    play = Play(2)
    assert of(Persist, play.stage(0)) == [Persist(0)]
    assert of(MakeCommit, play.durable(0, 1)) == []
    assert of(MakeCommit, play.durable(0, 0)) == [MakeCommit(0)]
    actions = play.commit(0)
    assert [record["kind"] for record in play.due] == ["committed"]
    assert Discard(1, 1, 0) in actions
    assert of(Tell, actions) == [Tell(0)]
    assert numbers(play) == [0]


def test_a_commit_is_asked_for_once_however_often_a_part_is_called_durable():
    play = Play(2)
    play.stage(0)
    assert of(MakeCommit, play.durable(0, 0, 1, 1, 0)) == [MakeCommit(0)]
    play.commit(0)
    assert play.durable(0, 0) == play.commit(0) == []


def test_commits_are_asked_for_one_after_the_other_in_the_order_of_numbers():
    play = Play(1)
    play.stage(0)
    play.stage(1)
    assert of(MakeCommit, play.durable(1)) == []
    assert of(MakeCommit, play.durable(0)) == [MakeCommit(0)]
    play.refuse(0, step="commit")
    assert of(MakeCommit, play.tick(1.0)) == [MakeCommit(0)]
    assert of(MakeCommit, play.commit(0)) == [MakeCommit(1)]


def test_the_answer_of_sync_comes_only_after_the_commit_and_after_the_news_of_it():
    play = Play(1)
    assert of(Answer, play.stage(0, sync=True)) == []
    assert of(Answer, play.durable(0)) == []
    actions = play.commit(0)
    assert actions.index(Tell(0)) < actions.index(Answer(0, 0, 0))


def test_a_third_checkpoint_that_waits_to_be_durable_withholds_the_answer_and_pays_it_later():
    play = Play(1)
    assert len(of(Answer, play.stage(0))) == len(of(Answer, play.stage(1))) == 1
    assert of(Answer, play.stage(2)) == []
    assert of(Answer, play.durable(0)) == [Answer(0, 2, 2)]


def test_a_second_checkpoint_waits_when_more_than_a_quarter_of_the_free_space_is_staged():
    play = Play(1)
    assert len(of(Answer, play.stage(0, free_bytes=0))) == 1  # one is always taken, however little space there is
    assert of(Answer, play.stage(1, free_bytes=79)) == []
    assert of(Answer, play.durable(0)) == [Answer(0, 1, 1)]
    assert of(Answer, play.stage(2, free_bytes=80)) == [Answer(0, 2, 2)]


def test_what_waits_for_other_ranks_does_not_count_in_the_bound():
    play = Play(2)
    play.stage(0)
    play.report(0, 1, gives=True)
    assert list(play.run.folded.staged) == [0]
    assert len(of(Answer, play.report(1, 1, gives=True))) == 2


# ---- retention


def test_the_forgotten_record_is_due_before_the_removal_can_be_taken():
    play = Play(1, num_to_keep=1)
    play.keep(0)
    play.stage(1)
    play.durable(1)
    play.run.apply(signals.Committed(play.time, 1, "checkpoint_1", 10))
    records, actions = play.run.take_records(), play.run.take_actions()
    assert [(record["kind"], record.get("numbers")) for record in records] == [("committed", None), ("forgotten", [0])]
    assert of(Remove, actions) == [Remove((0,))]


def test_the_newest_checkpoint_is_pinned_besides_the_best():
    play = Play(1, num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    for report in range(4):  # each is worse than the one before
        play.keep(report)
    assert numbers(play) == [0, 3]


def test_the_checkpoint_an_attempt_started_from_is_pinned_until_every_rank_has_passed_it():
    play = Play(2, num_to_keep=1, failures=FailureConfig(max_failures=-1))
    play.keep(0)
    play.kill_all()
    play.looked(0)
    play.report(0, 0, gives=True)
    assert numbers(play) == [0]
    play.report(1, 0)
    play.durable(1)
    assert numbers(play) == [0]
    play.commit(1)
    assert numbers(play) == [1]  # both have called report for it


def test_what_a_reader_has_open_is_pinned_until_a_later_commit_finds_it_closed():
    play = Play(1, num_to_keep=1)
    play.keep(0)
    play.stage(1)
    play.durable(1)
    play.commit(1, in_use=frozenset({0}))
    assert numbers(play) == [0, 1]
    play.keep(2)
    assert numbers(play) == [2]


def test_without_num_to_keep_nothing_is_forgotten():
    play = Play(1)
    for report in range(5):
        play.keep(report)
    play.finish()
    assert numbers(play) == [0, 1, 2, 3, 4]
    assert play.of_kind("forgotten") == []


# ---- where an attempt starts


def test_an_attempt_starts_from_the_newest_checkpoint_after_it_was_looked_at():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.keep(0)
    play.keep(1)
    assert of(Look, play.kill_all()) == [Look(1)]
    assert of(StartGang, play.looked(1)) == [StartGang(2, 1)]
    assert play.of_kind("attempt")[-1]["iteration"] == 2
    play.report(0, 0)
    assert play.run.folded.iteration == 3


def test_a_damaged_checkpoint_is_recorded_and_said_and_the_next_older_one_is_looked_at():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.keep(0)
    play.keep(1)
    play.kill_all()
    assert of(Look, play.looked(1, "model.pt is missing")) == [Look(0)]
    assert play.due == [{"kind": "damaged", "time": play.time, "number": 1, "why": "model.pt is missing"}]
    assert any(isinstance(event, events.DamageFound) for event in play.told)
    assert of(StartGang, play.looked(0)) == [StartGang(2, 0)]
    assert of(Remove, Play(1, after=play, present=(0, 1)).begun) == []  # nothing damaged is moved or removed


def test_when_every_checkpoint_is_damaged_the_run_fails_and_nothing_is_silently_started_afresh():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.keep(0)
    play.kill_all()
    assert of(StartGang, play.looked(0, "empty")) == []
    assert play.run.phase == "ended"
    assert "every checkpoint is damaged (0)" in play.of_kind("failed")[0]["why"]


def test_a_checkpoint_that_cannot_be_read_just_now_is_waited_for_and_not_called_damaged():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.keep(0)
    play.kill_all()
    play.happens(signals.LookFailed, number=0, reason="stale handle", passing=True)
    assert [type(event).__name__ for event in play.told][-1] == "Waiting"
    assert play.tick(0.3) == [signals.Look(0)]
    assert of(StartGang, play.looked(0)) == [StartGang(2, 0)]
    assert play.run.folded.damaged == {}


def test_a_checkpoint_that_cannot_be_read_at_all_fails_the_run_and_is_not_called_damaged():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.keep(0)
    play.kill_all()
    play.happens(signals.LookFailed, number=0, reason="written by a newer version", passing=False)
    assert "written by a newer version" in play.of_kind("failed")[0]["why"]
    assert play.run.folded.damaged == {}


def test_before_an_attempt_every_staged_checkpoint_is_committed_and_only_then_the_newest_is_looked_at():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.stage(0)
    assert of(Look, play.kill_all()) == []
    assert of(Look, play.durable(0)) == []
    assert of(Look, play.commit(0)) == [Look(0)]


# ---- failures of workers


@pytest.mark.parametrize(("max_failures", "attempts"), [(0, 1), (2, 3)])
def test_the_gang_is_started_again_max_failures_times(max_failures, attempts):
    play = Play(2, failures=FailureConfig(max_failures=max_failures))
    while play.run.phase != "ended":
        play.kill_all()
    assert play.run.attempts_here == attempts
    assert play.journal[-1]["kind"] == "failed"
    assert f"max_failures={max_failures}" in play.journal[-1]["why"]
    assert play.run.failures == {0: "ended by SIGKILL"}


def test_the_gang_is_started_again_for_ever_with_minus_one():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    for _ in range(50):
        play.kill_all()
    assert play.run.folded.attempt == 51
    assert play.run.phase == "running"


def test_a_restored_run_counts_failures_anew():
    play = Play(1)
    play.kill_all()
    assert play.run.phase == "ended"
    assert Play(1, after=play).run.phase == "running"


@pytest.mark.parametrize(
    ("config", "failures", "then"), [(0, 1, "fail"), (1, 1, "restart"), (1, 2, "fail"), (-1, 99, "restart")]
)
def test_the_policy_restarts_as_often_as_it_may(config, failures, then):
    assert after_failure(FailureConfig(max_failures=config), failures) == then


def test_when_a_rank_raises_the_others_are_stopped_and_every_traceback_is_kept():
    play = Play(3)
    assert play.happens(signals.Raised, rank=1, traceback="ValueError") == [StopGang(1)]
    assert play.happens(signals.Raised, rank=2, traceback="connection lost") == []
    play.kill_all()
    assert play.run.failures == {1: "ValueError", 2: "connection lost"}
    assert play.run.goal == "fail"


def test_a_rank_that_failed_ahead_of_the_others_is_waited_for_by_what_it_reported_being_staged():
    play = Play(3)
    play.report(1, 0)
    assert play.happens(signals.Raised, rank=1, traceback="ValueError") == []
    assert play.kill(1) == []
    assert play.report(0, 0, gives=True) == []
    actions = play.report(2, 0, gives=True)
    assert actions.index(Answer(0, 0, 0)) < actions.index(StopGang(1))
    assert play.of_kind("staged")[0]["parts"] == [0, 2]


def test_the_others_are_given_5_s_to_catch_up_with_a_rank_that_failed():
    play = Play(2)
    play.report(1, 0)
    play.kill(1)
    deadline = play.run.deadline()
    assert deadline == pytest.approx(play.time + 5)
    assert play.tick(4.9) == []
    assert play.tick(0.2) == [StopGang(1)]
    assert play.run.deadline() is None


def test_no_rank_is_waited_for_that_cannot_catch_up():
    play = Play(4)
    play.report(0, 0)
    play.finish(1)
    play.happens(signals.Raised, rank=2, traceback="ValueError")
    assert play.run.phase == "stopping"  # rank 2 was behind, not ahead
    play = Play(3)
    play.report(0, 0)
    play.finish(1)
    play.kill(0)
    assert play.run.phase == "running"
    assert play.kill(2) == [StopGang(1), Sweep(None)]


def test_a_run_finishes_when_every_rank_returned_and_is_gone_and_every_checkpoint_is_committed():
    play = Play(2)
    play.stage(0)
    play.finish()
    assert play.run.phase == "settling"
    play.durable(0, 0, 1)
    assert of(Sweep, play.commit(0)) == [Sweep(None)]
    assert play.run.phase == "ended"
    assert play.journal[-1]["kind"] == "finished"
    assert play.journal[-1]["return_value"] == "of 0"


def test_the_return_value_of_an_attempt_that_failed_is_not_that_of_the_run():
    play = Play(2)
    play.finish(0)
    play.kill(1)
    assert play.run.folded.return_value is None


def test_a_run_resumed_with_a_smaller_num_to_keep_removes_the_surplus_at_its_end_and_sweeps_last():
    play = Play(1)
    play.keep(0)
    play.keep(1)
    play.finish()
    again = Play(1, after=play, num_to_keep=1)
    again.looked(1)
    assert again.finish() == [Remove((0,)), Sweep(None)]


def test_a_rank_that_ends_before_it_returned_is_a_failure_also_with_the_others_done():
    play = Play(2)
    play.finish(0)
    assert play.kill(1) == [StopGang(1), Sweep(None)]
    assert play.journal[-1]["kind"] == "failed"


def test_a_run_goes_on_until_the_processes_that_returned_are_gone():
    play = Play(2)
    for rank in (0, 1):
        play.happens(signals.Returned, rank=rank, value=None)
    assert play.run.phase == "running"
    play.kill_all()
    assert play.journal[-1]["kind"] == "finished"


def test_what_an_attempt_left_incomplete_is_no_part_of_the_next():
    play = Play(2, failures=FailureConfig(max_failures=1))
    play.report(0, 0, gives=True)
    play.kill_all()
    play.report(0, 0)
    play.report(1, 0)
    assert play.of_kind("staged") == []
    assert [record["attempt"] for record in play.of_kind("report")] == [1, 2]


def test_a_rank_of_an_attempt_that_is_over_is_answered_no_more():
    play = Play(1, failures=FailureConfig(max_failures=1))
    play.stage(0, sync=True)
    play.kill(0)
    play.durable(0)
    assert of(Answer, play.commit(0)) == []


def test_processes_that_cannot_be_started_fail_the_run():
    play = Play(2, failures=FailureConfig(max_failures=-1))
    play.happens(signals.GangRefused, attempt=1, reason="no such GPU")
    assert play.journal[-1] == {"kind": "failed", "time": play.time, "why": "no such GPU"}


# ---- trouble with storage


def test_a_passing_refusal_is_waited_for_and_tried_again_anew_and_said_once_and_when_it_is_over():
    play = Play(1)
    play.stage(0)
    assert play.refuse(0) == []
    assert [type(event) for event in play.told] == [events.Waiting]
    assert play.tick() == []
    assert play.run.deadline() == pytest.approx(play.time + 0.25)
    assert play.tick(0.3) == [Persist(0)]
    assert play.tick(5.0) == []  # until it is answered
    play.refuse(0)
    assert play.told == []
    assert play.tick(0.6) == [Persist(0)]
    play.durable(0)
    assert [type(event) for event in play.told] == [events.WaitingOver]
    assert play.run.deadline() is None


def test_a_commit_that_was_refused_is_tried_again():
    play = Play(1)
    play.stage(0)
    play.durable(0)
    play.refuse(0, step="commit")
    assert play.tick(0.3) == [MakeCommit(0)]
    play.commit(0)
    assert isinstance(play.told[0], events.WaitingOver)


def test_tries_come_at_growing_distances_of_at_most_15_s_until_the_deadline():
    play = Play(1, failures=FailureConfig(storage_deadline_s=100.0))
    play.stage(0)
    waits, began = [], play.time
    while play.refuse(0) == []:
        deadline = play.run.deadline()
        assert deadline is not None
        waits.append(deadline - play.time)
        play.tick(waits[-1])
    assert waits[:3] == pytest.approx([0.25, 0.5, 1.0])
    assert max(waits) == pytest.approx(15.0)
    assert 100.0 <= play.time - began <= 115.0
    assert play.of_kind("abandoned")[0]["number"] == 0


def test_refusals_of_several_ranks_are_one_try():
    play = Play(8)
    play.stage(0)
    for _ in range(8):
        play.refuse(0)
    assert play.run.deadline() == pytest.approx(play.time + 0.25)
    assert play.tick(0.3) == [Persist(0)]


def test_a_storage_that_is_away_for_days_is_waited_for_as_long_as_the_deadline_says():
    play = Play(1, failures=FailureConfig(storage_deadline_s=1e6))
    play.stage(0)
    for _ in range(2000):
        play.refuse(0)
        play.tick(16.0)
    assert play.of_kind("abandoned") == []


def test_a_late_refusal_of_a_part_that_is_durable_changes_nothing():
    play = Play(1)
    play.stage(0)
    play.durable(0)
    assert play.refuse(0, passing=False) == []
    assert play.run.deadline() is None
    play.commit(0)
    assert numbers(play) == [0]


@pytest.mark.parametrize(("on_storage_error", "passing"), [("fail", True), ("wait", False)])
def test_a_refusal_that_is_not_waited_for_abandons_the_checkpoint(on_storage_error, passing):
    play = Play(1, failures=FailureConfig(on_storage_error=on_storage_error))
    play.stage(0)
    actions = play.refuse(0, passing=passing)
    assert [record["kind"] for record in play.due] == ["abandoned"]
    assert of(Remove, actions) == []
    assert Discard(1, 1, 0, abandoned=0) in actions
    assert any(isinstance(event, events.CheckpointAbandoned) for event in play.told)
    assert play.run.folded.held == {}


def test_an_abandoned_checkpoint_is_raised_by_the_next_answer_once():
    play = Play(1)
    play.stage(0)
    play.refuse(0, passing=False)
    answer = of(Answer, play.stage(1))[0]
    assert answer.error == "checkpoint 0 could not be kept: disk full"
    assert of(Answer, play.stage(2)) == [Answer(0, 2, 2)]


def test_every_rank_that_waits_for_a_checkpoint_is_told_that_it_is_abandoned():
    play = Play(2)
    play.stage(0, sync=True)
    answers = of(Answer, play.refuse(0, passing=False))
    assert [(answer.rank, answer.number) for answer in answers] == [(0, 0), (1, 0)]
    assert all(answer.error == "checkpoint 0 could not be kept: disk full" for answer in answers)
    assert [answer.error for answer in of(Answer, play.stage(1))] == [None, None]


def test_an_error_is_not_spent_on_a_rank_that_is_being_ended():
    play = Play(2, failures=FailureConfig(max_failures=1))
    play.stage(0, sync=True)
    play.kill(1)
    assert of(Answer, play.refuse(0, passing=False)) == []
    play.kill(0)
    answers = of(Answer, play.stage(0))
    assert [bool(answer.error) for answer in answers] == [True, False]


def test_an_error_is_not_spent_on_a_report_of_a_gang_that_is_being_ended():
    play = Play(2, failures=FailureConfig(max_failures=1))
    play.stage(0)
    play.refuse(0, passing=False)
    play.report(0, 1, gives=True)
    play.kill(0)
    assert [answer.error for answer in of(Answer, play.report(1, 1, gives=True))] == [None, None]
    play.kill(1)
    play.durable(1, 0, 1)
    play.commit(1)
    play.looked(1)
    assert [bool(answer.error) for answer in of(Answer, play.stage(0))] == [True, False]


def test_an_abandoned_checkpoint_that_no_answer_could_raise_fails_the_run_at_its_end():
    play = Play(1)
    play.stage(0)
    play.refuse(0, passing=False)
    play.finish()
    assert play.journal[-1]["kind"] == "failed"
    assert "checkpoint 0 could not be kept: disk full" in play.journal[-1]["why"]


def test_an_abandoned_checkpoint_lets_the_next_one_be_committed():
    play = Play(1)
    play.stage(0)
    play.stage(1)
    play.durable(1)
    assert of(MakeCommit, play.refuse(0, passing=False)) == [MakeCommit(1)]


def test_when_the_keeper_dies_everything_not_durable_is_asked_for_again():
    play = Play(1)
    play.keep(0)
    play.stage(1)
    play.durable(1)
    play.stage(2)
    assert play.happens(signals.KeeperDied) == [Persist(2)]


def test_when_the_keeper_dies_what_it_was_refused_is_asked_for_anew_and_only_when_it_is_due():
    play = Play(1)
    play.stage(0)
    play.refuse(0)
    assert play.happens(signals.KeeperDied) == []
    assert play.tick(0.3) == [Persist(0)]
    assert play.happens(signals.KeeperDied) == [Persist(0)]


def test_when_the_keeper_dies_too_often_in_a_row_the_driver_does_its_work_itself():
    play = Play(1)
    play.stage(0)
    for _ in range(state.KEEPER_DEATHS_LIMIT):
        assert of(Persist, play.happens(signals.KeeperDied)) == [Persist(0)]
    assert of(Persist, play.happens(signals.KeeperDied)) == [Persist(0, in_driver=True)]
    assert play.of_kind("abandoned") == []


def test_a_keeper_that_does_not_answer_is_said_to_take_long_and_then_ended():
    play = Play(1, failures=FailureConfig(storage_deadline_s=100))
    play.stage(0)
    assert play.tick(31) == []
    assert "to be durable" in play.told[-1].what
    assert play.tick(80) == [signals.EndKeeper()]
    assert of(Persist, play.happens(signals.KeeperDied)) == [Persist(0)]


def test_a_removal_that_a_reader_puts_off_is_asked_for_again_at_the_next_commit_and_at_the_end():
    play = Play(1, num_to_keep=1)
    play.keep(0)
    play.keep(1)
    play.happens(signals.PutOff, numbers=(0,))
    assert of(Remove, play.keep(2)) == [Remove((1,)), Remove((0,))]
    play.happens(signals.PutOff, numbers=(0,))
    assert of(Remove, play.finish(0)) == [Remove((0,))]


def test_what_cannot_be_cleaned_away_is_said_and_the_run_goes_on():
    play = Play(1)
    play.happens(signals.CleaningFailed, reason="x stays: no such device")
    assert "x stays" in play.told[-1].message
    assert play.run.phase == "running"


def test_when_a_rank_cannot_give_its_part_the_others_are_told_and_there_is_no_checkpoint_of_that_report():
    play = Play(2)
    play.report(0, 0, gives=True)
    actions = play.report(1, 0, failed="OSError: a pipe cannot be kept")
    (answer,) = of(Answer, actions)
    assert (answer.rank, answer.report) == (0, 0)
    assert "rank 1: OSError: a pipe cannot be kept" in str(answer.error)
    assert Discard(1, 1, 0) in actions
    assert play.of_kind("staged") == []
    assert of(Persist, play.stage(1)) == [Persist(0)]


def test_metrics_of_rank_0_are_written_down_although_other_ranks_never_report():
    play = Play(2)
    play.report(0, 0, metrics={"loss": 0.5})
    play.tick(1.1)
    assert [record["metrics"] for record in play.of_kind("report")] == [{"loss": 0.5}]
    play.report(1, 0, metrics={"loss": 0.7})
    assert len(play.of_kind("report")) == 1
    assert play.of_kind("others")[0]["others"] == {"1": {"loss": 0.7}}


def test_the_metrics_of_a_run_are_those_of_rank_0_also_after_it_has_returned():
    play = Play(2)
    play.report(0, 0, metrics={"of": 0})
    play.report(1, 0, metrics={"of": 1})
    play.happens(signals.Returned, attempt=1, rank=0)
    play.report(1, 1, metrics={"of": 1})
    assert play.run.folded.metrics == {"of": 0}


def test_a_process_that_stays_after_every_rank_returned_is_named_and_then_ended_and_the_run_finishes():
    play = Play(1, report_timeout_s=100)
    play.happens(signals.Returned, attempt=1, rank=0)
    assert play.tick(31) == []
    assert "rank 0 to end" in play.told[-1].what
    assert play.tick(100) == [signals.StopGang(1)]
    play.happens(signals.Exited, attempt=1, rank=0, how="ended")
    assert play.of_kind("finished")


def test_records_that_do_not_fit_together_are_damage_by_name():
    run = RunState(1)
    with pytest.raises(JournalDamaged, match="committed"):
        run.fold({"kind": "committed", "number": 3, "size_bytes": 1})
    with pytest.raises(JournalDamaged, match="staged"):
        run.fold({"kind": "staged", "number": "../../etc", "metrics": {}, "iteration": 1})


def test_a_part_made_durable_begins_the_count_of_keeper_deaths_anew():
    play = Play(2)
    play.stage(0)
    for _ in range(state.KEEPER_DEATHS_LIMIT):
        play.happens(signals.KeeperDied)
    play.durable(0, 0)
    assert of(Persist, play.happens(signals.KeeperDied)) == [Persist(0)]


# ---- missing ranks


def test_missing_ranks_are_named_after_30_s_and_once():
    play = Play(3)
    play.report(0, 0, gives=True)
    play.report(2, 0)
    assert play.run.deadline() == pytest.approx(play.time + 30)
    play.tick(29.9)
    assert play.told == []
    play.tick(0.2)
    assert "rank 1 to call report" in play.told[0].what
    play.tick(30)
    assert play.told == []
    assert play.run.phase == "running"


def test_a_run_whose_ranks_wait_longer_than_report_timeout_s_fails_and_says_who_was_missing():
    play = Play(2, report_timeout_s=60, failures=FailureConfig(max_failures=-1))
    play.report(0, 0, gives=True)
    play.tick(31)
    assert play.tick(30) == [StopGang(1)]
    play.kill_all()
    assert play.run.phase == "ended"
    assert "for rank 1" in play.journal[-1]["why"]
    assert "report_timeout_s" in play.journal[-1]["why"]


def test_a_report_timeout_below_30_s_is_kept_to():
    play = Play(2, report_timeout_s=5)
    play.report(0, 0, gives=True)
    assert play.run.deadline() == pytest.approx(play.time + 5)
    assert play.tick(5) == [StopGang(1)]
    assert "rank 1 to call report" in play.told[0].what


def test_it_is_said_when_missing_ranks_have_come():
    play = Play(2)
    play.report(0, 0, gives=True)
    play.tick(31)
    said = play.told
    play.report(1, 0)
    over = [event for event in play.told if isinstance(event, events.WaitingOver)]
    assert [event.what for event in over] == [event.what for event in said if isinstance(event, events.Waiting)]


def test_a_gang_that_is_being_ended_needs_no_ticks():
    play = Play(2, report_timeout_s=60)
    play.report(0, 0, gives=True)
    play.tick(60)
    play.tick(0)
    assert play.run.phase == "stopping"
    assert play.run.deadline() is None


def test_metrics_only_reports_are_never_waited_for():
    play = Play(2, report_timeout_s=60)
    play.report(0, 0)
    play.tick(1000)
    assert [type(event).__name__ for event in play.told] == ["Reported"]
    assert play.run.deadline() is None
    assert play.run.phase == "running"


# ---- the score


def test_a_missing_score_attribute_is_said_once_with_the_names_that_were_there():
    play = Play(1, checkpoint_score_attribute="eval/loss")
    play.keep(0, metrics={"loss": 1, "accuracy": 2})
    warnings = [event.message for event in play.told if isinstance(event, events.Warned)]
    assert len(warnings) == 1
    assert "'eval/loss'" in warnings[0]
    assert "accuracy, loss" in warnings[0]
    play.keep(1)
    assert not any(isinstance(event, events.Warned) for event in play.told)


def test_a_score_attribute_that_no_checkpoint_ever_had_fails_the_run_at_its_end():
    play = Play(1, checkpoint_score_attribute="f1")
    play.keep(0, metrics={"loss": 1})
    play.finish()
    assert play.journal[-1]["kind"] == "failed"
    assert "'f1'" in play.journal[-1]["why"]
    assert "loss" in play.journal[-1]["why"]


def test_a_score_attribute_that_one_forgotten_checkpoint_had_is_no_error():
    play = Play(1, checkpoint_score_attribute="f1", num_to_keep=1, checkpoint_score_order="min")
    play.keep(0, metrics={"f1": 1})
    play.keep(1, metrics={"f1": 0})
    play.keep(2, metrics={})
    restored = Play(1, after=play, checkpoint_score_attribute="f1")
    restored.looked(2)
    restored.finish()
    assert restored.journal[-1]["kind"] == "finished"


def test_a_score_attribute_without_any_checkpoint_is_no_error():
    play = Play(1, checkpoint_score_attribute="f1")
    play.report(0, 0)
    play.finish()
    assert play.journal[-1]["kind"] == "finished"


# ---- the end that somebody asks for


def test_a_stop_while_running_ends_the_workers_commits_what_is_staged_and_fails_the_run():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.stage(0)
    assert play.request_stop() == [StopGang(1)]
    play.kill_all()
    assert play.run.phase == "settling"
    play.durable(0)
    play.commit(0)
    assert play.run.phase == "ended"
    assert play.journal[-1] == {"kind": "failed", "time": play.time, "why": "stopped by Ctrl-C"}
    assert numbers(play) == [0]


def test_a_stop_while_stopping_starts_nothing_again():
    play = Play(2, failures=FailureConfig(max_failures=-1))
    play.kill(0)
    play.request_stop()
    play.kill(1)
    assert play.run.phase == "ended"
    assert play.journal[-1]["why"] == "stopped by Ctrl-C"


def test_a_stop_while_settling_waits_for_the_commits():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.stage(0)
    play.kill_all()
    play.request_stop()
    assert play.run.phase == "settling"
    play.durable(0)
    play.commit(0)
    assert play.run.phase == "ended"


def test_a_stop_while_looking_ends_at_once_and_what_was_seen_then_changes_nothing():
    play = Play(1, failures=FailureConfig(max_failures=-1))
    play.keep(0)
    play.kill_all()
    play.request_stop()
    assert play.run.phase == "ended"
    assert play.looked(0, "damaged") == []
    assert play.due == []


def test_a_stop_before_the_gang_turns_out_not_to_start_ends_the_run():
    play = Play(2, failures=FailureConfig(max_failures=-1))
    play.request_stop()
    play.happens(signals.GangRefused, attempt=1, reason="no such GPU")
    assert play.run.phase == "ended"
    assert play.journal[-1]["why"] == "stopped by Ctrl-C"


def test_a_stop_after_the_end_changes_nothing():
    play = Play(1)
    play.finish()
    assert play.request_stop() == []
    assert play.run.goal == "finish"
    assert play.due == []


# ---- restored


def test_a_restored_run_persists_what_was_staged_commits_it_and_starts_from_it():
    play = Play(2)
    play.stage(0)
    restored = Play(2, after=play)
    assert restored.begun == [Persist(0)]
    restored.durable(0, 0, 1)
    assert restored.commit(0) == [Discard(1, 1, 0), Look(0)]
    assert restored.looked(0) == [StartGang(2, 0), Sweep(2)]


def test_a_restored_run_finishes_the_removal_of_what_was_let_go():
    play = Play(1, num_to_keep=1)
    play.keep(0)
    play.stage(1)
    play.refuse(1, passing=False)
    play.keep(2)
    restored = Play(1, after=play, present=(0, 1, 2))
    assert of(Remove, restored.begun) == [Remove((0, 1))]


def test_a_number_that_no_journal_gave_is_left_alone_by_every_later_driver():
    play = Play(1, taken=(0, 3), present=(0, 3))
    second = Play(1, after=play, present=(0, 3))
    assert of(Remove, second.begun) == []
    second.stage(0)
    third = Play(1, after=second, present=(0, 1, 3, 9))
    assert of(Remove, third.begun) == []
    assert of(Remove, Play(1, after=third, present=(0, 1, 3, 9)).begun) == []


def test_a_checkpoint_of_the_driver_before_that_cannot_be_kept_is_said_and_the_run_goes_on_from_an_older_one():
    play = Play(1)
    play.keep(0)
    play.stage(1)
    restored = Play(1, after=play)
    assert Look(0) in restored.refuse(1, passing=False)
    assert any(isinstance(event, events.CheckpointAbandoned) for event in restored.told)
    restored.looked(0)
    assert [answer.error for answer in of(Answer, restored.keep(0))] == [None]
    restored.finish()
    assert restored.journal[-1]["kind"] == "finished"


def test_a_finished_run_that_is_begun_again_goes_on_from_its_newest_checkpoint_and_keeps_its_metrics():
    play = Play(1)
    play.keep(0, metrics={"loss": 0.25})
    play.finish()
    again = Play(1, after=play)
    assert again.begun == [Look(0)]
    again.looked(0)
    again.finish()
    assert again.run.folded.metrics == {"loss": 0.25}
    assert again.journal[-1]["kind"] == "finished"
