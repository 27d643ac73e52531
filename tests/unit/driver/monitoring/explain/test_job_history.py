"""Story of a job from its events: the cause of an incident, its end, and its findings."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from elastic.driver.events import (
    AnswerRequest,
    BreakWorld,
    CheckpointMade,
    EndJob,
    Event,
    HostLost,
    HostsChanged,
    KillWorker,
    RemoveRequested,
    ReplicasSpoilt,
    ReportRecovery,
    ScaleRequested,
    StopRequested,
    WelcomeWorker,
    WorkerConnected,
    WorkerDiffers,
    WorkerExited,
    WorkerFoundMistake,
    WorkerFrozen,
    WorkerPaced,
    WorkerRaised,
    WorkerReady,
    WorkerReturned,
    WorkerSpent,
    WorkerThawed,
)
from elastic.driver.monitoring.explain.animation import film
from elastic.driver.monitoring.explain.findings import (
    ADVICE,
    Advice,
    FindingKind,
    JobFinding,
    JournalState,
    findings,
)
from elastic.driver.monitoring.explain.job_history import JobHistory
from elastic.driver.monitoring.explain.journal_file import read_journal
from elastic.driver.monitoring.explain.loss_causes import Cause, of_fence
from elastic.driver.monitoring.explain.sentences import sentence
from elastic.driver.monitoring.explain.timeline_rows import STATES, WorkerRows
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import ReasonKind, because
from elastic.protocol.messages import Commit, Place, Times, Worker
from harness.golden import recorded
from harness.kept_journals import (
    KEPT,
    from_the_middle,
    lines_of,
    unpacked,
    without_actions,
    written,
)
from harness.published import STORE, published, starts
from unit.driver.monitoring.explain.test_report_page import SETTINGS

A, B, C = (Worker("h", slot) for slot in range(3))
A2, B2 = (Worker("h", slot, 2) for slot in range(2))


class TrainingStory:
    """A story with its rows. Three workers train from second 2 on."""

    def __init__(self) -> None:
        self.story = JobHistory(TimeSpent(JobView()))
        self.rows = WorkerRows(self.story.view)
        self.at(0.0, HostsChanged({"h": 3}), *starts(A, B, C))
        for each in (A, B, C):
            self.at(1.0, WorkerConnected(each, 1))
            self.at(1.5, WorkerReady(each, 0, None, STORE))
        self.at(2.0, WorkerReady(A, 0, None, STORE), published(2, A, B, C))

    def at(self, now: float, event: Event, *actions) -> None:
        self.story.view.note(event, actions, now)

    def lose(self, now: float, worker: Worker, *left: Worker, generation: int) -> None:
        """Kill a worker, and let the others continue 50 ms later."""
        lost = because(ReasonKind.LOST_EXITED, worker=str(worker), exit="signal 9 SIGKILL")
        self.at(now, WorkerExited(worker, -9), BreakWorld(generation - 1, [*left], lost))
        ready = WorkerReady(left[0], generation - 1, Commit(2, 7), STORE)
        self.at(now + 0.04, ready, published(generation, *left))
        over = ReportRecovery(generation, "recovery", lost, len(left), 50.0, {}, 0)
        self.at(now + 0.05, ready, over)

    def found(self, what: FindingKind) -> list[JobFinding]:
        recorder = findings(self.story, JournalState(SETTINGS))
        return [finding for finding in recorder if finding.what is what]


def test_finding_when_a_worker_was_outvoted_then_has_the_evidence_and_an_advice():
    facts: dict[str, Any] = {
        "step": 17,
        "shard": 5,
        "digest": "ff",
        "right": "fe",
        "witnesses": "h:0#1",
    }
    wrong = because(ReasonKind.MISCOMPUTED, **facts, agreed=9, quarantine="slot")
    death = of_fence(Worker("h", 2), wrong, 1.0, 2)
    assert death is not None and death.cause is Cause.MISCOMPUTED
    assert death.facts["agreed"] == "9" and death.facts["witnesses"] == "h:0#1"
    assert ADVICE[death.cause] is Advice.TEST_HOST


def test_reporter_of_a_lost_peer_is_not_blamed():
    """Survivors may report the loss before the exit of the lost worker is known."""
    recorder = TrainingStory()
    failure = "CollectiveFailed: rank 1 of this group left it"
    recorder.at(5.0, WorkerRaised(A, 2, None, failure, f"Traceback\n{failure}"))
    recorder.at(5.1, WorkerExited(B, -11), EndJob(1, because(ReasonKind.ENDED, who="x", exit="y")))
    [cause] = recorder.found(FindingKind.CAUSE)
    assert (cause.facts["cause"], cause.facts["who"]) == ("signal", "rank 1 of 3 (h:1#1)")


def test_corruption_of_all_replicas_is_reported_once_with_the_checkpoint_used():
    recorder = TrainingStory()
    recorder.at(3.0, CheckpointMade(Commit(2, 5)))
    recorder.at(4.0, WorkerPaced(A, 2, 9, 0.1, 1.0, 9, Commit(2, 9)))
    damaged = because(ReasonKind.DAMAGED, parts="model", commit="2.9", equal=2)
    spoilt = because(ReasonKind.SPOILT, commit="2.9")
    recorder.at(5.0, WorkerDiffers(C, 2, Commit(2, 9), ["model"], 2), KillWorker(C, damaged))
    others = [KillWorker(A, spoilt), KillWorker(B, spoilt), BreakWorld(2, [], spoilt)]
    recorder.at(5.0, ReplicasSpoilt(2, Commit(2, 9)), *others)
    begun = WorkerReady(A2, 0, None, STORE)
    recorder.at(6.0, begun, msgspec.structs.replace(published(3, A2, B2), holders=0))
    recorder.at(6.1, begun, ReportRecovery(3, "recovery", spoilt, 2, 1100.0, {}, 0))
    [incident] = recorder.found(FindingKind.INCIDENT)
    text = sentence(incident)
    recorded("explain", text)
    [lost] = recorder.found(FindingKind.LOST_COMMITS)
    recorded("explain", sentence(lost))
    assert Advice.TEST_HOST.value in [
        each.facts["advice"] for each in recorder.found(FindingKind.ADVICE)
    ]


@pytest.mark.parametrize("step", [None, 40])
def test_incident_when_the_state_has_a_step_then_training_resumed_from_this_step(step):
    recorder = TrainingStory()
    lost = because(ReasonKind.LOST_EXITED, worker=str(C), exit="signal 9 SIGKILL")
    recorder.at(5.0, WorkerExited(C, -9), BreakWorld(2, [A, B], lost))
    ready = WorkerReady(A, 2, Commit(2, 9), STORE, step=step)
    resumes = msgspec.structs.replace(published(3, A, B), commit=Commit(2, 9))
    recorder.at(5.04, ready, resumes)
    recorder.at(5.05, ready, ReportRecovery(3, "recovery", lost, 2, 50.0, {}, 0))
    [incident] = recorder.found(FindingKind.INCIDENT)
    assert (incident.facts["commit"], incident.facts["step"]) == ("g2c9", step)
    recorded("explain", sentence(incident))
    recorder.at(6.0, CheckpointMade(Commit(3, 1), step and step + 1))
    [checkpoints] = recorder.found(FindingKind.CHECKPOINTS)
    recorded("explain", sentence(checkpoints))
    ended = EndJob(0, because(ReasonKind.ALL_RETURNED, members=2, generation=3))
    recorder.at(7.0, WorkerReturned(A, 3), ended)
    [done] = recorder.found(FindingKind.DONE)
    recorded("explain", sentence(done))


def test_survivors_that_rolled_back_to_a_checkpoint_resume_from_its_commit():
    recorder = TrainingStory()
    recorder.at(3.0, CheckpointMade(Commit(2, 5), 15))
    recorder.at(4.0, WorkerPaced(A, 2, 9, 0.1, 1.0, 9, Commit(2, 9)))
    lost = because(ReasonKind.LOST_RAISED, worker=str(C), summary="ValueError: x")
    recorder.at(5.0, WorkerExited(C, -9), BreakWorld(2, [A, B], lost))
    ready = WorkerReady(A, 2, Commit(2, 9), STORE)
    recorder.at(5.1, ready, published(3, A, B))
    report = ReportRecovery(3, "recovery", lost, 2, 50.0, {}, 0)
    recorder.at(5.2, ready, msgspec.structs.replace(report, from_checkpoint=True))
    [incident] = recorder.found(FindingKind.INCIDENT)
    assert incident.facts["from_checkpoint"] and incident.facts["commit"] == "g2c5"
    assert incident.facts["step"] == 15
    assert recorder.found(FindingKind.LOST_COMMITS)


def test_all_hosts_are_to_be_tested_if_the_corrupted_memory_is_unknown():
    recorder = TrainingStory()
    spoilt = because(ReasonKind.SPOILT, commit="2.9")
    recorder.at(5.0, ReplicasSpoilt(2, Commit(2, 9)), KillWorker(A, spoilt), KillWorker(B, spoilt))
    recorder.at(
        5.0, ReplicasSpoilt(2, Commit(2, 9)), EndJob(1, because(ReasonKind.RESTARTS_SPENT, limit=1))
    )
    [cause] = recorder.found(FindingKind.CAUSE)
    recorded("explain", sentence(cause))
    assert recorder.found(FindingKind.ADVICE)[0].facts["advice"] == Advice.TEST_HOSTS.value


def test_error_after_training_fails_the_job():
    recorder = TrainingStory()
    recorder.at(
        5.0,
        WorkerExited(C, 0),
        EndJob(0, because(ReasonKind.ALL_RETURNED, members=3, generation=2)),
    )
    recorder.at(6.0, WorkerExited(A, 0))
    trace = 'Traceback (most recent call last):\n  File "s.py", line 9\nOSError: disk is gone'
    recorder.at(7.0, WorkerExited(B, 1, output=trace))
    [ended] = recorder.found(FindingKind.FAILED)
    [cause] = recorder.found(FindingKind.CAUSE)
    assert ended.facts["code"] == 1
    recorded("explain", (cause.facts["who"], cause.facts["what"]))
    assert recorder.found(FindingKind.AFTER_TRAINING) and recorder.found(FindingKind.TRACE)
    assert not recorder.found(FindingKind.DONE) and not recorder.found(FindingKind.LOST_ALL)


def test_worker_that_exited_well_after_training_is_not_lost_with_its_host():
    recorder = TrainingStory()
    recorder.at(
        5.0,
        WorkerExited(C, 0),
        EndJob(0, because(ReasonKind.ALL_RETURNED, members=3, generation=2)),
    )
    recorder.at(6.0, WorkerExited(A, 0))
    recorder.at(6.0, WorkerExited(B, 0))
    recorder.at(7.0, HostLost("h", "its connection is gone"))
    assert recorder.found(FindingKind.DONE) and not recorder.found(FindingKind.CAUSE)


def test_host_lost_during_code_after_training_fails_the_job():
    recorder = TrainingStory()
    recorder.at(
        5.0,
        WorkerExited(C, 0),
        EndJob(0, because(ReasonKind.ALL_RETURNED, members=3, generation=2)),
    )
    recorder.at(7.0, HostLost("h", "its connection is gone"))
    [cause] = recorder.found(FindingKind.CAUSE)
    assert cause.facts["who"] == "rank 0 of 3 (h:0#1)"


def test_operator_requests_and_the_newest_known_commit_are_reported():
    recorder = TrainingStory()
    why = because(ReasonKind.REMOVES, worker=str(C))
    recorder.at(4.0, RemoveRequested(1, C), AnswerRequest(1, True, why))
    recorder.at(
        5.0, ScaleRequested(2, 9000), AnswerRequest(2, False, because(ReasonKind.FIXED_SIZE))
    )
    recorder.at(6.0, WorkerSpent(A, 3, Times(), "training", Commit(3, 243)))
    recorder.at(
        7.0,
        StopRequested("x asks for it", 143),
        EndJob(143, because(ReasonKind.ENDED, who="x", exit="y")),
    )
    recorded("explain", [sentence(each) for each in recorder.found(FindingKind.REQUEST)])
    [lost] = recorder.found(FindingKind.LOST_ALL)
    assert lost.facts["commit"] == "g3c243"


def test_incident_ends_when_all_workers_have_resumed():
    recorder = TrainingStory()
    recorder.lose(10.0, C, A, B, generation=3)
    recorder.lose(20.0, B, A, generation=4)
    assert [each.recovered_ms for each in recorder.story.incidents] == [50.0, 50.0]
    assert [(each.size, each.size_after) for each in recorder.story.incidents] == [(3, 2), (2, 1)]
    assert not recorder.story.in_trouble() and not recorder.found(FindingKind.CAUSE)


def test_exception_after_peers_returned_is_the_cause_of_the_failure():
    recorder = TrainingStory()
    recorder.at(8.0, WorkerReturned(A, 2))
    recorder.at(8.1, WorkerReturned(B, 2))
    facts = {"members": 2, "generation": 2}
    failure = "AssertionError: x"
    recorder.at(
        9.0,
        WorkerRaised(C, 2, None, failure, failure),
        EndJob(0, because(ReasonKind.ALL_RETURNED, **facts)),
    )
    recorder.at(9.5, WorkerExited(C, 1, "", ""))
    assert recorder.story.code == 1
    [cause] = recorder.found(FindingKind.CAUSE)
    assert (cause.facts["cause"], cause.facts["what"]) == ("exception", failure)
    assert not recorder.found(FindingKind.AFTER_TRAINING) and not recorder.found(FindingKind.DONE)


@pytest.mark.parametrize("strict", [False, True])
def test_end_on_fewer_workers_names_the_worker_whose_script_failed(strict):
    recorder = TrainingStory()
    lost = because(ReasonKind.LOST_RAISED, worker=str(C), summary="ValueError: x")
    recorder.at(5.0, WorkerRaised(C, 2, None, "ValueError: x", ""), BreakWorld(2, [A, B], lost))
    ready = WorkerReady(A, 2, Commit(2, 7), STORE)
    recorder.at(5.1, ready, published(3, A, B))
    recorder.at(5.2, ready, ReportRecovery(3, "recovery", lost, 2, 50.0, {}, 0))
    facts = {"members": 2, "generation": 3, "began": 3, "failed": [lost], "strict": strict}
    reason = because(ReasonKind.ALL_RETURNED, **facts)
    recorder.at(9.0, WorkerReturned(A, 3), EndJob(0, reason))
    assert recorder.story.code == int(strict)
    [found] = recorder.found(FindingKind.CAUSE_UNKNOWN if strict else FindingKind.DONE)
    assert found.facts["reason" if strict else "short"] == str(reason)


def test_job_that_lost_its_shards_is_advised_to_keep_more_copies():
    recorder = TrainingStory()
    lost = because(ReasonKind.SHARDS_LOST, text="shard 1 of 4 was on h")
    raised = WorkerRaised(A, 2, None, "shard 1 of 4 was on h", "", final=True, shards_lost=True)
    recorder.at(9.0, raised, EndJob(1, lost))
    assert [death.cause for death in recorder.story.losses()] == [Cause.SHARDS_LOST]
    assert recorder.found(FindingKind.ADVICE)[0].facts["advice"] == Advice.MORE_COPIES.value


def test_exits_after_the_end_are_no_losses():
    recorder = TrainingStory()
    recorder.at(9.0, WorkerRaised(A, 2, None, "ValueError: x", "Traceback\nValueError: x"))
    recorder.at(
        9.1, WorkerExited(A, 1), EndJob(1, because(ReasonKind.ALL_LOST, members=3, generation=2))
    )
    recorder.at(9.4, WorkerRaised(C, 2, None, "JobOver: the job is over", "Traceback"))
    recorder.at(9.5, WorkerExited(B, -9))
    recorder.at(9.6, WorkerExited(C, 1, "", "Traceback (most recent call last):\nKeyError: 2\n"))
    assert [death.worker for death in recorder.story.losses()] == [A]


def test_repeated_incidents_are_counted():
    recorder = TrainingStory()
    for number in range(1, 5):
        worker = Worker("h", 2, number)
        recorder.at(
            10.0 * number,
            WorkerRaised(worker, 2, None, "ValueError: x", "Traceback\nValueError: x"),
        )
    recorder.at(
        50.0, WorkerExited(A, 1), EndJob(1, because(ReasonKind.RESET_LIMIT, limit=3, cause="x"))
    )
    assert [each.facts for each in recorder.found(FindingKind.REPEATED)] == [
        {"times": 4, "rank": None}  # they were in no world
    ]
    [trace] = recorder.found(FindingKind.TRACE)
    assert trace.facts["text"] == "Traceback\nValueError: x"


@pytest.mark.parametrize(("code", "helps"), [(1, False), (-9, True)])
def test_min_np_is_advised_after_a_loss_but_not_after_a_script_error(code, helps):
    recorder = TrainingStory()
    if code == 1:
        recorder.at(9.0, WorkerRaised(A, 2, None, "ValueError: x", "Traceback\nValueError: x"))
    recorder.at(
        10.0, WorkerExited(A, code), EndJob(1, because(ReasonKind.ENDED, who="x", exit="y"))
    )
    fixed = JournalState(dataclasses.replace(SETTINGS, elastic=False))
    advice = {each.facts.get("advice") for each in findings(recorder.story, fixed)}
    assert (Advice.BE_ELASTIC.value in advice) is helps


def test_script_without_elastic_run_is_advised_to_be_elastic():
    recorder = TrainingStory()
    outside = because(ReasonKind.LOST_PEER_OUTSIDE, who="rank 0", text="lost h:1#1")
    recorder.at(10.0, WorkerExited(B, -9), EndJob(1, outside))
    first, second = (each.facts["advice"] for each in recorder.found(FindingKind.ADVICE)[:2])
    assert (first, second) == (Advice.BE_ELASTIC.value, Advice.WHO_KILLED_IT.value)


def test_only_a_failed_job_loses_its_work_in_memory():
    recorder = TrainingStory()
    recorder.lose(10.0, C, A, B, generation=3)
    assert not recorder.found(FindingKind.LOST_ALL)
    recorder.at(20.0, WorkerExited(A, 1), EndJob(1, because(ReasonKind.ENDED, who="x", exit="y")))
    assert [each.facts["commit"] for each in recorder.found(FindingKind.LOST_ALL)] == ["g2c7"]


@pytest.mark.parametrize(
    ("durable", "lost"), [(None, ["g3c243"]), (Commit(3, 200), ["g3c243"]), (Commit(3, 243), [])]
)
def test_stopped_job_loses_the_commits_after_its_newest_checkpoint(durable, lost):
    recorder = TrainingStory()
    recorder.at(6.0, WorkerSpent(A, 3, Times(), "training", Commit(3, 243)))
    if durable is not None:
        recorder.at(6.5, CheckpointMade(durable))
    ended = EndJob(143, because(ReasonKind.ENDED, who="x", exit="y"))
    recorder.at(7.0, StopRequested("x asks for it", 143), ended)
    found = recorder.found(FindingKind.LOST_ALL)
    assert [each.facts["commit"] for each in found] == lost
    assert [each.facts["durable"] for each in found] == [durable and str(durable)] * len(lost)
    recorded("explain", [sentence(each) for each in found])
    assert bool(recorder.found(FindingKind.LOST_NOTHING)) is not bool(lost)


def test_actions_omitted_by_an_archive_are_reconstructed(tmp_path):
    worlds = 0
    for kept in sorted(KEPT.glob("*.xz")):
        header, lines = lines_of(unpacked(kept, tmp_path))
        archive = written(tmp_path / "archive", header, without_actions(lines))
        worlds += len(read_journal(archive).rows.worlds)
    assert worlds > 5


def test_copy_that_starts_in_the_middle_knows_the_members(tmp_path):
    known = 0
    for kept in sorted(KEPT.glob("*.xz")):
        header, lines = lines_of(unpacked(kept, tmp_path))
        reading = read_journal(written(tmp_path / "copy", header, from_the_middle(header, lines)))
        assert reading.source.from_the_middle
        known += bool(reading.rows.worlds and reading.rows.rows)
    assert known > 0


@pytest.mark.parametrize("memory", [False, True])
def test_last_output_of_a_killed_worker_is_no_traceback(memory):
    recorder = TrainingStory()
    ended = because(ReasonKind.ENDED, who="x", exit="y")
    exited = WorkerExited(A, -9, output="a warning\nof a library\n", out_of_memory=memory)
    recorder.at(5.0, exited, EndJob(137, ended))
    assert recorder.found(FindingKind.CAUSE) and not recorder.found(FindingKind.TRACE)


def test_static_job_trains_in_its_first_world():
    """No event marks the start of its training."""
    recorder = TrainingStory()
    recorder.story = JobHistory(TimeSpent(JobView()))
    recorder.at(1.0, WorkerConnected(A, 1), WelcomeWorker(A, Place(0, 1, 0, 1, 0, 1), False, False))
    recorder.at(2.0, WorkerReady(A, 0, None, STORE, running=False), published(1, A))
    ended = because(ReasonKind.ENDED, who="x", exit="y")
    recorder.at(5.0, WorkerExited(A, -9), EndJob(137, ended))
    [began] = recorder.found(FindingKind.TRAINING_BEGAN)
    assert began.facts["at_s"] == 1.0 and not recorder.found(FindingKind.NEVER_TRAINED)


def test_last_commit_without_a_checkpoint_is_reported_after_a_successful_job():
    recorder = TrainingStory()
    recorder.at(3.0, CheckpointMade(Commit(2, 5)))
    assert recorder.story.view.newest == Commit(2, 5)
    recorder.at(
        4.0,
        WorkerPaced(A, 2, 9, 0.1, 1.0, 9, Commit(2, 9)),
        EndJob(0, because(ReasonKind.ALL_RETURNED, members=3, generation=2)),
    )
    [lost] = recorder.found(FindingKind.NOT_DURABLE)
    recorded("explain", sentence(lost))
    assert not recorder.found(FindingKind.LOST_NOTHING)
    recorder.at(5.0, CheckpointMade(Commit(2, 9)))
    assert recorder.found(FindingKind.LOST_NOTHING) and not recorder.found(FindingKind.NOT_DURABLE)


def test_checkpoints_when_the_job_ended_then_the_newest_is_found():
    recorder = TrainingStory()
    assert not recorder.found(FindingKind.CHECKPOINTS)
    recorder.at(3.0, CheckpointMade(Commit(2, 5)))
    recorder.at(4.0, CheckpointMade(Commit(2, 9)))
    [runs] = recorder.found(FindingKind.CHECKPOINTS)
    assert runs.facts == {"count": 2, "commit": str(Commit(2, 9)), "step": None, "ended": False}
    ended = EndJob(0, because(ReasonKind.ALL_RETURNED, members=3, generation=2))
    recorder.at(5.0, WorkerReturned(A, 2), ended)
    [over] = recorder.found(FindingKind.CHECKPOINTS)
    assert over.facts["ended"]
    recorded("explain", sentence(over))


@pytest.mark.parametrize(
    ("outlives", "durable", "advice"),
    [(True, True, Advice.RESUME), (False, True, Advice.RERUN), (False, False, Advice.START_OVER)],
)
def test_advice_when_the_driver_was_killed_then_depends_on_the_journal_and_the_checkpoint(
    outlives, durable, advice
):
    recorder = TrainingStory()
    if durable:
        recorder.at(3.0, CheckpointMade(Commit(2, 5)))
    found = findings(recorder.story, JournalState(SETTINGS, runs=False, outlives=outlives))
    [given] = [each for each in found if each.what is FindingKind.ADVICE]
    assert given.facts["advice"] == advice.value
    recorded("explain", sentence(given))


def test_journal_on_a_full_disk_does_not_suggest_a_killed_driver():
    """Its driver continues, but no other driver can resume from it."""
    found = findings(TrainingStory().story, JournalState(SETTINGS, abandoned=True))
    first, *rest = map(sentence, found)
    recorded("explain", first)
    assert not any("--resume" in each for each in rest)


def test_training_started_before_a_copy_that_starts_in_the_middle():
    recorder = TrainingStory()
    recorder.story = JobHistory(TimeSpent(JobView()))
    recorder.story.view.adopt({A: (0, 0), B: (0, 1)}, 4, 50.0)
    [went_on] = recorder.found(FindingKind.TRAINING_BEGAN)
    recorded("explain", sentence(went_on))


def test_thawed_worker_continues_its_activity():
    recorder = TrainingStory()
    recorder.at(5.0, WorkerFrozen(B, "stopped"))
    recorder.at(6.0, WorkerThawed(B))
    rows = recorder.rows
    states = [STATES[int(span[2])] for span in rows.table(7.0)["h:1"]]
    assert states == ["starting", "joining", "training", "frozen", "training"]


def test_loss_is_a_red_ring_in_the_film():
    recorder = TrainingStory()
    assert "<circle r" in film(recorder.story, recorder.rows) and 'stroke-width="3"' not in film(
        recorder.story, recorder.rows
    )
    recorder.lose(10.0, C, A, B, generation=3)
    assert film(recorder.story, recorder.rows).count('stroke-width="3"') == 1


def test_oom_kill_is_a_separate_cause():
    recorder = TrainingStory()
    recorder.at(5.0, WorkerExited(B, -9, out_of_memory=True))
    assert [death.cause for death in recorder.story.losses()] == [Cause.OUT_OF_MEMORY]


def test_incident_when_no_commit_was_made_then_training_begins_again():
    recorder = TrainingStory()
    lost = because(ReasonKind.LOST_EXITED, worker="h:2#1", exit="signal 9 SIGKILL")
    recorder.at(5.0, WorkerExited(C, -9), BreakWorld(2, [A, B], lost))
    ready = WorkerReady(A, 2, Commit(2, 0), STORE)
    recorder.at(5.1, ready, published(3, A, B))
    recorder.at(5.2, ready, ReportRecovery(3, "recovery", lost, 2, 50.0, {}, 0))
    [incident] = recorder.found(FindingKind.INCIDENT)
    assert incident.facts["uncommitted"]
    recorded("explain", sentence(incident))
    recorder.at(9.0, HostsChanged({}), EndJob(1, lost))
    [gone] = recorder.found(FindingKind.LOST_ALL)
    assert gone.facts["uncommitted"]
    recorded("explain", sentence(gone))


def test_incident_when_commits_were_made_by_a_previous_driver_then_not_taken_for_uncommitted():
    story = JobHistory(TimeSpent(JobView()))
    story.view.adopt({A: (1, 0)}, 4, 1.0)
    story.view.note(WorkerReady(A, 4, Commit(4, 0), STORE), [], 2.0)
    assert not story.uncommitted


def test_advice_when_the_script_checks_found_mistakes_then_each_is_named_once():
    recorder = TrainingStory()
    for kind in ("model-not-in-state", "loop-restarts", "loop-restarts"):
        recorder.at(3.0, WorkerFoundMistake(A, kind, f"{kind} {{}}; pass it: TorchState(...)"))
    advised = [
        each
        for each in recorder.found(FindingKind.ADVICE)
        if each.facts["advice"] == Advice.SCRIPT_CHECK.value
    ]
    assert [each.facts["check"] for each in advised] == ["model-not-in-state", "loop-restarts"]
    recorded("explain", sentence(advised[0]))
