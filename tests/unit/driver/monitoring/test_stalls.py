"""Stalls of the training: from events to the stalls, their durations and the awaited ranks."""

from __future__ import annotations

import pytest

from elastic.driver import events
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.stalls import Stall, StallEnd, Stalls
from elastic.driver.reasons import ReasonKind, because
from elastic.protocol.messages import COPY, Worker
from harness.golden import recorded
from harness.published import STORE, WHY, published

A, B, C, D = (Worker("h", slot) for slot in range(4))


def world(*workers: Worker, at: float = 100.0) -> Stalls:
    stalls = Stalls(JobView())
    for worker in workers:
        stalls.view.note(events.WorkerReady(worker, 0, None, STORE), [], at)
    stalls.view.note(events.TimePassed(), [published(1, *workers)], at)
    return stalls


def waits(
    stalls: Stalls, *workers: Worker, since: float, number: int = 7, name: str = "gradients"
) -> None:
    """Report a wait, as workers do after a second."""
    for worker in workers:
        event = events.WorkerProgressed(worker, 1, number, name, 1.0, line="train.py:30")
        stalls.view.note(event, [], since + 1.0)


def goes_on(stalls: Stalls, worker: Worker, at: float, number: int = 7) -> None:
    stalls.view.note(events.WorkerProgressed(worker, 1, number), [], at)


def held(stalls: Stalls, since: float = 120.0) -> Stalls:
    """Rank 1 loops from here on."""
    waits(stalls, A, C, since=since)
    return stalls


def now(stalls: Stalls, at: float) -> Stall:
    """Return the current stall."""
    stall = stalls.current(at)
    assert stall is not None
    return stall


def ranks(stall: Stall | None) -> list[int]:
    assert stall is not None
    return [culprit.rank for culprit in stall.culprits]


def test_stall_starts_with_the_wait_of_the_remaining_ranks():
    stalls = held(world(A, B, C))
    assert stalls.waits_since == 120.0
    assert stalls.current(124.9) is None
    stalls.view.note(events.WorkerLocated(B, 1, "train.py:12"), [], 125.1)
    stall = stalls.current(160.0)
    assert stall is not None
    assert (stall.since, stall.seconds, stall.others, stall.where) == (120.0, 40.0, 2, "gradients")
    assert [(c.worker, c.rank, c.line) for c in stall.culprits] == [(B, 1, "train.py:12")]
    assert stall.end is None


def test_ended_stall_is_kept_with_its_seconds_and_line():
    stalls = held(world(A, B, C))
    stalls.view.note(events.WorkerLocated(B, 1, "train.py:12"), [], 125.1)
    goes_on(stalls, A, 160.2)
    goes_on(stalls, C, 160.3)
    assert stalls.current(170.0) is None and stalls.waits_since is None
    [stall] = stalls.past
    assert (stall.since, stall.until, stall.end) == (120.0, 160.2, StallEnd.RESUMED)
    assert ranks(stall) == [1] and stall.culprits[0].line == "train.py:12"
    assert stalls.count == 1
    # The line belongs to that wait, so the next one is located again.
    stalls.view.note(events.WorkerLocated(B, 1, "train.py:12"), [], 165.0)
    waits(stalls, A, C, since=200.0, number=8)
    assert now(stalls, 206.0).culprits[0].line == ""
    assert now(stalls, 206.0).culprits[0].worker == B


def test_line_of_a_stall_is_the_most_frequent_one():
    """The last probe may show a later line, before the others have reported the end of their wait."""
    stalls = held(world(A, B, C))
    for at, line in ((125.0, "train.py:12"), (130.0, "train.py:12"), (160.1, "train.py:30")):
        stalls.view.note(events.WorkerLocated(B, 1, line), [], at)
    goes_on(stalls, A, 160.2)
    assert stalls.past[-1].culprits[0].line == "train.py:12"


