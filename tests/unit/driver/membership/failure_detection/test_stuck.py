"""Members that others wait for: idle ones are killed, busy ones get more time, excused ones are named.

The scenarios cover the common cases.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.driver.events import (
    BreakWorld,
    DriverRestarted,
    DumpStacks,
    EndJob,
    KillWorker,
    PrepareChange,
    ProbeWorkers,
    PublishWorld,
    Report,
    TellAwaited,
    WorkerDisconnected,
    WorkerFrozen,
    WorkerLeaving,
    WorkerLocated,
    WorkerProbed,
    WorkerRaised,
    WorkerReconnected,
)
from elastic.driver.membership.membership import Phase
from elastic.driver.membership.records.roster import Roster, WorkerRecord, WorkerStage
from elastic.driver.reasons import ReasonKind, because
from elastic.protocol.messages import GRADIENTS, SHARDS_COMMIT
from harness.conversation import (
    MembershipConversation,
    checked,
    disconnected,
    exited,
    frozen,
    has,
    hosts,
    inside,
    leaving,
    names,
    order,
    outside,
    paced,
    raised,
    ready,
    returned,
    running,
    said,
    started,
    static,
    thawed,
    the,
    worker,
)
from harness.golden import recorded


def waiting(workers: int = 3, missing: str = "h:2", **settings) -> MembershipConversation:
    """All but one have waited in the collective 'loss' for a second."""
    talk = running(workers, **settings)
    talk.wait(60)
    others = [name for name in talk.members if name != str(worker(missing))]
    talk.tell(*(inside(name, 2) for name in others))
    return talk


def reconnected(name: str, generation: int) -> WorkerReconnected:
    return WorkerReconnected(worker(name), generation, True)


def probed(actions: list) -> list[list[str]]:
    """Return the workers of each probe."""
    return [[str(w) for w in a.workers] for a in actions if isinstance(a, ProbeWorkers)]


# ---- probes -------------------------------------------------------------------------------------


def test_no_worker_is_probed_while_all_progress():
    assert running(4).wait(10_000) == []


def test_worker_missing_for_five_seconds_is_probed_repeatedly():
    talk = waiting(4)
    assert not has(ProbeWorkers, talk.wait(3.9))  # the others had waited for a second already
    assert probed(talk.wait(0.2)) == [["h:2#1"]]
    assert probed(talk.wait(4.8)) == []
    assert probed(talk.wait(10)) == [["h:2#1"]] * 2


def test_short_step_causes_no_probe():
    talk = running(2)
    for _ in range(100):
        assert talk.tell(inside("h:0", 2)) == []
        assert talk.wait(3.0) == []
        assert talk.tell(outside("h:0", 2)) == []
        assert talk.wait(1.0) == []


def test_waits_of_different_steps_are_not_added():
    talk = running(3)
    for step in range(50):
        # Some worker always waits, but none for long.
        talk.tell(inside("h:0", 2, entered=2 * step), outside("h:1", 2, entered=2 * step))
        assert talk.wait(1.5) == []
        talk.tell(inside("h:1", 2, entered=2 * step + 1), outside("h:0", 2, entered=2 * step + 1))
        assert talk.wait(1.5) == []


def test_worker_that_arrives_is_no_longer_suspected():
    talk = waiting()
    talk.wait(6)
    talk.tell(inside("h:2", 2))
    assert not has(ProbeWorkers, talk.wait(20))


def test_waits_of_an_older_generation_are_ignored():
    talk = running(3)
    assert talk.tell(inside("h:0", 1), outside("h:1", 1, phase="validation")) == []
    assert talk.wait(100) == []


def test_probe_result_is_ignored_when_no_worker_waits():
    talk = running(3)
    assert talk.tell(WorkerProbed(worker("h:2"), 1.0, 1, "S")) == []
    talk.tell(exited("h:2"))
    assert talk.tell(WorkerProbed(worker("h:2"), 1.0, 1, "S")) == []


def test_single_worker_is_not_waited_for():
    talk = running(1, workers_min=1)
    talk.works("h:0")
    talk.tell(inside("h:0", 2))
    assert not has(ProbeWorkers, talk.wait(1000))


# ---- idle ---------------------------------------------------------------------------------------


def test_log_contains_the_line_at_which_a_worker_is_stuck():
    talk = waiting()
    talk.works("h:2", cpu=0.01)
    talk.tell(WorkerLocated(worker("h:2"), 1, "old.py:1"))  # of another generation
    recorded("log", said(talk.wait(10)))
    awaited = the(TellAwaited, talk.tell(WorkerLocated(worker("h:2"), 2, "train.py:40")))
    waiters = [worker("h:0"), worker("h:1")]
    assert (awaited.members, awaited.rank, awaited.line) == (waiters, 2, "train.py:40")
    recorded("log", said(talk.wait(10)))


def test_log_contains_the_last_known_line():
    talk = running(2)
    talk.works("h:1")
    talk.tell(inside("h:1", 2, "gradients 3", entered=6), outside("h:1", 2, entered=6))
    talk.tell(inside("h:0", 2, "loss"))
    recorded("log", said(talk.wait(10)))


def test_worker_that_progresses_between_stacks_and_kill_survives():
    talk = waiting()
    talk.works("h:2")
    assert has(DumpStacks, talk.wait(29.2))
    recorded("log", said(talk.tell(inside("h:2", 2))))
    assert not has(KillWorker, talk.wait(5))


@pytest.mark.parametrize("last", [False, True])
def test_survivor_that_arrives_between_stacks_and_kill_survives(last):
    talk = running(5)
    talk.works("h:1")
    talk.works("h:2", cpu=1.0)
    talk.tell(exited("h:0"))
    talk.ready(*(["h:2"] if last else []), "h:3", "h:4", commit=(2, 5))
    assert names(talk.wait(30.01), DumpStacks) == ["h:1#1"]
    assert has(PublishWorld, talk.tell(ready("h:1", 2, (2, 5)))) is last
    assert names(talk.wait(5), KillWorker) == []


def test_activity_restarts_the_idle_limit():
    talk = waiting()
    talk.works("h:2")
    talk.wait(22)
    talk.works("h:2", cpu=1.0)
    talk.wait(5)
    talk.works("h:2")
    assert not has(DumpStacks, talk.wait(25))
    assert has(DumpStacks, talk.wait(10))


@pytest.mark.slow
def test_no_worker_is_killed_without_probe_results():
    talk = waiting()
    assert not has(KillWorker, talk.wait(10_000))


def test_limit_0_only_names_an_idle_worker():
    talk = waiting(idle_s=0.0)
    talk.works("h:2")
    actions = talk.wait(3000)
    recorded("log", said(actions))
    recorded("log", said(actions))
    assert not has(KillWorker, actions)


def test_shorter_idle_limit_probes_sooner():
    talk = waiting(idle_s=3.0)
    talk.works("h:2")
    assert names(talk.wait(3.0), KillWorker) == ["h:2#1"]


def test_several_stuck_workers_are_named_and_killed():
    talk = running(8, workers_min=2)
    talk.wait(60)
    for slot in range(2, 8):
        talk.works(f"h:{slot}")
    talk.tell(inside("h:0", 2), inside("h:1", 2))
    lines = said(talk.wait(15)).splitlines()
    assert len(lines) == 5
    recorded("log", lines[-1])
    assert names(talk.wait(15), KillWorker) == [f"h:{slot}#1" for slot in range(2, 8)]


def test_completed_collectives_clear_a_suspect():
    talk = waiting(4, idle_s=90)  # the others may wait in a process set without it
    talk.works("h:2")
    for _ in range(10):
        assert not has(DumpStacks, talk.wait(30))
        talk.tell(paced("h:2", 2, 0.4))
    for _ in range(2):
        assert not has(DumpStacks, talk.wait(25))
        talk.tell(paced("h:2", 2, 0.0, collectives=0))
    assert has(DumpStacks, talk.wait(40))


def test_collectives_completed_before_the_wait_do_not_clear_a_suspect():
    talk = waiting()
    talk.works("h:2", cpu=1.0)
    talk.wait(15)
    talk.works("h:2")
    talk.wait(5)
    talk.tell(paced("h:2", 2, 0.4))  # of the last 30 s
    assert not has(KillWorker, talk.wait(23))  # idle for 15 s, as known before
    assert names(talk.wait(7), KillWorker) == ["h:2#1"]


def test_cost_of_writing_stacks_is_not_activity():
    talk = waiting(idle_s=0.6)  # probed ten times per second
    talk.works("h:2")
    actions = talk.wait(5)
    [dump] = [i for i, action in enumerate(actions) if isinstance(action, DumpStacks)]
    [kill] = [i for i, action in enumerate(actions) if isinstance(action, KillWorker)]
    assert probed(actions[dump:kill]) == []


# ---- busy ---------------------------------------------------------------------------------------


def test_reading_data_is_activity():
    talk = waiting()
    talk.works("h:2", io=1e6)
    assert not has(KillWorker, talk.wait(500))


@pytest.mark.slow
def test_limit_0_never_kills_a_busy_worker():
    talk = waiting(busy_s=0.0, busy_warning_s=0.0)
    talk.works("h:2", cpu=1.0)
    actions = talk.wait(10_000)
    assert not has(KillWorker, actions) and said(actions) == ""


# ---- excused ------------------------------------------------------------------------------------


def test_worker_is_judged_from_the_end_of_its_long_phase():
    talk = waiting()
    talk.works("h:2")
    talk.tell(outside("h:2", 2, phase="validation"))
    assert not has(KillWorker, talk.wait(10_000))
    talk.tell(outside("h:2", 2))
    assert not has(KillWorker, talk.wait(29))
    assert names(talk.wait(2), KillWorker) == ["h:2#1"]


# ---- all ranks wait -----------------------------------------------------------------------------


def test_waits_in_different_collectives_are_reported_without_a_kill():
    talk = running(4)
    talk.tell(inside("h:0", 2), inside("h:1", 2), inside("h:2", 2, "accuracy"), inside("h:3", 2))
    for name in talk.members:
        talk.works(name)
    assert talk.wait(28) == []
    report, broken = talk.wait(2)
    assert isinstance(report, Report) and report.level == "error"
    recorded("messages", report.text)
    # Retried from the last commit; the third time ends the job.
    assert isinstance(broken, BreakWorld)
    assert str(broken.reason) == report.text


def test_known_script_lines_are_named():
    talk = running(3)
    talk.tell(inside("h:0", 2, line="train.py:9"), inside("h:1", 2, line="train.py:12"))
    talk.tell(inside("h:2", 2, "accuracy", line="train.py:30"))
    recorded("log", said(talk.wait(31)))


def test_waits_in_different_collectives_end_a_static_job():
    talk = static(2)
    talk.tell(inside("h:0", 1), inside("h:1", 1, "accuracy"))
    reason = the(EndJob, talk.wait(31)).reason
    assert reason.kind is ReasonKind.DIFFERENT_COLLECTIVES
    recorded("reasons", str(reason))


def test_sharded_commit_on_some_ranks_only_is_reported():
    talk = running(2)
    talk.tell(inside("h:0", 2, SHARDS_COMMIT), inside("h:1", 2))
    for name in talk.members:
        talk.works(name)
    reason = the(BreakWorld, talk.wait(31)).reason
    assert reason.kind is ReasonKind.COMMIT_ON_SOME_RANKS
    recorded("reasons", str(reason))


def test_sharded_commit_on_all_ranks_is_no_error():
    talk = running(2)
    talk.tell(inside("h:0", 2, SHARDS_COMMIT), inside("h:1", 2, SHARDS_COMMIT, entered=6))
    for name in talk.members:
        talk.works(name)
    assert not [each for each in talk.wait(31) if isinstance(each, BreakWorld)]


def test_rank_that_is_one_collective_behind_is_reported():
    talk = running(3)
    talk.tell(inside("h:0", 2), inside("h:1", 2, entered=6), inside("h:2", 2))
    recorded("log", said(talk.wait(31)))


def test_time_limit_starts_with_the_last_rank_to_wait():
    talk = running(2)
    talk.tell(inside("h:0", 2))
    talk.wait(20)
    talk.tell(inside("h:1", 2, "accuracy"))
    assert said(talk.wait(28)) == ""
    recorded("log", said(talk.wait(2)))


def test_all_ranks_in_one_collective_do_not_blame_the_script():
    talk = running(2)
    talk.tell(inside("h:0", 2), inside("h:1", 2))
    recorded("log", said(talk.wait(100)))


def test_ranks_in_their_gradients_may_step_different_optimizers():
    talk = running(2)
    talk.tell(inside("h:0", 2, GRADIENTS), inside("h:1", 2, GRADIENTS))
    recorded("log", said(talk.wait(100)))


# ---- while the survivors gather -----------------------------------------------------------------


def test_stuck_survivor_is_killed_long_before_the_elastic_timeout():
    talk = running(4)
    talk.works("h:3")
    talk.tell(exited("h:0"))
    talk.ready("h:1", "h:2", commit=(2, 5))
    actions = talk.wait(31)
    recorded("log", said(actions))
    kill = the(KillWorker, actions)
    assert kill.reason == because(ReasonKind.IDLE, for_s=30.5, where="for the next world")
    assert order(the(PublishWorld, talk.tell(exited("h:3")))) == ["h:1#1", "h:2#1"]


def test_survivor_still_in_its_collective_has_the_elastic_timeout():
    talk = running(3, elastic_timeout_s=600)
    talk.works("h:2")
    talk.tell(inside("h:2", 2), exited("h:0"))
    talk.ready("h:1", commit=(2, 5))
    assert "h:2#1" not in names(talk.wait(599), KillWorker)
    assert "h:2#1" in names(talk.wait(2), KillWorker)


def test_long_phase_is_awaited_until_the_elastic_timeout():
    talk = running(3, elastic_timeout_s=600)
    talk.works("h:2")
    talk.tell(outside("h:2", 2, phase="validation"), exited("h:0"))
    talk.ready("h:1", commit=(2, 5))
    assert "h:2#1" not in names(talk.wait(599), KillWorker)
    assert "h:2#1" in names(talk.wait(2), KillWorker)


def test_last_survivor_gets_its_time_since_no_other_worker_waits():
    talk = running(2, workers_min=1, elastic_timeout_s=600)
    talk.works("h:1")
    talk.tell(exited("h:0"))
    assert "h:1#1" not in names(talk.wait(599), KillWorker)
    assert "h:1#1" in names(talk.wait(2), KillWorker)


def test_worker_that_never_reaches_elastic_run_is_judged():
    talk = started(3)
    talk.works("h:2")
    talk.ready("h:0", "h:1")
    assert names(talk.wait(31), KillWorker) == ["h:2#1"]
    talk = started(3, elastic_timeout_s=600)
    talk.works("h:2", cpu=1.0)  # it prepares its data
    talk.ready("h:0", "h:1")
    assert not has(KillWorker, talk.wait(599))


# ---- during a planned change --------------------------------------------------------------------


def stopping(talk: MembershipConversation) -> MembershipConversation:
    """All members were asked to stop at safepoint 4, and the first has."""
    assert has(PrepareChange, talk.tell(leaving("h:0")))
    talk.tell(*(checked(name, 2, 3) for name in talk.members))
    talk.tell(ready("h:0", 2, (2, 4)))
    assert talk.m.phase is Phase.STOPPING
    return talk


def test_member_that_does_not_reach_the_stop_is_judged():
    talk = stopping(running(3))
    talk.works("h:1", cpu=1.0)
    talk.works("h:2")
    actions = talk.wait(31)
    recorded("log", said(actions))
    assert names(actions, KillWorker) == ["h:2#1"]


def test_no_member_is_blamed_before_the_first_has_stopped():
    talk = running(2)
    talk.works("h:0")
    talk.works("h:1")
    talk.tell(leaving("h:0"))
    talk.tell(checked("h:0", 2, 3), checked("h:1", 2, 3))
    assert not has(KillWorker, talk.wait(599))


# ---- at the end ---------------------------------------------------------------------------------


def test_idle_worker_is_stuck_when_all_peers_have_returned():
    talk = running(3)
    talk.works("h:2")
    talk.tell(returned("h:0", 2), returned("h:1", 2))
    actions = talk.wait(31)
    recorded("log", said(actions))
    assert names(actions, KillWorker) == ["h:2#1"]
    assert the(EndJob, talk.tell(exited("h:2"))).code == 0


def test_worker_that_still_evaluates_is_not_stuck():
    talk = running(3, elastic_timeout_s=3600)
    talk.works("h:0", cpu=1.0)
    talk.tell(returned("h:1", 2), returned("h:2", 2))
    assert not has(KillWorker, talk.wait(3500))


def test_worker_waiting_in_a_collective_for_returned_ranks_is_stuck():
    talk = running(3)
    talk.tell(returned("h:0", 2), returned("h:1", 2), inside("h:2", 2, "accuracy"))
    end = the(EndJob, talk.wait(31))
    assert end.code == 1
    assert end.reason.kind is ReasonKind.RETURNED_ALONE
    recorded("reasons", str(end.reason))


# ---- other jobs and failures --------------------------------------------------------------------


def test_stuck_worker_in_the_world_of_init():
    talk = started(3)
    talk.works("h:2")
    talk.tell(inside("h:0", 1, "model"), inside("h:1", 1, "model"))
    # A kill here ends the job, and scripts download their data here, so idle workers get the time of busy ones.
    first = talk.wait(31)
    assert not has(KillWorker, first)
    recorded("log", said(first))
    assert names(talk.wait(571), KillWorker) == ["h:2#1"]


def test_worker_that_exited_too_early_is_named_when_all_remaining_workers_wait():
    talk = static(3)
    talk.tell(exited("h:1", 0))
    talk.tell(inside("h:0", 1), inside("h:2", 1))
    assert not has(EndJob, talk.wait(25))
    end = the(EndJob, talk.wait(10))
    assert end.reason.kind is ReasonKind.ENDED_EARLY
    recorded("reasons", str(end.reason))


def test_stuck_worker_ends_a_static_job_and_is_named():
    talk = static(2)
    talk.works("h:1")
    talk.tell(inside("h:0", 1))
    assert names(talk.wait(31), KillWorker) == ["h:1#1"]
    end = the(EndJob, talk.tell(exited("h:1")))
    assert end.reason == because(
        ReasonKind.ENDED,
        who="rank 1 (h:1#1 on h)",
        exit="signal 9 SIGKILL",
        killed_for=because(ReasonKind.IDLE, for_s=30.5, where="in 'loss'"),
        early=False,
        outside=False,
        wrote="",
    )


def test_worker_that_raised_no_longer_waits():
    talk = running(3)
    talk.tell(inside("h:0", 2), raised("h:0", 2, (2, 5)))
    talk.works("h:1")
    talk.works("h:2")
    assert not has(ProbeWorkers, talk.wait(20))


def test_worker_being_killed_is_neither_suspected_nor_waiting():
    talk = waiting(2, missing="h:1", kill_s=60)
    talk.tell(frozen("h:0"))
    assert not has(ProbeWorkers, talk.wait(59))
    assert has(BreakWorld, talk.wait(2))


def test_newcomer_does_not_affect_waits():
    talk = running(2, workers_max=3)
    talk.tell(hosts(h=3))
    talk.works("h:2")
    talk.connect("h:2")
    assert not has(ProbeWorkers, talk.wait(100))


def test_restart_of_the_driver_restarts_all_waits():
    talk = waiting()
    talk.works("h:2")
    talk.wait(25)
    talk.tell(DriverRestarted(), *(reconnected(name, 2) for name in talk.members))
    assert not has(DumpStacks, talk.wait(29))
    assert has(DumpStacks, talk.wait(2))


@pytest.mark.parametrize("workers", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_cost_of_an_event_does_not_grow_with_the_world(workers, monkeypatch):
    """Counts the records touched in a step in which all ranks wait briefly."""
    talk = running(workers, workers_min=1)
    touched = 0
    first_at = Roster.first_at

    def counting(self: Roster, *stages: WorkerStage) -> Iterator[WorkerRecord]:
        nonlocal touched
        for record in first_at(self, *stages):
            touched += 1
            yield record

    monkeypatch.setattr(Roster, "first_at", counting)
    for now, say in ((talk.now + 1.0, inside), (talk.now + 2.0, outside)):
        for name in talk.members[1:]:
            talk.m.handle(say(name, 2), now)
            talk.m.next_deadline()
    assert touched <= 2 * workers


# ---- arbitrary reports --------------------------------------------------------------------------

SLOTS = st.integers(0, 3).map(lambda slot: f"h:{slot}")
SAYING = st.one_of(
    st.builds(lambda name, what: inside(name, 2, what), SLOTS, st.sampled_from(["loss", "bias"])),
    st.builds(lambda name, phase: outside(name, 2, phase=phase), SLOTS, st.sampled_from(["", "x"])),
    st.builds(lambda name, share: paced(name, 2, share), SLOTS, st.sampled_from([0.0, 0.9])),
    st.builds(lambda name: ready(name, 2, (2, 5)), SLOTS),
    st.builds(lambda name: returned(name, 2), SLOTS),
    st.builds(exited, SLOTS),
    st.builds(frozen, SLOTS),
    st.builds(thawed, SLOTS),
    st.builds(leaving, SLOTS),
    st.builds(lambda name: raised(name, 2, (2, 5)), SLOTS),
    st.builds(lambda name: disconnected(name, silent=True), SLOTS),
    st.floats(0.1, 40.0),
)


@pytest.mark.slow
@settings(max_examples=3 * settings().max_examples)
@given(st.lists(SAYING, max_size=12), st.sets(SLOTS))
def test_every_kill_has_a_reason_and_every_wait_an_end(story, idle):
    talk = running(4, workers_min=1)
    for name in talk.members:
        talk.works(name, cpu=0.0 if name.split("#")[0] in idle else 1.0)
    accused = {name for name in idle}
    for event in story:
        if isinstance(event, float):
            actions = talk.wait(event)
        else:
            actions = talk.tell(event)
            if isinstance(event, WorkerFrozen | WorkerDisconnected | WorkerLeaving | WorkerRaised):
                accused.add(str(event.worker).split("#")[0])
        # A working member is not killed within minutes. The invariants are checked after every event.
        dead = {name.split("#")[0] for name in names(actions, KillWorker) if name.endswith("#1")}
        assert dead <= accused


def test_no_worker_is_probed_if_all_limits_are_0():
    talk = waiting(idle_s=0, busy_s=0, busy_warning_s=0)
    assert talk.wait(7200) == []


def test_worker_that_stops_reporting_its_wait_may_be_stuck():
    """All ranks reported their waits; then the interpreter of one was held, and its link thread fell silent."""
    talk = running(3)
    talk.works("h:2", cpu=0.0)
    for second in range(1, 12):
        silent = [] if second > 1 else [inside("h:2", 2, "loss", for_s=1.0)]
        talk.tell(
            inside("h:0", 2, "loss", for_s=5.0 * second),
            inside("h:1", 2, "loss", for_s=5.0 * second),
        )
        talk.tell(*silent)
        actions = talk.wait(5.0)
        if has(KillWorker, actions):
            break
    assert names(actions, KillWorker) == ["h:2#1"]
    assert 30 <= 5.0 * second <= 50


def test_no_worker_is_suspected_while_all_report_their_waits():
    talk = running(3)
    for second in range(1, 12):
        talk.tell(*(inside(f"h:{n}", 2, "loss", for_s=5.0 * second) for n in range(3)))
        assert not has(ProbeWorkers, talk.wait(5.0))


def test_long_copy_is_not_a_script_error():
    talk = running(3)
    talk.tell(inside("h:0", 2, "copy of the state"), inside("h:2", 2, "copy of the state"))
    text = said([*talk.tell(inside("h:1", 2, "gradients")), *talk.wait(40)])
    recorded("messages", text)


def test_runnable_worker_without_cpu_time_is_not_idle():
    """Under a quota or on a crowded machine, the worker is runnable in every probe."""
    talk = waiting()
    for _ in range(20):
        actions = talk.wait(5.0)
        assert not has(KillWorker, actions)
        talk.tell(WorkerProbed(worker("h:2"), cpu_s=0.0, io_bytes=0, state="R"))


def test_no_second_worker_is_named_while_the_missing_one_is_killed():
    talk = waiting(idle_s=6)
    talk.works("h:2", cpu=0.0)
    text = said(talk.wait(7.5))
    recorded("messages", text)


def test_third_hang_at_the_same_commit_ends_the_job():
    talk = waiting(3, workers_min=3, slot_attempts=9)
    for start in (1, 2, 3, 4, 5):
        name = f"h:2#{start}"
        talk.works(name, cpu=0.0)
        generation = talk.m.generation
        if start > 1:
            talk.tell(inside("h:0", generation, "loss"), inside("h:1", generation, "loss"))
        assert names(talk.wait(40), KillWorker)[:1] == [name]
        actions = talk.tell(exited(name))
        actions += talk.ready("h:0", "h:1", commit=(2, 5) if start == 1 else (generation, 0))
        actions += talk.wait(16)
        actions += talk.join(f"h:2#{start + 1}")
        if talk.m.over:
            break
        talk.resume()
    assert talk.m.over and start == 4, "in the first of four there had been commits"
    assert the(EndJob, actions).reason == because(
        ReasonKind.STUCK_AGAIN,
        worlds=3,
        cause=because(
            ReasonKind.LOST_ALIVE,
            worker="h:2#4",
            killed_for=because(ReasonKind.IDLE, for_s=30.5, where="in 'loss'"),
        ),
    )
