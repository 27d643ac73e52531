"""Preemption notices: which workers leave, stay or start, and when checkpoints are written.

The scenarios from 44 on cover the common cases.
"""

from __future__ import annotations

import pytest

from elastic.driver.events import (
    CheckpointMade,
    EndJob,
    Event,
    HastenCheckpoint,
    HostLeaving,
    HostReported,
    HostStaying,
    KillWorker,
    LetGo,
    Notice,
    PrepareChange,
    PublishWorld,
    StartWorker,
)
from elastic.driver.membership.preemption_notices import Notices
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.reasons import ReasonKind, because
from elastic.protocol.messages import Commit
from harness.conversation import (
    MembershipConversation,
    exited,
    failed,
    has,
    hosts,
    leaving,
    names,
    order,
    paced,
    running,
    said,
    static,
    the,
    worker,
)
from harness.golden import recorded

AWS = "AWS takes it back"


def on_two_hosts(**settings: object) -> MembershipConversation:
    """Train with two workers on h and two on g."""
    talk = MembershipConversation(np=4, **settings)
    talk.tell(hosts(h=2, g=2))
    everybody = ("h:0", "h:1", "g:0", "g:1")
    talk.connect(*everybody)
    talk.ready(*everybody, running=False)
    talk.ready(*everybody)
    talk.resume()
    return talk


def announced_end(host: str, within_s: float | None = 120.0, *, alone: bool = False) -> HostLeaving:
    return HostLeaving(host, Notice(AWS, within_s), alone)


def is_back(host: str, *running: str, notice: Notice | None = None) -> HostReported:
    return HostReported(host, [worker(name) for name in running], notice=notice)


def test_reconnected_agents_report_replaces_the_known_notice():
    talk = on_two_hosts(workers_min=2)
    assert has(PrepareChange, talk.tell(is_back("g", "g:0", "g:1", notice=Notice(AWS, 60.0))))
    actions = talk.tell(is_back("g", "g:0", "g:1"))
    recorded("log", said(actions))
    assert talk.wait(300) == []


def test_replacement_machine_with_the_same_name_is_used_at_once():
    talk = on_two_hosts(workers_min=2)
    talk.tell(announced_end("g"))
    talk.stop_all()
    talk.tell(exited("g:0", 0), exited("g:1", 0))
    assert not has(StartWorker, talk.wait(30))
    assert names(talk.tell(is_back("g"))) == ["g:0#2", "g:1#2"]


def test_earlier_of_two_announced_ends_counts():
    talk = on_two_hosts(workers_min=4)
    talk.tell(announced_end("g", 30.0), announced_end("g", 500.0))
    assert not has(PrepareChange, talk.wait(19))
    assert has(PrepareChange, talk.wait(2))


def test_needed_worker_stays_if_no_time_is_announced():
    talk = on_two_hosts(workers_min=4)
    talk.tell(announced_end("g", None))
    assert not has(PrepareChange, talk.wait(500))


@pytest.mark.parametrize("agent_first", [True, False])
def test_workers_that_got_sigterm_with_their_agents_stay_for_the_checkpoint(agent_first):
    """As with srun, which forwards a signal to every process of a job."""
    talk = on_two_hosts(workers_min=2, restarts=3, durable=True)
    signals = [leaving(name) for name in ("h:0", "h:1", "g:0", "g:1")]
    notices: list[Event] = [announced_end("h", 25.0), announced_end("g", 25.0)]
    actions = talk.tell(*(notices + signals if agent_first else signals + notices))
    assert not has(LetGo, actions) and has(HastenCheckpoint, actions)
    talk.tell(failed("h:0", 2))  # its data loader workers got it too
    actions = talk.ready("h:0", "h:1", "g:0", "g:1", commit=(2, 3))
    world = the(PublishWorld, actions)
    assert len(world.members) == 4 and world.checkpoint


def test_static_job_writes_a_checkpoint_when_one_machine_leaves():
    talk = on_two_hosts(workers_min=4, restarts=3, durable=True, elastic=False)
    assert has(HastenCheckpoint, talk.tell(announced_end("g", 25.0)))
    talk.tell(failed("g:1", 2))  # its data loader workers got SIGTERM
    talk.wait(2.0)
    actions = talk.ready("h:0", "h:1", "g:0", "g:1", commit=(2, 3))
    world = the(PublishWorld, actions)
    assert len(world.members) == 4 and world.checkpoint and has(HastenCheckpoint, actions)


