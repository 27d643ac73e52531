"""Root causes: user exceptions, and jobs that cannot recover."""

from elastic.driver.events import (
    BreakWorld,
    CheckpointMade,
    EndJob,
    KillWorker,
    PublishWorld,
    WorkerRaised,
)
from elastic.driver.membership.worlds.root_cause import (
    Exceptions,
    RootCauseSearch,
    describe_exit,
    exit_code,
)
from elastic.driver.reasons import ReasonKind, as_sentence, because, brief
from elastic.protocol.messages import Commit, Worker
from harness.conversation import (
    MembershipConversation,
    all_lost,
    disconnected,
    exited,
    failed,
    has,
    has_quit,
    hosts,
    names,
    order,
    raised,
    ready,
    returned,
    running,
    said,
    started,
    static,
    stranded,
    the,
    worker,
)
from harness.golden import recorded

# ---- user exceptions ----------------------------------------------------------------------------


def test_exception_in_one_worker_cools_down_its_slot_and_the_job_continues():
    talk = running(3)
    actions = talk.tell(raised("h:1", 2, (2, 4)))
    recorded("log", said(actions))
    assert the(BreakWorld, actions).members == [worker("h:0"), worker("h:2")]
    assert has(PublishWorld, talk.ready("h:0", "h:2", commit=(2, 4)))
    recorded("log", said(talk.tell(exited("h:1", 1))))
    assert names(talk.wait(1)) == ["h:1#2"]


def test_worker_that_calls_sys_exit_is_lost_before_its_interpreter_exits():
    talk = running(3)
    broken = the(BreakWorld, talk.tell(has_quit("h:1", 2)))
    assert broken.members == [worker("h:0"), worker("h:2")]
    assert broken.reason == because(ReasonKind.LOST_EXITED, worker="h:1#1", exit="exit code 0")
    assert talk.tell(failed("h:0", 2)) == []
    assert has(PublishWorld, talk.ready("h:0", "h:2", commit=(2, 4)))
    assert names(talk.wait(5)) == [], "its slot is taken for as long as it runs"
    gone = talk.tell(exited("h:1", 0))
    recorded("log", said(gone))
    assert not has(BreakWorld, gone), "it was lost once"
    assert names(talk.wait(1)) == ["h:1#2"]


def test_interpreter_that_does_not_exit_is_killed():
    talk = running(3, leave_s=30)
    talk.tell(has_quit("h:1", 2))
    talk.ready("h:0", "h:2", commit=(2, 4))
    assert names(talk.wait(31), KillWorker) == ["h:1#1"]


def test_last_worker_may_exit_slowly():
    """No other worker waits for it, and its exit handlers may matter, so it is not killed."""
    talk = running(2, leave_s=30)
    talk.tell(has_quit("h:0", 2), has_quit("h:1", 2))
    assert not has(KillWorker, talk.wait(20))
    assert not has(EndJob, talk.tell(exited("h:0", 0)))
    assert not has(KillWorker, talk.wait(60))
    end = the(EndJob, talk.tell(exited("h:1", 0)))
    assert end.code == 1
    assert end.reason == all_lost({"h:0#1": "exit code 0", "h:1#1": "exit code 0"})


def test_exit_after_peers_returned_is_not_a_failure_of_the_peers():
    talk = running(2)
    talk.tell(returned("h:0", 2))
    actions = talk.tell(has_quit("h:1", 2, 0))
    assert the(EndJob, actions).code == 0
    recorded("log", said(actions))


def test_repeated_outdated_and_unknown_exit_reports_are_ignored():
    talk = running(3)
    assert talk.tell(has_quit("h:1", 1)) == [], "of an older world"
    assert talk.tell(has_quit("h:7", 2)) == [], "nobody knows it"
    talk.tell(has_quit("h:1", 2))
    assert talk.tell(has_quit("h:1", 2)) == [], "said again on a new connection"
    assert static(2).tell(has_quit("h:1", 1)) == [], "in a static job the exit is the verdict"


def test_process_that_does_not_exit_after_its_exception_is_killed():
    talk = running(3, leave_s=30)
    talk.tell(raised("h:1", 2, (2, 4)))
    assert names(talk.wait(31), KillWorker) == ["h:1#1"]


def test_same_exception_from_a_second_worker_ends_the_job():
    talk = running(3)
    talk.tell(raised("h:1", 2, (2, 4), "IndexError: 17 of 10"))
    end = the(EndJob, talk.tell(raised("h:2", 2, (2, 4), "IndexError: 23 of 10")))
    assert end.reason == because(
        ReasonKind.SAME_EXCEPTION,
        first="h:1#1",
        worker="h:2#1",
        commit="2.4",
        trace="Traceback ...\nIndexError: 23 of 10",
    )


