"""Each invariant: a short conversation that satisfies it, and one that breaks it, without decisions."""

from __future__ import annotations

import msgspec
import pytest

from elastic.chaos.invariants.invariants import BrokenInvariant, Summary, check_journal
from elastic.driver.events import (
    Action,
    AnswerRequest,
    DrainRequested,
    DriverRestarted,
    EndJob,
    Event,
    FinishWorld,
    HostLeaving,
    HostLost,
    HostReported,
    HostStaying,
    KillWorker,
    LetGo,
    Notice,
    PrepareChange,
    ProbeWorkers,
    Report,
    StopMembersAt,
    TimePassed,
    WelcomeWorker,
    WorkerDigested,
    WorkerMiscomputed,
    WorkerReconnected,
)
from elastic.driver.journal.file_journal import FileJournal
from elastic.driver.reasons import ReasonKind, as_sentence, because
from elastic.protocol.messages import Commit
from harness.conversation import (
    checked,
    connected,
    disconnected,
    exited,
    hosts,
    leaving,
    ready,
    resumed,
    returned,
    worker,
)
from harness.golden import raises, recorded
from harness.scripted_journal import (
    PLACE,
    ScriptedJournal,
    broken,
    digested,
    gathering,
    returned_from,
    started,
    training,
    world,
)

# ---- one generation ------------------------------------------------------------------------------------------------


def test_recovery_keeps_every_invariant():
    told = gathering()
    told.line(ready("h:0", 2, (2, 5)), world(3, "h:0", "h:1", holders=2, commit=(2, 5)))
    told.lines_of(resumed("h:0", 3), resumed("h:1", 3))
    assert told.end() == Summary(worlds=3, recoveries=1, commits_compared=0, samples_counted=0)


def test_generations_must_have_no_gap():
    told = gathering()
    told.breaks("ONE GENERATION", ready("h:0", 2, (2, 5)), world(4, "h:0", "h:1"))


def test_ready_member_may_not_be_left_in_the_old_world():
    told = training()
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(ready("h:1", 2, (2, 5)))
    said = told.breaks("SIZE", TimePassed(), world(3, "h:1", holders=1, commit=(2, 5)))
    recorded("log", said)

    told = training(workers_min=1)
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(ready("h:1", 2, (2, 5)))
    said = told.breaks("ONE GENERATION", TimePassed(), world(3, "h:1", holders=1, commit=(2, 5)))
    recorded("log", said)

    told = training(workers_min=1)
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(TimePassed(), KillWorker(worker("h:0"), as_sentence("it is late")))
    told.line(ready("h:1", 2, (2, 5)), world(3, "h:1", holders=1, commit=(2, 5)))


def test_a_worker_that_is_not_ready_is_in_no_world():
    told = gathering()
    said = told.breaks(
        "ONE GENERATION", TimePassed(), world(3, "h:1", "h:0", holders=1, commit=(2, 5))
    )
    recorded("log", said)


def test_break_of_a_world_must_name_the_present_generation_and_live_members():
    training().line(exited("h:2"), broken(2, "h:0", "h:1"))
    training().breaks("ONE GENERATION", exited("h:2"), broken(1, "h:0", "h:1"))
    said = training().breaks("ONE GENERATION", exited("h:2"), broken(2, "h:0", "h:1", "h:2"))
    recorded("log", said)


# ---- quarantine ----------------------------------------------------------------------------------------------------

MISCOMPUTED = WorkerMiscomputed(worker("h:0"), 2, 17, 5, 2, "ff", "fe", [0, 1])


def quarantined() -> ScriptedJournal:
    """The worker of slot 2 has computed wrong gradients."""
    why = because(ReasonKind.MISCOMPUTED, step=17, quarantine="slot")
    told = training()
    told.line(MISCOMPUTED, KillWorker(worker("h:2"), why), broken(2, "h:0", "h:1", "h:2"))
    told.line(exited("h:2"))
    return told


def test_slot_when_quarantined_then_no_worker_may_start():
    quarantined().breaks("QUARANTINED STAYS EMPTY", TimePassed(), started("h:2#2"))
    told = quarantined()
    answer = AnswerRequest(1, True, because(ReasonKind.DRAINS_NO_MORE, host="h"))
    told.line(DrainRequested(1, "h", True), answer, started("h:2#2"))