def test_worker_that_asked_to_leave_leaves_though_its_machine_stays():
    talk = on_two_hosts(workers_min=2)
    talk.tell(announced_end("g"))
    talk.stop_all()
    actions = talk.tell(HostStaying("g"))
    assert names(actions) == []  # they have not exited yet
    assert names(talk.tell(exited("g:0", 0), exited("g:1", 0))) == ["g:0#2", "g:1#2"]


def test_withdrawal_of_an_unknown_notice_is_ignored():
    talk = on_two_hosts(workers_min=2)
    assert talk.tell(HostStaying("g")) == []


def test_workers_starting_on_a_leaving_machine_do_not_continue_there():
    talk = running(2, workers_min=1, workers_max=4)
    assert names(talk.tell(hosts(h=2, g=2))) == ["g:0#1", "g:1#1"]
    talk.connect("g:0")
    actions = talk.tell(announced_end("g"))
    assert the(LetGo, actions).worker == worker("g:0")
    assert not has(PrepareChange, actions)
    recorded("log", said(actions))


def test_loss_in_a_world_with_a_leaving_machine_counts_for_no_limit():
    talk = on_two_hosts(workers_min=4, reset_limit=0)
    talk.tell(announced_end("g", 60.0))
    assert not has(EndJob, talk.tell(failed("h:0", 2)))
    actions = talk.tell(exited("g:0"), exited("g:1"))
    recorded("log", said(actions))


def test_replacements_that_arrive_in_time_take_the_places():
    talk = on_two_hosts(workers_min=4)
    talk.tell(announced_end("g", 60.0))
    assert names(talk.tell(hosts(h=2, g=2, i=2))) == ["i:0#1", "i:1#1"]
    talk.connect("i:0", "i:1")
    talk.ready("i:0", "i:1", generation=0)
    world = the(PublishWorld, talk.stop_all())
    assert order(world) == ["h:0#1", "h:1#1", "i:0#1", "i:1#1"]


def test_unlisted_machine_loses_its_notice():
    talk = on_two_hosts(workers_min=2)
    talk.tell(announced_end("g", 60.0), hosts(h=2))
    talk.stop_all()
    talk.tell(exited("g:0", 0), exited("g:1", 0))
    assert names(talk.tell(hosts(h=2, g=2))) == ["g:0#2", "g:1#2"]


def test_static_job_is_only_notified():
    talk = static(2)
    actions = talk.tell(announced_end("h", 60.0))
    recorded("log", said(actions))
    assert talk.wait(100) == []


def test_broken_world_is_replaced_by_the_next_for_the_last_checkpoint():
    talk = on_two_hosts(workers_min=2, restarts=3)
    first = the(HastenCheckpoint, talk.tell(announced_end("g", None), announced_end("h", None)))
    assert first.rank0 == worker("h:0")
    talk.tell(exited("h:0"))
    actions = talk.ready("h:1", "g:0", "g:1", commit=(2, 3))
    again = the(HastenCheckpoint, actions)
    assert (again.generation, again.rank0) == (3, worker("h:1"))
    talk.tell(CheckpointMade(Commit(3, 4)))
    assert talk.wait(100) == []


def test_leaving_driver_ends_the_job_even_without_a_checkpoint():
    talk = running(2, workers_min=1, restarts=3)
    talk.tell(announced_end("h", 30.0, alone=True))
    assert not has(EndJob, talk.wait(26))
    end = the(EndJob, talk.wait(2))
    assert end.code == 143
    assert end.reason == because(
        ReasonKind.MACHINE_LEAVES, notice="AWS takes it back", newest=None, durable=True
    )


@pytest.mark.parametrize("notice_s", [21.5, 25.0, 30.0, 40.0, 41.0, 60.0, 120.0])
def test_leaving_driver_trains_until_the_last_checkpoint(notice_s):
    talk = running(2, workers_min=1, restarts=3)
    assert has(HastenCheckpoint, talk.tell(announced_end("h", notice_s, alone=True)))
    assert not has(EndJob, talk.tell(CheckpointMade(Commit(2, 4))))
    asked = talk.wait(notice_s - 20.1)
    assert not has(HastenCheckpoint, asked) and not has(EndJob, asked)
    asked = talk.wait(0.2)
    assert has(HastenCheckpoint, asked) and not has(EndJob, asked)
    assert the(EndJob, talk.tell(CheckpointMade(Commit(2, 90)))).code == 143


@pytest.mark.parametrize("notice_s", [0.0, 5.0, 20.0, 20.5])
def test_driver_leaving_within_20_s_ends_with_the_first_checkpoint(notice_s):
    talk = running(2, workers_min=1, restarts=3)
    actions = talk.tell(announced_end("h", notice_s, alone=True))
    if notice_s:
        assert has(HastenCheckpoint, actions)
        actions = talk.tell(CheckpointMade(Commit(2, 4)))
    assert the(EndJob, actions).code == 143