def test_same_exception_at_the_same_commit_ends_the_job_after_a_regroup():
    talk = running(3)
    talk.tell(raised("h:1", 2, (2, 4)), exited("h:1", 1))
    talk.ready("h:0", "h:2", commit=(2, 4))
    assert has(EndJob, talk.tell(raised("h:2", 3, (3, 0))))  # commit 3.0 is the same as 2.4


def test_same_exception_at_another_commit_counts_as_new():
    talk = running(4)
    talk.tell(raised("h:1", 2, (2, 4)), exited("h:1", 1))
    talk.ready("h:0", "h:2", "h:3", commit=(2, 4))
    assert not has(EndJob, talk.tell(raised("h:2", 3, (3, 8))))


def test_same_exception_before_the_first_commit_counts_as_the_same():
    """Rank 0 raises with its own state, before any other rank receives it.

    The next world starts without commits too.
    """
    talk = started(3)
    talk.ready("h:0", "h:1", "h:2")
    talk.tell(raised("h:0", 2, (2, 0), beginning=True), exited("h:0", 1))
    assert the(PublishWorld, talk.ready("h:1", "h:2")).commit is None
    other = raised("h:2", 3, None, "KeyError: y", beginning=True)
    assert not has(EndJob, talk.tell(other))
    end = the(EndJob, talk.tell(raised("h:1", 3, (3, 0), beginning=True)))
    assert end.reason == because(
        ReasonKind.SAME_EXCEPTION,
        first="h:0#1",
        worker="h:1#1",
        commit="3.0",
        trace="Traceback ...\nValueError: x",
    )


def test_beginning_is_the_same_position_for_a_worker_with_its_state():
    talk = running(3)
    talk.tell(raised("h:0", 2, (2, 0), beginning=True), exited("h:0", 1))
    assert the(PublishWorld, talk.ready("h:1", "h:2", commit=(2, 0))).commit == Commit(2, 0)
    assert has(EndJob, talk.tell(raised("h:1", 3, (3, 0))))


def test_beginning_is_another_position_once_a_checkpoint_exists():
    talk = started(2, workers_min=1, restarts=3)
    talk.ready("h:0", "h:1")
    talk.tell(raised("h:0", 2, (2, 0), beginning=True), exited("h:0", 1))
    talk.ready("h:1")
    talk.tell(CheckpointMade(Commit(3, 400)), exited("h:1"))
    talk.wait(60)
    assert the(PublishWorld, talk.join("h:0#2")).commit is None
    assert not has(EndJob, talk.tell(raised("h:0#2", 4, (4, 0), beginning=True)))
    assert the(PublishWorld, talk.join("h:1#2")).commit is None
    assert has(EndJob, talk.tell(raised("h:1#2", 5, (5, 0), beginning=True)))


def test_different_exception_counts_as_new():
    talk = running(4)
    talk.tell(raised("h:1", 2, (2, 4), "ValueError: x"))
    assert not has(EndJob, talk.tell(raised("h:2", 2, (2, 4), "ValueError: y")))


def test_same_gpu_failures_are_not_the_scripts_fault():
    """One fault of the fabric can affect all GPUs of a host, with the same text at the same commit."""
    talk = running(4)
    illegal = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    actions = talk.tell(
        raised("h:1", 2, (2, 4), illegal, hardware=True),
        raised("h:2", 2, (2, 4), illegal, hardware=True),
    )
    assert not has(EndJob, actions)
    assert "GPU or NCCL failed" in said(actions)
    actions = talk.tell(exited("h:1", 1), exited("h:2", 1))
    recorded("log", said(actions))
    world = the(PublishWorld, talk.ready("h:0", "h:3", commit=(2, 4)))
    assert order(world) == ["h:0#1", "h:3#1"]


def test_gpu_failure_does_not_count_for_later_script_failures():
    talk = running(4)
    talk.tell(raised("h:1", 2, (2, 4), hardware=True), exited("h:1", 1))
    assert not has(EndJob, talk.tell(raised("h:2", 2, (2, 4))))
    assert has(EndJob, talk.tell(raised("h:3", 2, (2, 4))))


def test_failing_newcomers_do_not_end_a_training_job():
    talk = running(2, workers_max=4)
    talk.tell(hosts(h=4))
    talk.connect("h:2", "h:3")
    actions = talk.tell(raised("h:2", 0, None), exited("h:2", 1), raised("h:3", 0, None))
    assert not has(EndJob, actions) and not has(BreakWorld, actions)


