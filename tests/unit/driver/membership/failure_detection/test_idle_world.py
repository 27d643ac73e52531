"""Worlds in which no rank completes a step, although none waits for another."""

from __future__ import annotations

import pytest

from elastic.driver.events import Action, ProbeWorkers, Report, WorkerLocated, WorkerPaced
from elastic.driver.membership.failure_detection.idle_world import LEAST_S, LOCATE_S, TIMES
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from harness import wording
from harness.conversation import (
    MembershipConversation,
    exited,
    has,
    inside,
    outside,
    paced,
    running,
    started,
    static,
    the,
    worker,
)
from harness.golden import recorded

REPORTED = [paced("h:0", 2, 0.1), paced("h:1", 2, 0.1)]


def trained() -> MembershipConversation:
    talk = running(2, workers_min=1)
    talk.wait(30.0)
    talk.tell(*REPORTED)
    return talk


def warnings(actions: list[Action]) -> list[Report]:
    return [a for a in actions if isinstance(a, Report) and a.level == "warning"]


def logged_when_located(talk: MembershipConversation) -> list[Report]:
    """Return the log lines once the ranks' positions are known."""
    asked = talk.wait(LEAST_S)
    assert the(ProbeWorkers, asked).workers == [worker("h:0"), worker("h:1")]
    assert not warnings(asked)
    talk.tell(*(WorkerLocated(worker(f"h:{n}"), 2, f"train.py:{n + 5}") for n in range(2)))
    return warnings(talk.wait(LOCATE_S))


def test_stopped_ranks_are_named_once_with_their_lines():
    talk = trained()
    [line] = logged_when_located(talk)
    assert all(f"rank {n}" in line.text and f"train.py:{n + 5}" in line.text for n in range(2))
    assert not talk.wait(100 * LEAST_S)
    assert has(Report, talk.tell(REPORTED[0]))
    assert len(logged_when_located(talk)) == 1


def test_idle_world_is_known_after_a_snapshot():
    talk = trained()
    talk.m = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    assert len(logged_when_located(talk)) == 1


def test_idle_world_is_not_reported_before_the_first_progress_report():
    assert not running(2).wait(100 * LEAST_S)


@pytest.mark.parametrize("entered", [False, True])
def test_progress_when_no_worker_has_entered_elastic_run_then_is_logged_once(entered):
    talk = running(2, workers_min=1) if entered else started(2, workers_min=1)
    assert talk.m.prepares is not entered
    generation = talk.m.generation
    lines = warnings(talk.tell(paced("h:0", generation, 0.1), paced("h:1", generation, 0.1)))
    assert len(lines) == (0 if entered else 1)
    for line in lines:
        recorded("log", line.text)
    assert not warnings(talk.tell(paced("h:0", generation, 0.1)))


def test_progress_when_the_size_is_fixed_then_elastic_run_is_not_expected():
    talk = static(2)
    assert not talk.m.prepares
    assert not warnings(talk.tell(paced("h:0", 1, 0.1)))


def test_idle_limit_grows_with_the_length_of_steps():
    talk = running(2, workers_min=1)
    talk.wait(600.0)
    talk.tell(WorkerPaced(worker("h:0"), 2, 1, 10.0, 600.0))
    assert not talk.wait(TIMES * 600.0 - 1.0)
    assert has(ProbeWorkers, talk.wait(1.0))


@pytest.mark.parametrize("case", ["one waits", "long phase"])
def test_idle_world_is_not_reported_when_another_check_explains_the_wait(case):
    talk = trained()
    talk.tell(inside("h:0", 2) if case == "one waits" else outside("h:0", 2, phase="evaluation"))
    assert not any(
        wording.NO_STEP in line.text for line in warnings(talk.wait(LEAST_S + LOCATE_S + 1))
    )


def test_next_world_starts_its_own_idle_time():
    talk = trained()
    talk.wait(LEAST_S - 1)
    talk.tell(exited("h:1"))
    talk.ready("h:0", commit=(2, 5))
    assert not has(ProbeWorkers, talk.wait(LEAST_S - 1))
