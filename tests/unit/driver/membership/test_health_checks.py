"""Health checks of slots: no worker is in a world before its check has passed, and no world waits for one."""

from __future__ import annotations

import pytest

from elastic.driver.events import (
    EndJob,
    HealthOutcome,
    HostLost,
    KillWorker,
    PublishWorld,
    Report,
    StartWorker,
    WelcomeWorker,
    WorkerHealthChecked,
)
from elastic.driver.membership.records.roster import WorkerStage
from elastic.driver.membership.scheduling.worker_pool import CHECK_SLACK_S, HELD_S
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.reasons import ReasonKind
from harness.conversation import (
    MembershipConversation,
    disconnected,
    exited,
    has,
    hosts,
    names,
    order,
    ready,
    the,
    worker,
)

LIMIT_S = 20.0
BAD = [HealthOutcome.FAILED, HealthOutcome.TIMED_OUT, HealthOutcome.WRONG_RESULT]


def checked(name: str, outcome: HealthOutcome = HealthOutcome.PASSED, line: str = "x"):
    code = {HealthOutcome.PASSED: 0, HealthOutcome.TIMED_OUT: None}.get(outcome, 3)
    return WorkerHealthChecked(worker(name), outcome, code, line, 0.5)


def starting(**settings) -> MembershipConversation:
    """Two hosts of one slot each start a worker."""
    defaults = {
        "np": 2,
        "workers_min": 1,
        "health_check": "auto",
        "health_check_s": LIMIT_S,
        "bandwidth_factor": 0.0,
    }
    talk = MembershipConversation(**{**defaults, **settings})
    talk.tell(hosts(a=1, b=1))
    return talk


def training(**settings) -> MembershipConversation:
    """The worker of host a trains alone, and host b's next worker is starting."""
    talk = starting(**settings)
    talk.tell(checked("a:0"), checked("b:0", HealthOutcome.FAILED), exited("b:0"))
    talk.connect("a:0")
    talk.ready("a:0", running=False)
    talk.ready("a:0")
    talk.wait(1.0)
    talk.resume()
    assert talk.members == ["a:0#1"]
    assert talk.m.roster[worker("b:0#2")].stage is WorkerStage.STARTING
    return talk


def errors(actions) -> list[Report]:
    return [each for each in actions if isinstance(each, Report) and each.level == "error"]


def test_init_is_answered_once_the_check_has_passed():
    talk = starting()
    assert not has(WelcomeWorker, talk.connect("a:0"))
    assert talk.m.roster[worker("a:0")].stage is WorkerStage.HELD
    assert the(WelcomeWorker, talk.tell(checked("a:0"))).worker == worker("a:0")
    assert not talk.tell(checked("a:0")), "repeated by its agent"


def test_init_after_the_check_is_answered_at_once():
    talk = starting()
    assert not talk.tell(checked("a:0"))
    assert has(WelcomeWorker, talk.connect("a:0"))


def test_job_without_a_check_ignores_results():
    talk = starting(health_check=None)
    assert not talk.tell(checked("a:0", HealthOutcome.FAILED))
    assert has(WelcomeWorker, talk.connect("a:0"))


@pytest.mark.parametrize("outcome", BAD)
@pytest.mark.parametrize("connects", [False, True])
def test_failed_check_keeps_the_worker_out_and_is_logged_once(outcome, connects):
    talk = starting()
    if connects:
        talk.connect("b:0")
    actions = talk.tell(checked("b:0", outcome))
    [line] = errors(actions)
    assert line.about is not None and line.about.kind is ReasonKind.UNHEALTHY
    assert line.about.facts["outcome"] == outcome.value and line.about.facts["slot"] == "b:0"
    assert the(KillWorker, actions).worker == worker("b:0")
    assert not has(StartWorker, talk.tell(exited("b:0")))
    assert names(talk.wait(1.0)) == ["b:0#2"], "it is checked again after its cooldown"
    assert not errors(talk.tell(checked("b:0#2", outcome, line="another text")))


def test_another_result_is_logged_again():
    talk = starting()
    talk.tell(checked("b:0", HealthOutcome.FAILED), exited("b:0"))
    talk.wait(1.0)
    assert errors(talk.tell(checked("b:0#2", HealthOutcome.WRONG_RESULT)))


def test_slot_that_keeps_failing_is_never_given_up_and_its_cooldown_doubles():
    talk = starting(cooldown_max_s=8.0, elastic_timeout_s=1e6)
    for number, cooldown_s in enumerate([1, 2, 4, 8, 8, 8, 8], start=1):
        name = f"b:0#{number}"
        talk.tell(checked(name, HealthOutcome.FAILED), exited(name))
        assert not names(talk.wait(cooldown_s - 0.5)), name
        assert names(talk.wait(0.6)) == [f"b:0#{number + 1}"]