def test_worker_without_two_reports_of_its_gradients_may_not_be_fenced_as_miscomputed():
    why = because(ReasonKind.MISCOMPUTED, step=17, quarantine="slot")
    kill = KillWorker(worker("h:1"), why)
    training().breaks("QUARANTINED STAYS EMPTY", TimePassed(), kill)
    training().breaks("QUARANTINED STAYS EMPTY", MISCOMPUTED, kill)


# ---- commits -------------------------------------------------------------------------------------------------------


def test_ready_worker_may_not_report_an_older_commit():
    """h:0 is outside the world that went on without it, and still commits."""
    told = training(workers_min=1)
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(TimePassed(), KillWorker(worker("h:0"), as_sentence("it is late")))
    told.line(ready("h:1", 2, (2, 5)), world(3, "h:1", holders=1, commit=(2, 5)))
    told.line(digested("h:0", (2, 7)))  # it is being killed: its messages are ignored

    told = started_late()
    told.line(digested("h:2", (1, 0)))
    told.breaks("NO OLDER COMMIT", ready("h:2", 1, (1, 3)))


def started_late() -> ScriptedJournal:
    """h:2 was in the world of init() and has not entered elastic.run in time."""
    told = ScriptedJournal()
    names = ["h:0", "h:1", "h:2"]
    told.line(hosts(h=3), *map(started, names))
    told.lines_of(*map(connected, names))
    told.lines_of(ready("h:1", 0, running=False), ready("h:2", 0, running=False))
    told.line(ready("h:0", 0, running=False), world(1, *names))
    told.line(ready("h:0", 1, (1, 0)))
    return told.line(ready("h:1", 1, (1, 0)), world(2, "h:0", "h:1", holders=2, commit=(1, 0)))


def test_world_must_begin_from_the_newest_held_commit():
    told = gathering()
    told.line(ready("h:0", 2, (2, 4)), world(3, "h:1", "h:0", holders=1, commit=(2, 5)))

    told = gathering()
    said = told.breaks(
        "NEVER BACK", ready("h:0", 2, (2, 4)), world(3, "h:0", "h:1", holders=1, commit=(2, 4))
    )
    recorded("log", said)


def test_listed_holders_must_have_the_commit():
    told = gathering()
    told.breaks(
        "NEVER BACK", ready("h:0", 2, (2, 4)), world(3, "h:0", "h:1", holders=1, commit=(2, 5))
    )
    told = gathering()
    told.breaks(
        "NEVER BACK", ready("h:0", 2, (2, 4)), world(3, "h:1", "h:0", holders=2, commit=(2, 5))
    )


def test_staying_worker_may_not_return_to_an_older_commit():
    training().lines_of(digested("h:0", (2, 8)), ready("h:0", 2, (2, 8)))
    told = training().line(digested("h:0", (2, 8)))
    said = told.breaks("NEVER BACK", ready("h:0", 2, (2, 4)))
    recorded("log", said)
    said = training().breaks("NEVER BACK", ready("h:0", 2, (1, 9)))
    recorded("log", said)


def test_commits_of_one_worker_may_not_decrease():
    told = training().lines_of(digested("h:0", (2, 7)), digested("h:0", (2, 8)))
    told.line(digested("h:0", (2, 8)))  # the samples of another epoch under the same commit
    told.line(digested("h:1", (2, 7)))
    said = told.breaks("NEVER BACK", digested("h:0", (2, 7)))
    recorded("log", said)


def test_messages_of_a_lost_connection_may_be_late_but_later_ones_may_not():
    told = gathering().lines_of(digested("h:1", (2, 5)), disconnected("h:1"))
    told.line(digested("h:1", (2, 3)))  # it was in progress
    told.line(WorkerReconnected(worker("h:1"), 2, True)).line(digested("h:1", (2, 4)))
    told.line(ready("h:0", 2, (2, 5)), world(3, "h:0", "h:1", holders=2, commit=(2, 5)))
    told.lines_of(digested("h:1", (3, 2)), digested("h:1", (3, 3)))
    told.breaks("NEVER BACK", digested("h:1", (3, 2)))


def test_last_messages_of_a_dead_worker_are_still_checked():
    told = training().line(digested("h:2", (2, 8)))
    told.line(exited("h:2"), broken(2, "h:0", "h:1")).line(digested("h:2", (2, 9)))
    told.breaks("NEVER BACK", digested("h:2", (2, 8)))
    told = training().line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.breaks("NO MIXING", digested("h:2", (3, 1)))