@pytest.mark.parametrize(
    ("event", "actions", "end"),
    [
        (
            events.TimePassed(),
            [
                events.KillWorker(B, because(ReasonKind.BUSY, for_s=40.0, rates="", where="")),
                events.BreakWorld(1, [A, C], WHY),
            ],
            StallEnd.KILLED,
        ),
        (events.WorkerExited(B, -9), [events.BreakWorld(1, [A, C], WHY)], StallEnd.LOST),
        (
            events.WorkerRaised(B, 1, None, "ValueError", ""),
            [events.BreakWorld(1, [A, C], WHY)],
            StallEnd.LOST,
        ),
        (events.HostLost("h", "no answer"), [], StallEnd.LOST),
        (events.WorkerExited(A, -9), [events.BreakWorld(1, [B, C], WHY)], StallEnd.BROKEN),
        (events.StopRequested("SIGTERM"), [events.EndJob(143, WHY)], StallEnd.JOB_ENDED),
    ],
)
def test_stall_ends_when_its_culprit_exits_the_world_breaks_or_the_job_ends(event, actions, end):
    stalls = held(world(A, B, C))
    stalls.view.note(event, actions, 160.0)
    stalls.view.note(events.TimePassed(), [published(2, A, C)], 161.0)
    [stall] = stalls.past
    assert (ranks(stall), stall.seconds, stall.end) == ([1], 40.0, end)
    assert stalls.current(200.0) is None


def test_short_or_usual_waits_are_no_stalls():
    stalls = world(A, B, C)
    waits(stalls, A, C, since=120.0)
    goes_on(stalls, A, 124.0)
    for worker in (A, B, C):  # one collective in 36 s
        stalls.view.note(events.WorkerPaced(worker, 1, 1, 4.0, 36.0), [], 156.0)
    waits(stalls, A, C, since=160.0, number=8)
    assert stalls.current(195.0) is None
    assert stalls.current(197.0) is not None
    goes_on(stalls, A, 195.0, number=8)
    assert not stalls.past


def test_report_during_a_stall_does_not_raise_the_usual_step_time():
    stalls = held(world(A, B, C))
    goes_on(stalls, A, 160.0)
    stalls.view.note(events.WorkerPaced(A, 1, 1, 40.0, 60.0), [], 170.0)
    waits(stalls, A, C, since=200.0, number=8)
    assert stalls.current(206.0) is not None


def test_worker_in_a_long_phase_is_no_culprit():
    stalls = world(A, B, C)
    stalls.view.note(events.WorkerProgressed(B, 1, 6, phase="evaluation"), [], 119.0)
    waits(stalls, A, C, since=120.0)
    assert stalls.current(180.0) is None
    stalls.view.note(
        events.WorkerProgressed(B, 1, 6), [], 180.0
    )  # the phase has ended, and it loops
    stall = now(stalls, 200.0)
    assert (ranks(stall), stall.since) == ([1], 180.0)


def test_progressing_ranks_of_another_process_set_are_no_culprits():
    stalls = world(A, B, C, D)
    waits(stalls, A, since=120.0)  # for B; C and D train independently
    for worker in (C, D):
        stalls.view.note(events.WorkerPaced(worker, 1, 9, 1.0, 3.0), [], 128.0)
    assert ranks(stalls.current(129.0)) == [1]


def test_no_rank_is_blamed_when_all_wait_until_one_is_killed_for_a_gpu_hang():
    stalls = world(A, B)
    waits(stalls, A, since=120.0)
    waits(stalls, B, since=122.0)
    assert stalls.current(150.0) is None
    stall = now(stalls, 160.0)
    assert (ranks(stall), stall.since, stall.others) == ([], 122.0, 2)
    hang = because(ReasonKind.GPU_HANGS, for_s=60.0, number=3, group="world")
    stalls.view.note(events.TimePassed(), [events.KillWorker(B, hang)], 190.0)
    [past] = stalls.past
    assert (ranks(past), past.since, past.seconds, past.end) == ([1], 122.0, 68.0, StallEnd.KILLED)


