"""Workers whose gradients are wrong: they are fenced, and their slots or hosts are not used again."""

from __future__ import annotations

import pytest

from elastic.driver.events import (
    BreakWorld,
    DrainRequested,
    HealthOutcome,
    HostsChanged,
    KillWorker,
    LetGo,
    Report,
    StartWorker,
    WorkerHealthChecked,
    WorkerMiscomputed,
)
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Place
from harness.conversation import (
    FOUR,
    MembershipConversation,
    exited,
    failed,
    has,
    hosts,
    names,
    on_two_hosts,
    static,
    the,
    worker,
)

PLACE, FIRST = Place(0, 1, 0, 1, 0, 1), because(ReasonKind.FIRST_START)


def wrong(rank: int = 2, by: str = "a:0", generation: int = 0, **more) -> WorkerMiscomputed:
    facts = {"step": 17, "shard": 5, "digest": "00ff", "right": "00fe", "witnesses": [0, 1]}
    return WorkerMiscomputed(worker(by), generation, rank=rank, **{**facts, "agreed": 9, **more})


def told(talk: MembershipConversation, **of):
    return talk.tell(wrong(generation=talk.m.generation, **of))


def test_worker_when_outvoted_then_is_fenced_with_the_evidence():
    talk = on_two_hosts()
    actions = told(talk)
    kill = the(KillWorker, actions)
    assert kill.worker == worker("b:0") and kill.reason.kind is ReasonKind.MISCOMPUTED
    assert kill.reason.facts == {
        "step": 17,
        "shard": 5,
        "digest": "00ff",
        "right": "00fe",
        "witnesses": "a:0#1, a:1#1",
        "agreed": 9,
        "quarantine": "slot",
    }
    assert has(BreakWorld, actions)
    assert not has(KillWorker, told(talk, by="a:1")), "every rank reports it"
    assert not has(KillWorker, talk.tell(failed("a:0", generation=talk.m.generation)))


@pytest.mark.parametrize("rank", [-1, 4])
def test_report_when_the_rank_does_not_exist_then_is_ignored(rank):
    assert not has(KillWorker, told(on_two_hosts(), rank=rank))


def test_report_when_its_world_is_over_then_is_ignored():
    talk = on_two_hosts()
    assert not has(KillWorker, talk.tell(wrong(generation=talk.m.generation - 1)))


def survivors_train(talk: MembershipConversation, *stay: str) -> None:
    talk.tell(exited("b:0", -9))
    talk.ready(*stay, commit=(talk.m.generation, 3))
    assert talk.members == [f"{name}#1" for name in stay]
    talk.resume()


def test_slot_when_its_worker_was_wrong_then_stays_empty_until_an_operator_releases_the_slot():
    talk = on_two_hosts()
    told(talk)
    survivors_train(talk, "a:0", "a:1", "b:1")
    assert not names(talk.wait(10_000.0))
    slots = talk.m.worlds.staff.slots
    assert [*slots.quarantined] == [("b", 0)] and slots.open(talk.now) == 3
    again = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    assert again.worlds.staff.slots.quarantined == slots.quarantined
    assert names(talk.tell(DrainRequested(1, "b", True))) == ["b:0#2"]
    assert not slots.quarantined


def test_slot_when_quarantine_is_off_then_only_cools_down():
    talk = on_two_hosts(quarantine="off")
    told(talk)
    talk.tell(exited("b:0", -9))
    assert names(talk.wait(1.1)) == ["b:0#2"]


def test_host_when_quarantined_then_its_other_workers_leave_and_no_worker_starts():
    talk = on_two_hosts(quarantine="host")
    told(talk)
    talk.tell(exited("b:0", -9))
    let_go = the(LetGo, talk.ready("a:0", "a:1", "b:1", commit=(talk.m.generation, 3)))
    assert let_go.worker == worker("b:1") and let_go.reason.kind is ReasonKind.QUARANTINED
    assert talk.members == ["a:0#1", "a:1#1"]
    talk.resume()
    talk.tell(exited("b:1", 0))
    assert not names(talk.wait(10_000.0))
    assert talk.m.worlds.staff.slots.open(talk.now) == 2
    assert names(talk.tell(DrainRequested(1, "b", True))) == ["b:0#2", "b:1#2"]