def test_discarded_commit_may_be_reported_as_missing():
    told = training().line(digested("h:0", (2, 8)))
    told.line(ready("h:0", 2, None))


def test_training_may_not_restart_without_a_report():
    told = training(workers_min=1)
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(exited("h:1"))
    told.breaks("NEVER BACK", ready("h:0", 2, None), world(3, "h:0"))


def told_to_stop(check: int) -> ScriptedJournal:
    """They have passed 4, 5 and 4 safepoints."""
    everybody = [worker("h:0"), worker("h:1"), worker("h:2")]
    told = training()
    told.line(leaving("h:2"), PrepareChange(2, 1, everybody, as_sentence("h:2 leaves")))
    told.lines_of(checked("h:0", 2, 4), checked("h:1", 2, 5))
    return told.line(checked("h:2", 2, 4), StopMembersAt(2, 1, check, everybody))


def test_members_of_a_planned_change_must_stop_at_the_same_commit():
    told = told_to_stop(6).lines_of(ready("h:0", 2, (2, 6)), ready("h:1", 2, (2, 6)))
    after = world(3, "h:0", "h:1", holders=2, commit=(2, 6))
    told.line(ready("h:2", 2, (2, 6)), LetGo(worker("h:2"), as_sentence("SIGTERM")), after)

    with raises(BrokenInvariant):
        told_to_stop(5)

    said = told_to_stop(6).breaks("NEVER BACK", ready("h:1", 2, (2, 5)))
    recorded("log", said)

    told = told_to_stop(6).lines_of(ready("h:0", 2, (2, 6)), ready("h:2", 2, (2, 6)))
    torn = (
        LetGo(worker("h:2"), as_sentence("SIGTERM")),
        world(3, "h:0", "h:1", holders=1, commit=(2, 6)),
    )
    said = told.breaks("NEVER BACK", ready("h:1", 2, None), *torn)
    recorded("log", said)


def test_worker_of_its_own_pace_may_stop_with_an_older_commit_but_not_a_newer_one():
    def stopped(slot: str, number: int) -> Event:
        return msgspec.structs.replace(ready(slot, 2, (2, number)), own_pace=True)

    told_to_stop(6).breaks("NEVER BACK", stopped("h:1", 7))
    told = told_to_stop(6).lines_of(stopped("h:1", 5), stopped("h:0", 6))
    after = world(3, "h:0", "h:1", holders=1, commit=(2, 6))
    told.line(stopped("h:2", 4), LetGo(worker("h:2"), as_sentence("SIGTERM")), after)


def test_disconnected_worker_may_stop_at_another_commit():
    told = told_to_stop(6).line(disconnected("h:1"))
    told.line(WorkerReconnected(worker("h:1"), 2, True)).line(ready("h:1", 2, (2, 5)))


def test_equal_commits_must_have_equal_parameters():
    told = training()
    told.lines_of(digested("h:0", (2, 3)), digested("h:1", (2, 3)), digested("h:1", (2, 4), 0xB))
    said = told.breaks("EQUAL DIGESTS", digested("h:2", (2, 3), 0xC))
    recorded("log", said)


def test_world_must_begin_with_the_committed_bits():
    told = gathering().line(digested("h:1", (2, 5)))
    told.line(ready("h:0", 2, (2, 5)), world(3, "h:0", "h:1", holders=2, commit=(2, 5)))
    told.line(digested("h:0", (3, 0)))
    said = told.breaks("EQUAL DIGESTS", digested("h:1", (3, 0), 0xB))
    recorded("log", said)


# ---- sizes, messages, ranks ----------------------------------------------------------------------------------------


def test_world_may_exceed_its_size_only_while_a_worker_leaves():
    def two_are_ready_for_one_place() -> ScriptedJournal:
        told = ScriptedJournal(np=1, workers_min=1, standbys=1)
        told.line(hosts(h=1, g=1), started("h:0"), started("g:0"))
        told.lines_of(connected("h:0"), connected("g:0"))
        return told.line(ready("g:0", 0, running=False))

    told = two_are_ready_for_one_place()
    told.breaks("SIZE", ready("h:0", 0, running=False), world(1, "h:0", "g:0"))
    told = two_are_ready_for_one_place().line(leaving("h:0"))
    told.line(ready("h:0", 0, running=False), world(1, "h:0", "g:0"))