def test_copy_of_the_state_to_newcomers_is_no_stall():
    stalls = world(A, B)
    waits(stalls, A, B, since=120.0, name=COPY)
    assert stalls.current(300.0) is None


def test_worker_that_does_not_reach_a_planned_stop_is_the_culprit():
    stalls = world(A, B)
    stalls.view.note(events.WorkerReady(A, 1, None, STORE), [], 120.0)
    assert ranks(stalls.current(130.0)) == [1]
    stalls.view.note(events.WorkerReady(B, 1, None, STORE), [published(2, A, B)], 140.0)
    [stall] = stalls.past
    assert (stall.seconds, stall.end) == (20.0, StallEnd.RESUMED)


def test_worker_that_prepares_its_training_for_longer_is_no_culprit():
    stalls = Stalls(JobView())
    for worker in (A, B):
        stalls.view.note(events.WorkerReady(worker, 0, None, STORE, running=False), [], 100.0)
    stalls.view.note(events.TimePassed(), [published(1, A, B)], 100.0)
    stalls.view.note(events.WorkerReady(A, 1, None, STORE), [], 120.0)
    assert stalls.current(180.0) is None
    stalls.view.note(events.WorkerReady(B, 1, None, STORE), [published(2, A, B)], 180.0)
    assert not stalls.past


def test_returned_worker_neither_waits_nor_is_awaited():
    stalls = world(A, B, C)
    stalls.view.note(events.WorkerReturned(A, 1), [], 120.0)
    assert stalls.current(200.0) is None
    waits(stalls, B, since=200.0)
    assert ranks(stalls.current(210.0)) == [2]


def test_frozen_culprit_has_its_reason():
    stalls = held(world(A, B, C))
    stalls.view.note(events.WorkerFrozen(B, "stopped by a signal"), [], 121.0)
    recorded("messages", now(stalls, 130.0).culprits[0].frozen)


def test_restarted_driver_counts_the_whole_wait_once_reported_again():
    stalls = held(world(A, B, C))
    stalls.view.note(events.DriverRestarted(), [], 130.0)
    assert stalls.current(130.0) is None
    next_one = Stalls(JobView())
    next_one.view.adopt({A: (0, 0), B: (0, 1), C: (0, 2)}, 1, 130.0)
    for each in (stalls, next_one):
        each.view.note(events.WorkerProgressed(A, 1, 7, "gradients", 12.0), [], 132.0)
        assert (ranks(now(each, 133.0)), now(each, 133.0).since) == ([1, 2], 120.0)
        each.view.note(events.WorkerProgressed(C, 1, 7, "gradients", 13.0), [], 133.0)
        assert ranks(each.current(133.0)) == [1]


def test_seconds_of_an_interval_sum_all_its_stalls():
    stalls = held(world(A, B, C))
    goes_on(stalls, A, 130.0)
    waits(stalls, A, C, since=150.0, number=8)
    goes_on(stalls, A, 170.0, number=8)
    waits(stalls, A, C, since=200.0, number=9)

    def seconds(since: float, until: float) -> float:
        return stalls.seconds(since, until, stalls.current(until))

    assert seconds(100.0, 202.0) == 30.0  # the last wait is no stall yet
    assert seconds(100.0, 210.0) == 40.0
    assert seconds(125.0, 210.0) == 35.0
    assert seconds(130.0, 204.0) == 20.0
    assert seconds(160.0, 210.0) == 20.0
    assert seconds(205.0, 210.0) == 5.0
    assert stalls.undecided_since(204.0) == 200.0 and stalls.undecided_since(206.0) == 206.0


def test_only_the_newest_stalls_are_kept_but_all_are_counted():
    stalls = world(A, B)
    for number in range(300):
        waits(stalls, A, since=1000.0 + 20 * number, number=number + 1)
        goes_on(stalls, A, 1010.0 + 20 * number, number=number + 1)
    assert stalls.count == 300 and len(stalls.past) == 200
    assert stalls.seconds(0.0, 1e6, None) == 3000.0