def test_job_ends_with_the_last_exception_if_every_worker_raised_another():
    talk = running(2)
    talk.tell(raised("h:0", 2, (2, 4), "ValueError: x"))
    end = the(EndJob, talk.tell(raised("h:1", 2, (2, 4), "KeyError: y")))
    assert end.reason == because(
        ReasonKind.ALL_LOST,
        members=2,
        generation=2,
        cause=because(
            ReasonKind.SEVERAL,
            causes=[
                because(ReasonKind.LOST_RAISED, worker="h:0#1", summary="ValueError: x"),
                because(ReasonKind.LOST_RAISED, worker="h:1#1", summary="KeyError: y"),
            ],
            more=0,
        ),
        wrote="Traceback ...\nKeyError: y",
    )
    assert str(end.reason).endswith("Traceback ...\nKeyError: y")


def test_commits_keep_their_first_name_across_worlds():
    exceptions = Exceptions()
    exceptions.world_began(2, None)
    exceptions.world_began(3, Commit(2, 0))
    exceptions.world_began(4, Commit(3, 0))
    first = WorkerRaised(worker("h:0"), 2, Commit(2, 0), "ValueError: 0x7f01", "")
    again = WorkerRaised(worker("h:1"), 4, Commit(4, 0), "ValueError: 0x88aa", "")
    assert exceptions.repeats(first) is None
    assert exceptions.repeats(again) == worker("h:0")


# ---- static jobs --------------------------------------------------------------------------------


def test_static_job_fails_with_rank_host_and_exit_code_of_the_failed_worker():
    end = the(EndJob, static(3).tell(exited("h:1", 3, "Traceback\nKeyError: 'x'\n")))
    assert end.code == 3
    assert end.reason == because(
        ReasonKind.ENDED,
        who="rank 1 (h:1#1 on h)",
        exit="exit code 3",
        killed_for=None,
        early=False,
        outside=False,
        wrote="Traceback\nKeyError: 'x'",
    )
    assert the(EndJob, static(3).tell(exited("h:1", -9))).code == 137


def test_static_job_fails_before_its_first_world():
    talk = MembershipConversation(np=2, workers_min=2, elastic=False)
    talk.tell(hosts(h1=1, h2=1))
    end = the(EndJob, talk.tell(exited("h2:0", 2)))
    assert end.reason == because(
        ReasonKind.ENDED,
        who="rank 1 (h2:0#1 on h2)",
        exit="exit code 2",
        killed_for=None,
        early=False,
        outside=False,
        wrote="",
    )


def test_survivor_that_reports_the_failure_first_is_not_blamed():
    talk = static(3)
    assert talk.tell(failed("h:0", 1), stranded("h:2", 1)) == []
    assert talk.tell(exited("h:0", 1)) == []  # it failed because of h:1
    end = the(EndJob, talk.tell(exited("h:1", -9)))
    recorded("messages", (end.code, str(end.reason)))


def test_reported_failure_is_the_reason_if_no_other_worker_exits():
    talk = static(2, disconnect_s=2)
    talk.tell(failed("h:0", 1), failed("h:1", 1))
    end = the(EndJob, talk.wait(2.1))
    assert end.reason == because(
        ReasonKind.LOST_PEER, who="rank 0 (h:0#1 on h)", text="connection closed by peer"
    )
    talk = static(2)
    talk.tell(failed("h:0", 1), failed("h:1", 1), exited("h:0", 1))
    assert the(EndJob, talk.tell(exited("h:1", 1))).reason == because(
        ReasonKind.LOST_PEER, who="rank 0 (h:0#1 on h)", text="connection closed by peer"
    )


def test_ranks_that_called_different_collectives_have_lost_no_peer():
    for complaint in (failed, stranded):
        talk = static(2)
        talk.tell(complaint("h:0", 1, differs=True), complaint("h:1", 1, differs=True))
        talk.tell(exited("h:0", 1))
        end = the(EndJob, talk.tell(exited("h:1", 1)))
        assert (end.code, end.reason.kind) == (1, ReasonKind.CALLS_DIFFER)


def test_suspect_may_exit_slowly():
    talk = static(3, disconnect_s=2)
    talk.tell(failed("h:0", 1), failed("h:2", 1), exited("h:0", 1))
    assert talk.wait(9) == []  # h:1 has not reported a failure
    assert the(EndJob, talk.tell(exited("h:1", 3))).code == 3
    talk = static(2, disconnect_s=2)
    talk.tell(failed("h:0", 1))
    assert the(EndJob, talk.wait(11)).reason == because(
        ReasonKind.LOST_PEER, who="rank 0 (h:0#1 on h)", text="connection closed by peer"
    )