def test_started_workers_must_not_exceed_the_maximum_and_the_standbys():
    told = ScriptedJournal(np=1, workers_min=1, standbys=1)
    said = told.breaks("SIZE", hosts(h=3), started("h:0"), started("h:1"), started("h:2"))
    recorded("log", said)


def test_replacement_of_an_ended_worker_counts_towards_the_size():
    """Only those present at its notice do not: they leave, and others take their places."""
    told = ScriptedJournal(np=1, workers_min=1).line(hosts(h=2, g=2), started("h:0"))
    told.line(HostLeaving("h", Notice("it goes", 5.0)), started("g:0"))
    said = told.breaks("SIZE", TimePassed(), started("h:1"), after=6.0)
    recorded("log", said)
    told = ScriptedJournal(np=1, workers_min=1).line(hosts(h=2, g=2), started("h:0"))
    told.line(HostLeaving("h", Notice("it goes", 5.0)), started("g:0"))
    told.line(HostStaying("h"))
    told.breaks("SIZE", TimePassed(), started("g:1"))


def test_a_worker_that_waits_in_elastic_run_gets_a_free_place():
    told = training(workers_min=1)
    told.line(exited("h:2"), broken(2, "h:0", "h:1"), started("h:2#2"))
    told.lines_of(connected("h:2#2"), ready("h:2#2", 0), ready("h:0", 2, (2, 5)))
    alone = world(3, "h:0", "h:1", holders=2, commit=(2, 5))
    said = told.breaks("SIZE", ready("h:1", 2, (2, 5)), alone)
    recorded("log", said)


def test_world_may_leave_out_unresponsive_workers():
    told = training(workers_min=1)
    told.line(exited("h:2"), broken(2, "h:0", "h:1"), started("h:2#2"))
    told.lines_of(connected("h:2#2"), ready("h:2#2", 0))
    told.line(ready("h:0", 2, (2, 5)), ProbeWorkers([worker("h:2#2")]))
    told.line(ready("h:1", 2, (2, 5)), world(3, "h:0", "h:1", holders=2, commit=(2, 5)))


def test_long_gathering_must_report_its_reason():
    told = gathering()
    told.line(TimePassed(), Report("warning", "waiting for h:0#1"), after=5.0)
    told.line(TimePassed(), after=20.0)
    told = gathering()
    recorded("messages", told.breaks("SIZE", TimePassed(), after=25.0))


def test_worker_may_report_only_worlds_that_included_the_worker():
    said = training().breaks("NO MIXING", resumed("h:0", 3))
    recorded("log", said)
    assert "after 2" in training().breaks("NO MIXING", returned("h:0", 1))


def test_report_without_a_world_may_not_follow_a_report_of_a_world():
    """Messages of one connection are in order, but those of a lost one may be late."""
    told = training().lines_of(disconnected("h:1"))
    told.line(WorkerReconnected(worker("h:1"), 2, True))
    said = told.breaks("NO MIXING", ready("h:1", 0))
    recorded("log", said)


def test_worker_may_resume_in_a_world_only_once():
    assert "twice" in training().breaks("NO MIXING", resumed("h:1", 2))
    told = training().lines_of(disconnected("h:1"))
    told.line(WorkerReconnected(worker("h:1"), 2, True)).line(resumed("h:1", 2))


def test_commit_may_not_belong_to_a_future_world():
    ahead = WorkerDigested(worker("h:0"), 2, Commit(3, 0), 0xA)
    training().breaks("NO MIXING", ahead)


def test_commit_must_belong_to_a_world_of_its_worker():
    told = training(workers_min=1).line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(TimePassed(), started("h:2#2"))
    told.lines_of(connected("h:2#2"), ready("h:2#2", 0), ready("h:1", 2, (2, 5)))
    after = world(3, "h:0", "h:1", "h:2#2", holders=2, commit=(2, 5))
    told.line(ready("h:0", 2, (2, 5)), after).line(digested("h:2#2", (3, 1)))
    older = WorkerDigested(worker("h:2#2"), 3, Commit(2, 9), 0xA)
    said = told.breaks("NO MIXING", older)
    recorded("log", said)
    training().breaks("NO MIXING", digested("h:1", (0, 3)))