def test_slot_is_used_again_with_the_shortest_cooldown_once_a_check_has_passed():
    talk = training()
    talk.tell(checked("b:0#2", HealthOutcome.FAILED), exited("b:0#2"))
    talk.wait(2.0)
    assert any(isinstance(each, Report) for each in talk.tell(checked("b:0#3")))
    assert not talk.m.worlds.staff.slots.unhealthy
    talk.tell(exited("b:0#3", 1))
    assert names(talk.wait(1.1)) == ["b:0#4"]


def test_each_start_is_checked_also_after_a_worker_trained_there():
    talk = training()
    talk.tell(checked("b:0#2"))
    talk.join("b:0#2")
    talk.wait(1.0)
    talk.stop_all()
    talk.ready("b:0#2", generation=0)
    talk.wait(1.0)
    talk.tell(exited("b:0#2"))
    talk.wait(1.0)
    assert talk.m.roster[worker("b:0#3")].unchecked


def test_world_neither_waits_for_a_pending_check_nor_changes_before_the_check_has_passed():
    talk = training()
    assert not talk.connect("b:0#2")
    assert not talk.wait(LIMIT_S / 2)
    talk.tell(checked("b:0#2"))
    talk.tell(ready("b:0#2", 0))
    talk.wait(1.0)
    assert order(the(PublishWorld, talk.stop_all())) == ["a:0#1", "b:0#2"]


@pytest.mark.parametrize("passed", [False, True])
def test_first_world_waits_for_a_pending_check_within_a_limit(passed):
    talk = starting()
    talk.connect("a:0", "b:0")
    talk.tell(checked("a:0"))
    assert not has(PublishWorld, talk.ready("a:0", running=False))
    assert not has(PublishWorld, talk.wait(HELD_S - 0.1))
    if passed:
        talk.tell(checked("b:0"))
        assert len(the(PublishWorld, talk.ready("b:0", running=False)).members) == 2
    else:
        assert order(the(PublishWorld, talk.wait(0.2))) == ["a:0#1"]


def test_result_that_does_not_arrive_counts_as_timed_out():
    talk = training()
    talk.connect("b:0#2")
    assert not talk.wait(LIMIT_S + CHECK_SLACK_S - 0.1)
    actions = talk.wait(0.2)
    assert the(KillWorker, actions).worker == worker("b:0#2")
    [line] = errors(actions)
    assert line.about is not None and line.about.facts["outcome"] == "timed_out"


def test_worker_held_by_its_check_is_killed_after_losing_its_connection():
    talk = training()
    talk.connect("b:0#2")
    talk.tell(disconnected("b:0#2"))
    assert the(KillWorker, talk.wait(2.1)).worker == worker("b:0#2")


def test_host_that_is_lost_during_its_check_is_not_waited_for():
    talk = starting()
    talk.connect("a:0", "b:0")
    talk.tell(checked("a:0"))
    talk.ready("a:0", running=False)
    assert order(the(PublishWorld, talk.tell(HostLost("b", "it is gone")))) == ["a:0#1"]


def test_job_of_a_fixed_size_ends_with_the_result():
    talk = starting(elastic=False, workers_min=2)
    end = the(EndJob, talk.tell(checked("b:0", HealthOutcome.WRONG_RESULT)))
    assert end.code == 1 and end.reason.kind is ReasonKind.UNHEALTHY


def test_end_for_lack_of_workers_names_the_unhealthy_slots():
    talk = starting(workers_min=2, elastic_timeout_s=30.0)
    talk.connect("a:0")
    talk.tell(checked("a:0"), checked("b:0", HealthOutcome.FAILED), exited("b:0"))
    talk.ready("a:0", running=False)
    ends = []
    for number in range(2, 9):
        actions = talk.wait(8.0)
        ends += [each for each in actions if isinstance(each, EndJob)]
        if ends:
            break
        talk.tell(checked(f"b:0#{number}", HealthOutcome.FAILED), exited(f"b:0#{number}"))
    [end] = ends
    assert end.reason.kind is ReasonKind.TOO_FEW_HEALTHY and end.reason.facts["slots"] == "b:0"


def test_failures_are_forgotten_once_the_host_has_left_the_list():
    talk = training()
    talk.tell(hosts(a=1))
    assert not talk.m.worlds.staff.slots.unhealthy


def test_pending_check_is_known_after_a_snapshot():
    talk = training()
    talk.connect("b:0#2")
    talk.m = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    assert has(WelcomeWorker, talk.tell(checked("b:0#2")))
