"""Commits with gradients of a worker that was found to be wrong: the next world begins with an older one."""

from __future__ import annotations

import pytest

from elastic.driver.events import PublishWorld, Report, ReportRecovery, WorkerMiscomputed
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.reasons import ReasonKind
from elastic.protocol.messages import Commit
from harness.conversation import MembershipConversation, exited, on_two_hosts, ready, the, worker

SOUND = ("a:0", "a:1", "b:1")


def outvoted(talk: MembershipConversation, rank: int = 2, *, complete: bool = False) -> None:
    """All others report ``rank``, which is killed."""
    culprit = talk.m.members[rank]
    told = WorkerMiscomputed(
        worker("a:0"),
        talk.m.generation,
        rank=rank,
        step=90,
        shard=5,
        digest="00ff",
        right="00fe",
        witnesses=[0, 1],
        agreed=9,
        complete=complete,
    )
    talk.tell(told, exited(str(culprit), -9))


def again(talk: MembershipConversation, held: dict[str, tuple]) -> list:
    """Workers are ready with their newest commit and older ones."""
    now = talk.m.generation
    return talk.tell(
        *(ready(name, now, commit, kept=kept) for name, (commit, *kept) in held.items())
    )


def doubts(actions: list) -> list[tuple[ReasonKind, dict]]:
    found = [each.about for each in actions if isinstance(each, Report) and each.about is not None]
    kinds = (ReasonKind.WENT_BACK, ReasonKind.NOT_WENT_BACK)
    return [(each.kind, each.facts) for each in found if each.kind in kinds]


def test_world_when_a_worker_was_wrong_then_begins_with_the_commit_from_before_its_first_step():
    talk = on_two_hosts()
    outvoted(talk)
    actions = again(talk, dict.fromkeys(SOUND, ((2, 70), (2, 0), (2, 40))))
    world = the(PublishWorld, actions)
    assert (world.commit, world.holders) == (Commit(2, 0), 3)
    ((kind, facts),) = doubts(actions)
    assert kind is ReasonKind.WENT_BACK and facts["whole"] and facts["step"] == 20
    assert facts["worker"] == "b:0#1"
    recovered = the(ReportRecovery, talk.resume())
    assert recovered.back_to == 20


def test_world_when_no_copy_is_old_enough_then_begins_with_the_oldest_one_and_reports_this():
    talk = on_two_hosts()
    outvoted(talk)
    held = dict.fromkeys(SOUND, ((2, 70), (2, 20), (2, 40)))
    actions = again(talk, {**held, "a:1": ((2, 70), (2, 40))})
    world = the(PublishWorld, actions)
    assert (world.commit, world.holders) == (Commit(2, 20), 2)
    assert [str(m.worker) for m in world.members] == ["a:0#1", "b:1#1", "a:1#1"]
    ((kind, facts),) = doubts(actions)
    assert kind is ReasonKind.WENT_BACK and not facts["whole"]


def test_world_when_no_older_copy_exists_then_begins_with_the_newest_commit_and_reports_this():
    talk = on_two_hosts()
    outvoted(talk)
    actions = again(talk, dict.fromkeys(SOUND, ((2, 70),)))
    assert the(PublishWorld, actions).commit == Commit(2, 70)
    assert [kind for kind, _ in doubts(actions)] == [ReasonKind.NOT_WENT_BACK]


def test_world_when_all_gradients_were_compared_then_begins_with_the_newest_commit():
    talk = on_two_hosts()
    outvoted(talk, complete=True)
    actions = again(talk, dict.fromkeys(SOUND, ((2, 70), (2, 0))))
    assert the(PublishWorld, actions).commit == Commit(2, 70) and not doubts(actions)


def test_world_when_the_wrong_worker_joined_later_then_steps_before_that_are_kept():
    talk = on_two_hosts()
    talk.tell(exited("b:0", -9))
    talk.ready(*SOUND, commit=(2, 30))
    talk.resume()
    talk.wait(1.1)
    talk.join("b:0#2")
    talk.wait(60.0)
    talk.stop_all(4)
    talk.ready("b:0#2", generation=0)
    generation = talk.m.generation
    assert "b:0#2" in talk.members and generation == 4
    talk.resume()
    outvoted(talk, talk.members.index("b:0#2"))
    actions = again(talk, dict.fromkeys(SOUND, ((4, 70), (2, 10), (3, 4))))
    assert the(PublishWorld, actions).commit == Commit(3, 4)
    assert doubts(actions)[0][1]["whole"]


def test_world_after_a_break_before_all_restored_the_older_commit_begins_with_that_commit():
    talk = on_two_hosts()
    outvoted(talk)
    again(talk, dict.fromkeys(SOUND, ((2, 70), (2, 0), (2, 40))))
    snapshot = take_snapshot(talk.m)
    assert restore_snapshot(snapshot, talk.m.settings).worlds.spoilt == talk.m.worlds.spoilt
    talk.tell(exited("a:0", -9))
    # One has restored it, the other has not received the world's members in time.
    actions = again(talk, {"a:1": ((2, 0), (2, 0)), "b:1": ((2, 70), (2, 0))})
    world = the(PublishWorld, actions)
    assert (world.commit, world.holders) == (Commit(2, 0), 2)


def test_world_when_the_repeated_steps_are_committed_then_begins_with_the_newest_commit():
    talk = on_two_hosts()
    outvoted(talk)
    again(talk, dict.fromkeys(SOUND, ((2, 70), (2, 0), (2, 40))))
    talk.resume()
    talk.tell(exited("a:0", -9))
    actions = again(talk, dict.fromkeys(("a:1", "b:1"), ((3, 5), (2, 0))))
    assert the(PublishWorld, actions).commit == Commit(3, 5) and not doubts(actions)


@pytest.mark.parametrize("durable", [False, True])
def test_world_that_begins_with_an_older_commit_replaces_newer_checkpoints(durable):
    talk = on_two_hosts(durable=durable)
    outvoted(talk)
    actions = again(talk, dict.fromkeys(SOUND, ((2, 70), (2, 0))))
    assert the(PublishWorld, actions).checkpoint is durable