def test_worker_that_exited_with_0_too_early_is_blamed():
    talk = static(2)
    assert talk.tell(exited("h:1", 0)) == []  # it may have finished
    talk.tell(stranded("h:0", 1))
    end = the(EndJob, talk.tell(exited("h:0", 1)))
    assert end.reason == because(
        ReasonKind.ENDED_EARLY,
        workers="rank 1 (h:1#1 on h)",
        cause=because(
            ReasonKind.LOST_PEER, who="rank 0 (h:0#1 on h)", text="connection closed by peer"
        ),
    )


def test_worker_that_raised_is_blamed_even_if_another_exits_first():
    talk = static(2)
    talk.tell(failed("h:0", 1), raised("h:1", 1, None))
    talk.tell(raised("h:0", 1, None, "CollectiveFailed: closed"), exited("h:0", 1))
    end = the(EndJob, talk.tell(exited("h:1", 1)))
    assert end.reason == because(
        ReasonKind.SCRIPT_RAISED,
        who="rank 1 (h:1#1 on h)",
        summary="ValueError: x",
        trace="Traceback ...\nValueError: x",
    )


def test_static_job_succeeds_if_all_workers_exit_with_0():
    talk = static(2)
    assert talk.tell(exited("h:0", 0)) == []
    assert the(EndJob, talk.tell(exited("h:1", 0))).code == 0


def test_static_workers_under_elastic_run():
    talk = static(2)
    talk.ready("h:0", "h:1")
    talk.resume()
    talk.tell(returned("h:0", 2))
    assert the(EndJob, talk.tell(returned("h:1", 2))).code == 0
    talk = static(2)
    talk.ready("h:0", "h:1")
    end = the(EndJob, talk.tell(exited("h:1", 0)))
    recorded("messages", (end.code, str(end.reason)))


def test_worker_waiting_in_init_for_an_exited_one_is_released():
    talk = static(2)
    talk.tell(ready("h:0", 1, running=False))
    end = the(EndJob, talk.tell(exited("h:1", 0)))
    assert end.reason == because(ReasonKind.OTHERS_EXITED, exited=1, waiting=1)


def test_worker_that_does_not_call_init_again_is_named():
    talk = static(2, elastic_timeout_s=60)
    talk.tell(ready("h:0", 1, running=False))
    end = the(EndJob, talk.wait(61))
    assert end.reason == because(ReasonKind.NOT_ENTERED, who="rank 1 (h:1#1 on h)", for_s=60)


def test_worker_whose_connection_is_lost_is_killed_and_named():
    talk = static(2)
    talk.tell(disconnected("h:1"))
    assert names(talk.wait(2.1), KillWorker) == ["h:1#1"]
    end = the(EndJob, talk.tell(exited("h:1")))
    assert end.reason == because(
        ReasonKind.ENDED,
        who="rank 1 (h:1#1 on h)",
        exit="signal 9 SIGKILL",
        killed_for=because(ReasonKind.CONNECTION_LOST),
        early=False,
        outside=False,
        wrote="",
    )


def test_exits_are_described():
    recorded("messages", describe_exit(3))
    assert describe_exit(-9) == "signal 9 SIGKILL"
    assert describe_exit(-99) == "signal 99"
    assert [exit_code(code) for code in (3, -9, 0)] == [3, 137, 1]


def test_repeated_reason_is_shortened_to_its_first_words():
    recorded("messages", brief(because(ReasonKind.FROZEN, how="stopped by a signal")))
    recorded("messages", brief(because(ReasonKind.IDLE, for_s=30.0, where="in 'loss'")))
    whole = because(ReasonKind.NO_INIT, within_s=120.0)
    assert brief(whole) == str(whole) == "it did not call init() within 120 s"


def test_reported_failure_is_settled_once_all_reporters_are_in_a_new_world():
    """The script has its own retry loop. A worker blamed for its own exception is not excused."""
    first, second = Worker("h", 0, 1), Worker("h", 1, 1)
    search = RootCauseSearch(
        by=2.0, latest=10.0, verdict=as_sentence("h:0 lost a peer"), reporters={first}
    )
    assert search.settled([second, first])
    assert not search.settled([second])
    search.name_root_cause(second, as_sentence("h:1 raised ValueError"))
    assert not search.settled([second, first])


def test_first_worker_that_cannot_resume_from_the_checkpoint_ends_the_job():
    """The checkpoint belongs to another script, so all other workers, even restarted ones, would fail as well."""
    talk = MembershipConversation(np=3)
    talk.tell(hosts(h=3))
    talk.join("h:0", "h:1", "h:2")
    text = "this worker's state differs from that of the checkpoint"
    final = WorkerRaised(worker("h:0"), talk.m.generation, None, text, "", final=True)
    end = the(EndJob, talk.tell(final))
    assert end.code == 1 and end.reason.kind is ReasonKind.NO_RESUME and text in str(end.reason)