def test_host_when_too_few_workers_are_elsewhere_then_its_other_workers_stay():
    talk = on_two_hosts(quarantine="host", workers_min=3)
    told(talk)
    survivors_train(talk, "a:0", "a:1", "b:1")
    record = talk.m.roster[worker("b:1")]
    assert record.leaving is not None and record.leaving.kind is ReasonKind.QUARANTINED
    talk.tell(DrainRequested(1, "b", True))
    assert record.leaving is None


def test_slot_when_the_job_has_a_health_check_then_the_next_check_decides():
    talk = MembershipConversation(np=2, workers_min=1, health_check="auto", elastic_timeout_s=1e6)
    talk.tell(hosts(a=1, b=1))
    for name in ("a:0", "b:0"):
        talk.tell(WorkerHealthChecked(worker(name), HealthOutcome.PASSED, 0))
        talk.connect(name)
    for name in ("a:0", "b:0"):
        talk.ready(name, running=False)
    for name in ("a:0", "b:0"):
        talk.ready(name)
    talk.wait(1.0)
    talk.resume()
    told(talk, rank=1, witnesses=[0])
    assert not names(talk.tell(exited("b:0", -9)))
    assert names(talk.wait(1.1)) == ["b:0#2"]
    failing = talk.tell(WorkerHealthChecked(worker("b:0#2"), HealthOutcome.WRONG_RESULT, 3))
    assert the(KillWorker, failing).reason.kind is ReasonKind.UNHEALTHY
    talk.tell(exited("b:0#2", -9))
    assert names(talk.wait(2.1)) == ["b:0#3"]
    talk.tell(WorkerHealthChecked(worker("b:0#3"), HealthOutcome.PASSED, 0))
    assert not talk.m.worlds.staff.slots.unhealthy


def test_host_when_unlisted_then_its_quarantined_slots_are_forgotten():
    talk = on_two_hosts()
    told(talk)
    survivors_train(talk, "a:0", "a:1", "b:1")
    talk.tell(hosts(a=2))
    assert not talk.m.worlds.staff.slots.quarantined


def test_job_of_a_fixed_size_when_a_worker_was_wrong_then_its_exit_ends_the_job():
    talk = static(4)
    assert the(KillWorker, told(talk, rank=1)).reason.kind is ReasonKind.MISCOMPUTED
    talk.tell(exited("h:1", -9))
    assert talk.m.verdict is not None and talk.m.verdict.code
    killed_for = talk.m.verdict.reason.facts["killed_for"]
    assert isinstance(killed_for, Reason) and killed_for.kind is ReasonKind.MISCOMPUTED


def test_log_when_a_slot_is_quarantined_then_has_one_line_with_the_reason():
    lines = [
        each.about.kind
        for each in told(on_two_hosts())
        if isinstance(each, Report) and each.about is not None
    ]
    assert lines.count(ReasonKind.QUARANTINED) == 1 and lines.count(ReasonKind.MISCOMPUTED) == 1


@pytest.mark.parametrize("which", ["", "slots", "all"])
def test_settings_when_the_quarantine_value_is_unknown_then_are_refused(which):
    with pytest.raises(Invalid):
        Settings(np=1, workers_min=1, workers_max=1, elastic=True, quarantine=which)


def test_view_when_a_slot_is_released_then_shows_no_quarantine():
    view, talk = JobView(), on_two_hosts()
    for name in FOUR:
        view.note(HostsChanged({}), [StartWorker(worker(name), PLACE, FIRST)], 0.0)
    event = wrong(generation=talk.m.generation)
    view.note(event, talk.tell(event), 2.0)
    assert {slot: why.kind for slot, why in view.quarantined.items()} == {
        ("b", 0): ReasonKind.MISCOMPUTED
    }
    view.note(DrainRequested(1, "b", True), [], 3.0)
    assert not view.quarantined