def test_messages_of_workers_that_were_never_started_are_violations():
    for name in ("h:7", "h:2#2", "elsewhere:0"):
        said = training().breaks("ONE PER SLOT", digested(name, (2, 3)))
        recorded("log", said, worker(name))
    training().breaks("ONE PER SLOT", exited("h:7"))


def test_old_members_must_keep_their_order_before_newcomers():
    def ready_for_a_world() -> ScriptedJournal:
        told = training().line(exited("h:1"), broken(2, "h:0", "h:2"))
        told.line(TimePassed(), started("h:1#2"))
        told.lines_of(connected("h:1#2"), ready("h:1#2", 0))
        return told.line(ready("h:0", 2, (2, 5)))

    told = ready_for_a_world()
    told.line(ready("h:2", 2, (2, 5)), world(3, "h:0", "h:2", "h:1#2", holders=2, commit=(2, 5)))
    told = ready_for_a_world()
    said = told.breaks(
        "RANK 0 IS NO OTHER",
        ready("h:2", 2, (2, 5)),
        world(3, "h:2", "h:0", "h:1#2", holders=2, commit=(2, 5)),
    )
    recorded("log", said)


def test_job_may_not_end_when_another_rank_holds_a_commit():
    lost = because(ReasonKind.ALL_LOST)
    told = training().line(exited("h:0"), broken(2, "h:1", "h:2"))
    assert "h:1#1 holds g2c0" in told.breaks("RANK 0 IS NO OTHER", TimePassed(), EndJob(1, lost))
    told = training().lines_of(exited("h:0"), exited("h:1"))
    told.line(exited("h:2"), EndJob(1, lost))


# ---- processes -----------------------------------------------------------------------------------------------------


def test_slot_has_one_worker_at_a_time():
    training().line(exited("h:2"), started("h:2#2"))
    said = training().breaks("ONE PER SLOT", TimePassed(), started("h:2#2"))
    recorded("log", said)
    training().breaks("ONE PER SLOT", exited("h:2"), started("h:2#1"))
    training().line(HostReported("h", [worker("h:0"), worker("h:1")]), started("h:2#2"))
    training().breaks("ONE PER SLOT", HostLost("h", "no word from it"), started("h:2#2"))


def test_fenced_or_released_worker_may_not_be_in_a_later_world():
    def gone(action: Action) -> ScriptedJournal:
        told = training().line(TimePassed(), action)
        told.line(exited("h:2"), broken(2, "h:0", "h:1"))
        return told.lines_of(ready("h:0", 2, (2, 5)), ready("h:1", 2, (2, 5)))

    both = world(3, "h:0", "h:1", holders=2, commit=(2, 5))
    gone(Report("info", "nothing")).line(TimePassed(), both)
    for action in (
        KillWorker(worker("h:1"), as_sentence("stuck")),
        LetGo(worker("h:1"), as_sentence("SIGTERM")),
    ):
        gone(action).breaks("FENCED STAYS OUT", TimePassed(), both)
    dead = world(3, "h:0", "h:2", holders=1, commit=(2, 5))
    gone(Report("info", "nothing")).breaks("FENCED STAYS OUT", TimePassed(), dead)


def test_no_start_or_welcome_may_follow_the_end():
    told = training().line(TimePassed(), EndJob(1, as_sentence("enough")))
    told.line(exited("h:0"), LetGo(worker("h:1"), as_sentence("the job has ended")))
    said = told.breaks("THE END", exited("h:1"), started("h:1#2"))
    assert "StartWorker worker=h:1#2" in said and "after EndJob" in said
    welcome = WelcomeWorker(worker("h:0"), PLACE, True, True)
    training().breaks("THE END", TimePassed(), EndJob(1, as_sentence("enough")), welcome)


def test_success_requires_the_return_of_all_members():
    training().all_return()

    told = training().lines_of(returned("h:0", 2), returned("h:1", 2))
    said = told.breaks("THE END", TimePassed(), EndJob(0, returned_from(2, members=3)))
    recorded("log", said)

    told = training().lines_of(returned("h:0", 2), returned("h:1", 2))
    said = told.breaks("THE END", TimePassed(), released("h:0", "h:1", "h:2"))
    recorded("log", said)

    told = training().lines_of(returned("h:0", 2))
    told.line(TimePassed(), released("h:0"), after=55.0)  # it has waited long enough for the others
    said = told.breaks("THE END", TimePassed(), EndJob(0, returned_from(2, members=1)))
    recorded("log", said)

    told = training().line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.breaks("THE END", returned("h:0", 2), released("h:0"))


