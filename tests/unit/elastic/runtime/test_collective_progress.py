"""A worker's reports of its progress: nothing without waits, and a little with them."""

from __future__ import annotations

import pytest

import elastic
from elastic.errors import Invalid
from elastic.protocol import messages as protocol
from elastic.runtime.collective_progress import LOOK_S, ON_GPU, PACE_S, ProgressCounter
from harness.golden import raises


def told(progress: ProgressCounter, now: float) -> list[tuple[str, float, str]]:
    """Collective, seconds, phase."""
    messages = progress.due_messages(now)
    assert all(isinstance(m, protocol.Progress) for m in messages)
    return [(m.inside, round(m.waited_s, 3), m.phase) for m in messages]  # type: ignore[attr-defined]


def test_steps_without_waits_report_no_progress():
    progress = ProgressCounter()
    for step in range(100):
        progress.enter(2, "gradients", step * 0.1)
        assert not progress.leave(step * 0.1 + 0.05)
        assert told(progress, step * 0.1 + 0.05) == []


def test_a_wait_of_a_second_and_its_end_are_reported():
    progress = ProgressCounter()
    progress.enter(2, "allreduce.loss", 10.0)
    assert told(progress, 10.9) == []
    assert told(progress, 11.2) == [("allreduce.loss", 1.2, "")]
    assert told(progress, 12.2) == []
    assert told(progress, 16.3) == [("allreduce.loss", 6.3, "")], "again, so that its silence tells"
    assert progress.leave(17.0), "the driver thinks that it waits: it should hear at once"
    assert told(progress, 17.0) == [("", 0.0, "")]
    assert told(progress, 18.0) == []


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.3, 0.999])
def test_wait_is_reported_at_an_age_of_one_second_for_any_start(after_s):
    """The look at 10 comes before it, with others between: none of them may be the one that is late."""
    progress, now = ProgressCounter(), 10.0
    progress.enter(2, "allreduce.loss", 9.9)
    assert progress.due_messages(now) == [] and progress.next_look_s(now) == pytest.approx(0.9)
    progress.leave(10.0)
    next_look = now + progress.next_look_s(now)
    progress.enter(2, "allreduce.loss", 10.0 + after_s)
    for _ in range(3):
        now, said = next_look, told(progress, next_look)
        if said:
            break
        next_look = now + progress.next_look_s(now)
    assert said[0][0] == "allreduce.loss" and now == pytest.approx(11.0 + after_s)
    assert progress.next_look_s(now) == LOOK_S, "no more often while it lasts"


def test_a_waiting_worker_reports_the_progress_of_its_gpu():
    progress, asked = ProgressCounter(), []
    counts = protocol.Launches("gradients", 4, 7, 6, 6)

    def gpu() -> list[protocol.Launches]:
        asked.append(True)
        return [counts]

    assert progress.due_messages(9.0, gpu) == [] and not asked
    progress.enter(2, "gradients", 10.0)
    assert progress.due_messages(10.9, gpu) == [] and not asked
    (said,) = progress.due_messages(11.2, gpu)
    assert isinstance(said, protocol.Progress) and said.gpu == [counts]
    assert (
        progress.due_messages(12.2, gpu) == [] and len(asked) == 2
    )  # queried, though not reported
    progress.leave(13.0)
    (said,) = progress.due_messages(13.0, gpu)
    assert isinstance(said, protocol.Progress) and said.gpu == [] and len(asked) == 2


def test_a_waiting_worker_reports_its_line():
    progress = ProgressCounter()
    progress.enter(2, "gradients", 10.0, thread=7)
    (said,) = progress.due_messages(11.2, line=lambda thread: f"train.py:{thread}")
    assert isinstance(said, protocol.Progress) and said.line == "train.py:7"
    progress.leave(12.0)
    (said,) = progress.due_messages(12.0, line=lambda thread: f"train.py:{thread}")
    assert isinstance(said, protocol.Progress) and said.line == ""


def test_awaited_ranks_are_forgotten_when_the_wait_ends():
    progress = ProgressCounter()
    progress.add_awaited(2, 1, "train.py:40")  # no worker waits yet
    progress.enter(2, "allreduce.loss", 10.0)
    assert progress.awaited() == {}
    progress.add_awaited(1, 3, "old.py:1")  # of another generation
    progress.add_awaited(2, 1, "train.py:40")
    progress.add_awaited(2, 0, "train.py:50")
    assert progress.awaited() == {0: "train.py:50", 1: "train.py:40"}
    progress.leave(16.0)
    progress.enter(2, "gradients", 16.0)
    assert progress.awaited() == {}


def test_next_collective_starts_a_new_wait():
    progress = ProgressCounter()
    progress.enter(2, "allreduce.loss", 10.0)
    told(progress, 11.5)
    progress.leave(11.6)
    progress.enter(2, "gradients", 11.6)
    assert told(progress, 11.7) == [("", 0.0, "")]
    assert told(progress, 12.8) == [("gradients", 1.2, "")]


def test_collectives_are_counted_in_each_generation():
    progress = ProgressCounter()
    for _ in range(3):
        progress.enter(2, "gradients", 0.0)
        progress.leave(0.0)
    assert progress.entered == 3
    progress.enter(3, "gradients", 0.0)
    assert (progress.generation, progress.entered) == (3, 1)


