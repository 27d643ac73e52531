"""Members that others wait for: idle is fenced, busy is given time, and who is excused is named.

The usual courses are among the scenarios.
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
from elastic.driver.membership.roster import Roster, WorkerRecord, WorkerStage
from elastic.driver.reasons import Why, because
from elastic.protocol.messages import GRADIENTS, SHARDS_COMMIT
from harness.conversation import (
    Talk,
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


def waiting(workers: int = 3, missing: str = "h:2", **settings) -> Talk:
    """All but one have been inside the collective 'loss' for a second."""
    talk = running(workers, **settings)
    talk.wait(60)
    others = [name for name in talk.members if name != str(worker(missing))]
    talk.tell(*(inside(name, 2) for name in others))
    return talk


def reconnected(name: str, generation: int) -> WorkerReconnected:
    return WorkerReconnected(worker(name), generation, True)


def probed(actions: list) -> list[list[str]]:
    """Who was probed, each time."""
    return [[str(w) for w in a.workers] for a in actions if isinstance(a, ProbeWorkers)]


# ---- who is looked at, and when -----------------------------------------------------------------


def test_nobody_is_looked_at_where_nobody_waits():
    assert running(4).wait(10_000) == []


def test_who_is_missing_for_five_seconds_is_probed_again_and_again():
    talk = waiting(4)
    assert not has(ProbeWorkers, talk.wait(3.9))  # they had waited for a second already
    assert probed(talk.wait(0.2)) == [["h:2#1"]]
    assert probed(talk.wait(4.8)) == []
    assert probed(talk.wait(10)) == [["h:2#1"]] * 2


def test_a_step_that_takes_less_costs_nothing():
    talk = running(2)
    for _ in range(100):
        assert talk.tell(inside("h:0", 2)) == []
        assert talk.wait(3.0) == []
        assert talk.tell(outside("h:0", 2)) == []
        assert talk.wait(1.0) == []


def test_waits_of_different_steps_do_not_add_up():
    talk = running(3)
    for step in range(50):
        # Somebody always waits, but never anybody for long.
        talk.tell(inside("h:0", 2, entered=2 * step), outside("h:1", 2, entered=2 * step))
        assert talk.wait(1.5) == []
        talk.tell(inside("h:1", 2, entered=2 * step + 1), outside("h:0", 2, entered=2 * step + 1))
        assert talk.wait(1.5) == []


def test_who_comes_to_the_collective_is_no_suspect_any_more():
    talk = waiting()
    talk.wait(6)
    talk.tell(inside("h:2", 2))
    assert not has(ProbeWorkers, talk.wait(20))


def test_what_was_said_in_an_older_generation_is_dropped():
    talk = running(3)
    assert talk.tell(inside("h:0", 1), outside("h:1", 1, phase="validation")) == []
    assert talk.wait(100) == []


def test_an_answer_that_comes_when_nobody_waits_is_no_news():
    talk = running(3)
    assert talk.tell(WorkerProbed(worker("h:2"), 1.0, 1, "S")) == []
    talk.tell(exited("h:2"))
    assert talk.tell(WorkerProbed(worker("h:2"), 1.0, 1, "S")) == []


def test_alone_nobody_is_waited_for():
    talk = running(1, workers_min=1)
    talk.works("h:0")
    talk.tell(inside("h:0", 2))
    assert not has(ProbeWorkers, talk.wait(1000))


# ---- idle ---------------------------------------------------------------------------------------


def test_the_log_says_at_which_line_it_is():
    talk = waiting()
    talk.works("h:2", cpu=0.01)
    talk.tell(WorkerLocated(worker("h:2"), 1, "old.py:1"))  # of another generation
    recorded("log", said(talk.wait(10)))
    told = the(TellAwaited, talk.tell(WorkerLocated(worker("h:2"), 2, "train.py:40")))
    waiters = [worker("h:0"), worker("h:1")]
    assert (told.members, told.rank, told.line) == (waiters, 2, "train.py:40")
    recorded("log", said(talk.wait(10)))


def test_the_log_says_where_it_was_seen_last():
    talk = running(2)
    talk.works("h:1")
    talk.tell(inside("h:1", 2, "gradients 3", entered=6), outside("h:1", 2, entered=6))
    talk.tell(inside("h:0", 2, "loss"))
    recorded("log", said(talk.wait(10)))


def test_who_gets_on_between_the_stacks_and_the_kill_lives():
    talk = waiting()
    talk.works("h:2")
    assert has(DumpStacks, talk.wait(29.2))
    recorded("log", said(talk.tell(inside("h:2", 2))))
    assert not has(KillWorker, talk.wait(5))


@pytest.mark.parametrize("last", [False, True])
def test_a_survivor_that_comes_between_the_stacks_and_the_kill_lives(last):
    talk = running(5)
    talk.works("h:1")
    talk.works("h:2", cpu=1.0)
    talk.tell(exited("h:0"))
    talk.ready(*(["h:2"] if last else []), "h:3", "h:4", commit=(2, 5))
    assert names(talk.wait(30.01), DumpStacks) == ["h:1#1"]
    assert has(PublishWorld, talk.tell(ready("h:1", 2, (2, 5)))) is last
    assert names(talk.wait(5), KillWorker) == []


def test_work_begins_the_thirty_seconds_anew():
    talk = waiting()
    talk.works("h:2")
    talk.wait(22)
    talk.works("h:2", cpu=1.0)
    talk.wait(5)
    talk.works("h:2")
    assert not has(DumpStacks, talk.wait(25))
    assert has(DumpStacks, talk.wait(10))


@pytest.mark.slow
def test_without_an_answer_nothing_is_done():
    talk = waiting()
    assert not has(KillWorker, talk.wait(10_000))


def test_turned_off_an_idle_one_is_only_named():
    talk = waiting(idle_s=0.0)
    talk.works("h:2")
    actions = talk.wait(3000)
    recorded("log", said(actions))
    recorded("log", said(actions))
    assert not has(KillWorker, actions)


def test_a_shorter_patience_is_looked_after_sooner():
    talk = waiting(idle_s=3.0)
    talk.works("h:2")
    assert names(talk.wait(3.0), KillWorker) == ["h:2#1"]


def test_several_that_are_stuck_are_named_and_fenced():
    talk = running(8, workers_min=2)
    talk.wait(60)
    for slot in range(2, 8):
        talk.works(f"h:{slot}")
    talk.tell(inside("h:0", 2), inside("h:1", 2))
    lines = said(talk.wait(15)).splitlines()
    assert len(lines) == 5
    recorded("log", lines[-1])
    assert names(talk.wait(15), KillWorker) == [f"h:{slot}#1" for slot in range(2, 8)]


def test_collectives_completed_meanwhile_show_that_it_is_not_what_they_wait_for():
    talk = waiting(4, idle_s=90)  # the others may wait in a process set that it is no part of
    talk.works("h:2")
    for _ in range(10):
        assert not has(DumpStacks, talk.wait(30))
        talk.tell(paced("h:2", 2, 0.4))
    for _ in range(2):
        assert not has(DumpStacks, talk.wait(25))
        talk.tell(paced("h:2", 2, 0.0, collectives=0))
    assert has(DumpStacks, talk.wait(40))


def test_collectives_that_it_may_have_completed_before_show_nothing():
    talk = waiting()
    talk.works("h:2", cpu=1.0)
    talk.wait(15)
    talk.works("h:2")
    talk.wait(5)
    talk.tell(paced("h:2", 2, 0.4))  # of the last 30 s
    assert not has(KillWorker, talk.wait(23))  # idle since 15 s, as was known before
    assert names(talk.wait(7), KillWorker) == ["h:2#1"]


def test_what_its_stacks_cost_does_not_count_as_work():
    talk = waiting(idle_s=0.6)  # looked at ten times a second
    talk.works("h:2")
    actions = talk.wait(5)
    [dump] = [i for i, action in enumerate(actions) if isinstance(action, DumpStacks)]
    [kill] = [i for i, action in enumerate(actions) if isinstance(action, KillWorker)]
    assert probed(actions[dump:kill]) == []


# ---- busy ---------------------------------------------------------------------------------------


def test_reading_data_is_being_busy():
    talk = waiting()
    talk.works("h:2", io=1e6)
    assert not has(KillWorker, talk.wait(500))


@pytest.mark.slow
def test_turned_off_a_busy_one_is_never_fenced():
    talk = waiting(busy_s=0.0, busy_warning_s=0.0)
    talk.works("h:2", cpu=1.0)
    actions = talk.wait(10_000)
    assert not has(KillWorker, actions) and said(actions) == ""


# ---- excused ------------------------------------------------------------------------------------


def test_who_was_in_a_long_phase_is_judged_from_its_end_on():
    talk = waiting()
    talk.works("h:2")
    talk.tell(outside("h:2", 2, phase="validation"))
    assert not has(KillWorker, talk.wait(10_000))
    talk.tell(outside("h:2", 2))
    assert not has(KillWorker, talk.wait(29))
    assert names(talk.wait(2), KillWorker) == ["h:2#1"]


# ---- all wait -----------------------------------------------------------------------------------


def test_members_that_wait_in_different_collectives_are_told_apart_and_none_is_fenced_for_it():
    talk = running(4)
    talk.tell(inside("h:0", 2), inside("h:1", 2), inside("h:2", 2, "accuracy"), inside("h:3", 2))
    for name in talk.members:
        talk.works(name)
    assert talk.wait(28) == []
    report, broken = talk.wait(2)
    assert isinstance(report, Report) and report.level == "error"
    recorded("messages", report.text)
    # Once more from the last commit; the third time ends the job.
    assert isinstance(broken, BreakWorld)
    assert str(broken.reason) == report.text


def test_lines_of_the_script_are_named_where_they_are_known():
    talk = running(3)
    talk.tell(inside("h:0", 2, line="train.py:9"), inside("h:1", 2, line="train.py:12"))
    talk.tell(inside("h:2", 2, "accuracy", line="train.py:30"))
    recorded("log", said(talk.wait(31)))


def test_in_a_job_that_is_not_elastic_it_is_the_end():
    talk = static(2)
    talk.tell(inside("h:0", 1), inside("h:1", 1, "accuracy"))
    reason = the(EndJob, talk.wait(31)).reason
    assert reason.kind is Why.DIFFERENT_COLLECTIVES
    recorded("reasons", str(reason))


def test_commits_of_a_sharded_state_on_some_ranks_only_are_told_apart():
    talk = running(2)
    talk.tell(inside("h:0", 2, SHARDS_COMMIT), inside("h:1", 2))
    for name in talk.members:
        talk.works(name)
    reason = the(BreakWorld, talk.wait(31)).reason
    assert reason.kind is Why.COMMIT_ON_SOME_RANKS
    recorded("reasons", str(reason))


def test_commits_of_a_sharded_state_on_all_ranks_are_no_mistake():
    talk = running(2)
    talk.tell(inside("h:0", 2, SHARDS_COMMIT), inside("h:1", 2, SHARDS_COMMIT, entered=6))
    for name in talk.members:
        talk.works(name)
    assert not [each for each in talk.wait(31) if isinstance(each, BreakWorld)]


def test_one_that_is_a_collective_behind_is_told_apart_too():
    talk = running(3)
    talk.tell(inside("h:0", 2), inside("h:1", 2, entered=6), inside("h:2", 2))
    recorded("log", said(talk.wait(31)))


def test_their_time_begins_with_the_last_one():
    talk = running(2)
    talk.tell(inside("h:0", 2))
    talk.wait(20)
    talk.tell(inside("h:1", 2, "accuracy"))
    assert said(talk.wait(28)) == ""
    recorded("log", said(talk.wait(2)))


def test_all_in_one_collective_is_not_the_scripts_fault():
    talk = running(2)
    talk.tell(inside("h:0", 2), inside("h:1", 2))
    recorded("log", said(talk.wait(100)))


def test_all_in_their_gradients_may_step_different_optimizers():
    talk = running(2)
    talk.tell(inside("h:0", 2, GRADIENTS), inside("h:1", 2, GRADIENTS))
    recorded("log", said(talk.wait(100)))


# ---- while the survivors gather -----------------------------------------------------------------


def test_a_survivor_that_is_stuck_is_fenced_long_before_the_elastic_timeout():
    talk = running(4)
    talk.works("h:3")
    talk.tell(exited("h:0"))
    talk.ready("h:1", "h:2", commit=(2, 5))
    actions = talk.wait(31)
    recorded("log", said(actions))
    kill = the(KillWorker, actions)
    assert kill.reason == because(Why.IDLE, for_s=30.5, where="for the next world")
    assert order(the(PublishWorld, talk.tell(exited("h:3")))) == ["h:1#1", "h:2#1"]


def test_one_that_has_not_left_its_collective_yet_is_left_to_the_elastic_timeout():
    talk = running(3, elastic_timeout_s=600)
    talk.works("h:2")
    talk.tell(inside("h:2", 2), exited("h:0"))
    talk.ready("h:1", commit=(2, 5))
    assert "h:2#1" not in names(talk.wait(599), KillWorker)
    assert "h:2#1" in names(talk.wait(2), KillWorker)


def test_a_long_phase_is_awaited_until_the_elastic_timeout():
    talk = running(3, elastic_timeout_s=600)
    talk.works("h:2")
    talk.tell(outside("h:2", 2, phase="validation"), exited("h:0"))
    talk.ready("h:1", commit=(2, 5))
    assert "h:2#1" not in names(talk.wait(599), KillWorker)
    assert "h:2#1" in names(talk.wait(2), KillWorker)


def test_the_last_survivor_is_given_its_time_because_nobody_waits_for_it():
    talk = running(2, workers_min=1, elastic_timeout_s=600)
    talk.works("h:1")
    talk.tell(exited("h:0"))
    assert "h:1#1" not in names(talk.wait(599), KillWorker)
    assert "h:1#1" in names(talk.wait(2), KillWorker)


def test_one_that_never_comes_to_elastic_run_is_judged_too():
    talk = started(3)
    talk.works("h:2")
    talk.ready("h:0", "h:1")
    assert names(talk.wait(31), KillWorker) == ["h:2#1"]
    talk = started(3, elastic_timeout_s=600)
    talk.works("h:2", cpu=1.0)  # it prepares its data
    talk.ready("h:0", "h:1")
    assert not has(KillWorker, talk.wait(599))


# ---- during a planned change --------------------------------------------------------------------


def stopping(talk: Talk) -> Talk:
    """All were told to stop at check 4; the first has."""
    assert has(PrepareChange, talk.tell(leaving("h:0")))
    talk.tell(*(checked(name, 2, 3) for name in talk.members))
    talk.tell(ready("h:0", 2, (2, 4)))
    assert talk.m.phase is Phase.STOPPING
    return talk


def test_who_does_not_come_to_where_all_stop_is_judged():
    talk = stopping(running(3))
    talk.works("h:1", cpu=1.0)
    talk.works("h:2")
    actions = talk.wait(31)
    recorded("log", said(actions))
    assert names(actions, KillWorker) == ["h:2#1"]


def test_nobody_is_blamed_while_all_are_on_their_way():
    talk = running(2)
    talk.works("h:0")
    talk.works("h:1")
    talk.tell(leaving("h:0"))
    talk.tell(checked("h:0", 2, 3), checked("h:1", 2, 3))
    assert not has(KillWorker, talk.wait(599))


# ---- at the end ---------------------------------------------------------------------------------


def test_one_that_is_idle_when_the_others_have_returned_is_stuck():
    talk = running(3)
    talk.works("h:2")
    talk.tell(returned("h:0", 2), returned("h:1", 2))
    actions = talk.wait(31)
    recorded("log", said(actions))
    assert names(actions, KillWorker) == ["h:2#1"]
    assert the(EndJob, talk.tell(exited("h:2"))).code == 0


def test_one_that_still_evaluates_keeps_nobody_from_anything():
    talk = running(3, elastic_timeout_s=3600)
    talk.works("h:0", cpu=1.0)
    talk.tell(returned("h:1", 2), returned("h:2", 2))
    assert not has(KillWorker, talk.wait(3500))


def test_who_waits_in_a_collective_for_those_that_have_returned_waits_for_ever():
    talk = running(3)
    talk.tell(returned("h:0", 2), returned("h:1", 2), inside("h:2", 2, "accuracy"))
    end = the(EndJob, talk.wait(31))
    assert end.code == 1
    assert end.reason.kind is Why.RETURNED_ALONE
    recorded("reasons", str(end.reason))


# ---- other jobs, other troubles -----------------------------------------------------------------


def test_in_the_world_of_init_too():
    talk = started(3)
    talk.works("h:2")
    talk.tell(inside("h:0", 1, "model"), inside("h:1", 1, "model"))
    # Where a fence ends the job, and where scripts download their data, idle is no worse than busy.
    first = talk.wait(31)
    assert not has(KillWorker, first)
    recorded("log", said(first))
    assert names(talk.wait(571), KillWorker) == ["h:2#1"]


def test_who_ended_too_early_is_named_when_all_others_wait():
    talk = static(3)
    talk.tell(exited("h:1", 0))
    talk.tell(inside("h:0", 1), inside("h:2", 1))
    assert not has(EndJob, talk.wait(25))
    end = the(EndJob, talk.wait(10))
    assert end.reason.kind is Why.ENDED_EARLY
    recorded("reasons", str(end.reason))


def test_a_job_that_is_not_elastic_ends_and_names_it():
    talk = static(2)
    talk.works("h:1")
    talk.tell(inside("h:0", 1))
    assert names(talk.wait(31), KillWorker) == ["h:1#1"]
    end = the(EndJob, talk.tell(exited("h:1")))
    assert end.reason == because(
        Why.ENDED,
        who="rank 1 (h:1#1 on h)",
        exit="signal 9 SIGKILL",
        killed_for=because(Why.IDLE, for_s=30.5, where="in 'loss'"),
        early=False,
        outside=False,
        wrote="",
    )


def test_who_has_raised_waits_no_more():
    talk = running(3)
    talk.tell(inside("h:0", 2), raised("h:0", 2, (2, 5)))
    talk.works("h:1")
    talk.works("h:2")
    assert not has(ProbeWorkers, talk.wait(20))


def test_who_is_being_killed_is_neither_a_suspect_nor_waits():
    talk = waiting(2, missing="h:1", kill_s=60)
    talk.tell(frozen("h:0"))
    assert not has(ProbeWorkers, talk.wait(59))
    assert has(BreakWorld, talk.wait(2))


def test_a_newcomer_changes_nothing_about_who_waits():
    talk = running(2, workers_max=3)
    talk.tell(hosts(h=3))
    talk.works("h:2")
    talk.connect("h:2")
    assert not has(ProbeWorkers, talk.wait(100))


def test_after_a_restart_of_the_driver_all_waits_begin_anew():
    talk = waiting()
    talk.works("h:2")
    talk.wait(25)
    talk.tell(DriverRestarted(), *(reconnected(name, 2) for name in talk.members))
    assert not has(DumpStacks, talk.wait(29))
    assert has(DumpStacks, talk.wait(2))


@pytest.mark.parametrize("workers", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_what_each_event_costs_does_not_grow_with_the_world(workers, monkeypatch):
    """Counted, not timed: the records that are touched in a step in which everybody waits a little."""
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


# ---- whatever is said ---------------------------------------------------------------------------

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
def test_whatever_is_said_there_is_a_reason_for_every_kill_and_an_end_to_every_wait(story, idle):
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
        # Nobody who works is killed within minutes; the invariants are looked at after every event.
        dead = {name.split("#")[0] for name in names(actions, KillWorker) if name.endswith("#1")}
        assert dead <= accused


def test_with_everything_turned_off_nobody_is_looked_at():
    talk = waiting(idle_s=0, busy_s=0, busy_warning_s=0)
    assert talk.wait(7200) == []


def test_who_no_longer_says_that_it_waits_may_be_stuck_since():
    """All said that they wait; then the interpreter of one was held, and its link thread fell silent."""
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


def test_as_long_as_all_say_so_nobody_is_a_suspect():
    talk = running(3)
    for second in range(1, 12):
        talk.tell(*(inside(f"h:{n}", 2, "loss", for_s=5.0 * second) for n in range(3)))
        assert not has(ProbeWorkers, talk.wait(5.0))


def test_a_long_copy_is_no_mistake_of_the_script():
    talk = running(3)
    talk.tell(inside("h:0", 2, "copy of the state"), inside("h:2", 2, "copy of the state"))
    text = said([*talk.tell(inside("h:1", 2, "gradients")), *talk.wait(40)])
    recorded("messages", text)


def test_who_computes_but_gets_no_processor_is_not_idle():
    """Under a quota, or on a crowded machine: runnable whenever it is looked at."""
    talk = waiting()
    for _ in range(20):
        actions = talk.wait(5.0)
        assert not has(KillWorker, actions)
        talk.tell(WorkerProbed(worker("h:2"), cpu_s=0.0, io_bytes=0, state="R"))


def test_nobody_is_called_missing_while_the_one_who_was_is_being_killed():
    talk = waiting(idle_s=6)
    talk.works("h:2", cpu=0.0)
    text = said(talk.wait(7.5))
    recorded("messages", text)


def test_stuck_at_the_same_commit_for_the_third_time_ends_the_job():
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
        Why.STUCK_AGAIN,
        worlds=3,
        cause=because(
            Why.LOST_ALIVE,
            worker="h:2#4",
            killed_for=because(Why.IDLE, for_s=30.5, where="in 'loss'"),
        ),
    )