def released(*names: str) -> FinishWorld:
    return FinishWorld(2, [worker(name) for name in names])


def all_but_the_last_have_returned() -> ScriptedJournal:
    return training().lines_of(returned("h:0", 2), returned("h:1", 2))


@pytest.mark.parametrize(
    "end",
    [
        EndJob(0, returned_from(2, members=2)),
        EndJob(0, returned_from(1, members=3)),
        EndJob(0, as_sentence("enough")),
        EndJob(3, returned_from(2, members=3)),
        EndJob(1, as_sentence("lost h:2#1")),
    ],
)
def test_exit_code_and_reason_must_match_the_returns(end):
    told = all_but_the_last_have_returned()
    last = (released("h:0", "h:1", "h:2"), end)
    recorded("messages", told.breaks("THE END", returned("h:2", 2), *last))


def test_exit_code_of_a_failure_must_match_the_exit():
    training().line(exited("h:0", 3), EndJob(3, as_sentence("it ended with exit code 3")))
    training().line(exited("h:0", -9), EndJob(137, as_sentence("it ended with signal 9")))
    training().line(exited("h:0", 3), EndJob(1, as_sentence("--reset-limit 0 is reached")))
    said = training().breaks("THE END", exited("h:0", 3), EndJob(4, as_sentence("it ended")))
    recorded("log", said)
    training().breaks("THE END", TimePassed(), EndJob(3, as_sentence("it has ended")))


def outside_elastic_run() -> ScriptedJournal:
    """Two programs that have called init(), and train independently."""
    told = ScriptedJournal(np=2).line(hosts(h=2), started("h:0"), started("h:1"))
    told.lines_of(connected("h:0"), connected("h:1"), ready("h:0", 0, running=False))
    return told.line(ready("h:1", 0, running=False), world(1, "h:0", "h:1"))


def test_job_of_programs_may_end_only_after_all_have_exited_with_0():
    told = outside_elastic_run().line(exited("h:0", 0))
    told.line(exited("h:1", 0), EndJob(0, because(ReasonKind.ALL_EXITED, workers=2)))

    told = outside_elastic_run()
    said = told.breaks(
        "THE END", exited("h:0", 0), EndJob(0, because(ReasonKind.ALL_EXITED, workers=1))
    )
    recorded("log", said)

    for number, code in ((1, 0), (2, 3)):
        told = outside_elastic_run().line(exited("h:0", 0))
        end = EndJob(0, because(ReasonKind.ALL_EXITED, workers=number))
        told.breaks("THE END", exited("h:1", code), end)


def test_time_may_not_decrease_with_another_driver():
    training().breaks("TIME", TimePassed(), after=-0.02)
    training().breaks("TIME", DriverRestarted(), after=-0.02)


# ---- a journal -----------------------------------------------------------------------------------------------------


def test_journal_is_checked_line_by_line(tmp_path):
    told = gathering()
    told.line(ready("h:0", 2, (2, 5)), world(3, "h:0", "h:1", holders=2, commit=(2, 5)))
    told.end(1, "enough")
    assert check_journal(written(told, tmp_path / "good")).worlds == 3
    told.lines[-2] = (*told.lines[-2][:2], [world(5, "h:0", "h:1")])
    with pytest.raises(
        BrokenInvariant, match=f"generation 5 follows 2 \\(line {len(told.lines)}, "
    ):
        check_journal(written(told, tmp_path / "bad"))


def test_journal_of_a_driver_that_raised_breaks_an_invariant(tmp_path):
    told = training()
    path = written(told, tmp_path / "raised", error="AssertionError: too late")
    with raises(BrokenInvariant):
        check_journal(path)


def written(told: ScriptedJournal, path, *, error: str = ""):
    journal = FileJournal.begin(path, told.settings)
    for at, event, actions in told.lines:
        journal.record(at, event, actions)
    if error:
        journal.record(told.now + 1, TimePassed(), error=error)
    journal.close()
    return path