def test_nested_collective_counts_as_the_outer_one():
    """A group is formed in the middle of a collective: that is one wait."""
    progress = ProgressCounter()
    progress.enter(2, "gradients", 10.0)
    progress.enter(2, "forming the gradients group", 10.1)
    assert told(progress, 11.5) == [("gradients", 1.5, "")]
    progress.leave(11.6)
    assert progress.inside == "gradients" and progress.entered == 1


def test_long_phase_is_reported_at_both_ends_and_restores_the_outer_phase():
    progress = ProgressCounter()
    outer, said = progress.begin_phase("evaluate", 2)
    assert isinstance(said, protocol.Progress) and said.phase == "evaluate"
    before, said = progress.begin_phase("write", 2)
    assert before == "evaluate" and said.phase == "write"
    assert progress.end_phase(before, 2).phase == "evaluate"
    assert progress.end_phase(outer, 2).phase == ""
    assert told(progress, 99.0) == [], "both ends were said when they were reached"


def test_long_phase_without_collectives_belongs_to_the_present_world():
    """A driver ignores reports of an earlier world, and would regard the worker as stuck."""
    progress = ProgressCounter()
    progress.enter(2, "gradients", 0.0)
    progress.leave(0.0)
    before, said = progress.begin_phase("last checkpoint", 3)
    assert (said.generation, said.entered) == (3, 0)
    assert progress.end_phase(before, 4).generation == 4


def test_wait_inside_a_long_phase_is_reported_with_the_phase():
    progress = ProgressCounter()
    progress.begin_phase("evaluate", 2)
    progress.enter(2, "allreduce.score", 10.0)
    assert told(progress, 12.0) == [("allreduce.score", 2.0, "evaluate")]


def test_pace_is_the_time_waited_in_half_a_minute():
    progress = ProgressCounter()
    progress.enter(2, "gradients", 0.0)
    progress.leave(0.0)
    assert progress.pace(0.0, 2) == []
    for second in range(30):
        progress.enter(2, "gradients", second)
        progress.leave(second + 0.6)
    (pace,) = progress.pace(PACE_S, 2)
    assert isinstance(pace, protocol.Pace)
    assert (pace.generation, pace.collectives, pace.over_s) == (2, 30, PACE_S)
    assert pace.waited_s == pytest.approx(18.0)
    assert progress.pace(2 * PACE_S, 2) == [], "nothing was done since"


def test_the_pace_contains_commits_without_a_separate_message():
    progress = ProgressCounter()
    progress.enter(2, "gradients", 0.0)
    progress.leave(0.5)
    assert progress.pace(1.0, 2, protocol.Commit(2, 4)) == []
    assert progress.pace(2.0, 2, protocol.Commit(2, 5)) == []
    (pace,) = progress.pace(1.0 + PACE_S, 2, protocol.Commit(2, 64))  # and no collective since
    assert isinstance(pace, protocol.Pace)
    assert (pace.commits, pace.commit) == (60, protocol.Commit(2, 64))
    assert progress.pace(1.0 + 2 * PACE_S, 2, protocol.Commit(2, 64)) == []


def test_a_pace_never_spans_two_worlds():
    progress = ProgressCounter()
    progress.enter(2, "gradients", 0.0)
    progress.leave(0.5)
    progress.pace(0.5, 2)
    progress.enter(3, "gradients", 29.0)
    progress.leave(29.5)
    assert progress.pace(31.0, 3) == []
    progress.enter(3, "gradients", 40.0)
    progress.leave(41.0)
    (pace,) = progress.pace(31.0 + PACE_S, 3)
    assert isinstance(pace, protocol.Pace) and pace.generation == 3 and pace.collectives == 1


def test_pace_without_collectives_belongs_to_the_present_world():
    progress = ProgressCounter()
    progress.enter(2, "gradients", 0.0)
    progress.leave(0.5)
    progress.pace(0.5, 2)
    assert progress.pace(31.0, 3) == []
    (pace,) = progress.pace(31.0 + PACE_S, 3, protocol.Commit(3, 60))
    assert isinstance(pace, protocol.Pace) and (pace.generation, pace.collectives) == (3, 0)


def test_long_phase_without_a_job_only_passes_exceptions_on():
    with pytest.raises(KeyError), elastic.long_phase("evaluate"):
        raise KeyError("x")


def test_a_long_phase_needs_a_name():
    with raises(Invalid), elastic.long_phase(""):
        pass


def test_collective_that_only_the_gpu_waits_for_is_reported_like_a_wait():
    progress = ProgressCounter()
    progress.enter(2, "reduce_scatter", 9.0)
    progress.leave(9.0)
    assert progress.due_messages(10.5, followed_since=lambda: 9.9) == []
    (said,) = progress.due_messages(11.0, followed_since=lambda: 9.9)
    assert isinstance(said, protocol.Progress)
    assert said.inside == ON_GPU and said.waited_s == pytest.approx(1.1) and said.entered == 1
    (over,) = progress.due_messages(12.0, followed_since=lambda: None)
    assert isinstance(over, protocol.Progress) and over.inside == ""


def test_the_wait_of_the_training_thread_is_reported_before_that_of_the_gpu():
    progress = ProgressCounter()
    progress.enter(2, "allreduce.loss", 10.0)
    (said,) = progress.due_messages(11.5, followed_since=lambda: 1.0)
    assert isinstance(said, protocol.Progress) and said.inside == "allreduce.loss"