@pytest.mark.parametrize(
    ("notice_s", "end_s"),
    [(5.0, 2.5), (20.0, 17.0), (25.0, 22.0), (30.0, 27.0), (40.0, 37.0), (60.0, 57.0)],
)
def test_job_ends_if_no_checkpoint_is_written_in_time(notice_s, end_s):
    talk = running(2, workers_min=1, restarts=3)
    talk.tell(announced_end("h", notice_s, alone=True))
    assert not has(EndJob, talk.wait(end_s - 0.1))
    assert the(EndJob, talk.wait(0.2)).code == 143


def test_checkpoint_in_progress_does_not_count_as_the_last():
    talk = running(2, workers_min=1, restarts=3)
    talk.tell(announced_end("h", 30.0, alone=True))
    assert has(HastenCheckpoint, talk.wait(10.1))
    assert not has(EndJob, talk.tell(CheckpointMade(Commit(2, 4))))
    assert has(EndJob, talk.tell(CheckpointMade(Commit(2, 90))))


def test_checkpoint_of_an_earlier_world_does_not_count_as_the_last():
    talk = running(2, workers_min=1, restarts=3)
    talk.tell(announced_end("h", 20.0, alone=True))
    assert not has(EndJob, talk.tell(CheckpointMade(Commit(1, 900))))
    assert has(EndJob, talk.tell(CheckpointMade(Commit(2, 90))))


@pytest.mark.parametrize(("earlier_s", "after_s"), [(60.0, 40.0), (15.0, 0.0)])
def test_earlier_end_brings_the_last_checkpoint_forward(earlier_s, after_s):
    talk = running(2, workers_min=1, restarts=3)
    talk.tell(announced_end("h", 600.0, alone=True), CheckpointMade(Commit(2, 4)))
    actions = talk.tell(announced_end("h", earlier_s, alone=True))
    if after_s:
        assert not has(HastenCheckpoint, actions + talk.wait(after_s - 0.1))
        actions = talk.wait(0.2)
    assert has(HastenCheckpoint, actions)
    assert has(EndJob, talk.tell(CheckpointMade(Commit(2, 90))))


@pytest.mark.parametrize("notice_s", [25.0, 30.0, 40.0, 60.0])
def test_last_checkpoint_is_written_20_s_before_the_end_when_all_machines_leave(notice_s):
    talk = on_two_hosts(workers_min=2, restarts=3)
    assert has(
        HastenCheckpoint, talk.tell(announced_end("g", notice_s), announced_end("h", notice_s))
    )
    talk.tell(CheckpointMade(Commit(2, 4)))
    assert not has(HastenCheckpoint, talk.wait(notice_s - 20.1))
    assert has(HastenCheckpoint, talk.wait(0.2))


def test_driver_leaving_soon_after_the_start_trains_until_then():
    talk = MembershipConversation(np=2, workers_min=1, restarts=3)
    talk.tell(hosts(h=2))
    assert not has(KillWorker, talk.tell(announced_end("h", 50.0, alone=True)))
    talk.connect("h:0", "h:1")
    talk.ready("h:0", "h:1", running=False)
    assert has(HastenCheckpoint, talk.ready("h:0", "h:1"))
    assert not has(EndJob, talk.wait(46)) and has(EndJob, talk.wait(2))


def test_driver_whose_notice_is_withdrawn_does_not_end_the_job():
    talk = running(2, workers_min=1, restarts=3)
    talk.tell(announced_end("h", 30.0, alone=True), HostStaying("h"))
    talk.tell(CheckpointMade(Commit(2, 4)))
    assert not has(EndJob, talk.wait(100))


def test_members_are_not_scanned_after_every_event(monkeypatch):
    """Thousands of members report progress while a notice is current."""
    talk = on_two_hosts(workers_min=4, restarts=3)
    talk.tell(announced_end("g", 60.0))
    looked: list[Notices] = []
    whole = Notices._look_at_all

    def counted(self: Notices) -> None:
        looked.append(self)
        whole(self)

    monkeypatch.setattr(Notices, "_look_at_all", counted)
    for _ in range(50):
        talk.tell(paced("h:0", 2, 0.1))
    assert not looked
    talk.tell(announced_end("h", 60.0))
    assert looked


def test_successor_driver_knows_the_notices():
    talk = on_two_hosts(workers_min=4)
    talk.tell(announced_end("g", 60.0))
    talk.m = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    assert not has(PrepareChange, talk.wait(49))
    assert has(PrepareChange, talk.wait(2))
