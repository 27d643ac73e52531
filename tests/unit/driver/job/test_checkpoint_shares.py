"""Shares of a checkpoint: all ranks write one, rank 0 completes the checkpoint, and one failure cancels it for all."""

from __future__ import annotations

from elastic.driver.job.checkpoint_shares import (
    CheckpointCompleted,
    CheckpointFailed,
    CheckpointShares,
    ReplicaCorrupted,
    ReplicasCorrupted,
    ReplicasDiffer,
    SendToRanks,
)
from elastic.protocol.messages import (
    CheckpointDone,
    CheckpointDue,
    CheckpointWritten,
    Commit,
    DropCheckpoint,
    Leaving,
    MakeDurable,
    NotFinite,
    SealCheckpoint,
    ShareDropped,
    ShareWritten,
    Worker,
)

A, B, C = Worker("h1", 0), Worker("h2", 0), Worker("h3", 0)
DROP = DropCheckpoint(3, 40)


def wrote(model: int = 1, optimizer: int = 2) -> ShareWritten:
    return ShareWritten(3, 40, Commit(3, 41), {"model": model, "optimizer": optimizer})


def three(*, equal_before: bool = True) -> CheckpointShares:
    shares = CheckpointShares()
    shares.world(2, [A, B, C])
    if equal_before:
        for worker in (A, B, C):
            shares.handle(worker, ShareWritten(2, 9, Commit(2, 9), {"model": 5}))
    shares.world(3, [A, B, C])
    return shares


def two() -> CheckpointShares:
    shares = CheckpointShares()
    shares.world(3, [A, B])
    return shares


def test_checkpoint_is_completed_when_all_ranks_have_written():
    shares = two()
    assert shares.handle(A, CheckpointDue(3, 40)) == [SendToRanks([A, B], MakeDurable(3, 40))]
    assert shares.handle(B, wrote()) == []
    assert shares.handle(A, wrote()) == [SendToRanks([A], SealCheckpoint(3, 40))]
    made = CheckpointWritten(3, 40, Commit(3, 41), "/c/r1", 100, 0.5)
    assert shares.handle(A, made) == [
        SendToRanks([A, B], CheckpointDone(3, 40, Commit(3, 41))),
        CheckpointCompleted(Commit(3, 41), "/c/r1", 100, 0.5),
    ]


def test_failed_share_cancels_the_checkpoint_once_for_all():
    shares = two()
    shares.handle(A, wrote())
    off = [SendToRanks([A, B], DropCheckpoint(3, 40)), CheckpointFailed(40, B, "full", True)]
    assert shares.handle(B, ShareDropped(3, 40, "full")) == off
    again = [SendToRanks([A], DropCheckpoint(3, 40))]
    assert shares.handle(A, ShareDropped(3, 40, "late", True)) == again
    assert shares.handle(A, wrote()) == again


def test_checkpoint_requested_while_a_rank_is_busy_is_requested_again():
    shares = two()
    off = DropCheckpoint(3, 40, again=True)
    failed = CheckpointFailed(40, B, "busy", False)
    assert shares.handle(B, ShareDropped(3, 40, "busy", True)) == [SendToRanks([A, B], off), failed]
    assert shares.handle(A, wrote()) == [SendToRanks([A], off)]


def test_repeated_report_is_answered_again_or_waits():
    shares = two()
    shares.handle(B, wrote())
    assert shares.handle(B, wrote()) == [SendToRanks([A], MakeDurable(3, 40))]
    shares.handle(A, wrote())
    shares.handle(A, CheckpointWritten(3, 40, Commit(3, 41), "/c/r1", 100, 0.5))
    assert shares.handle(B, wrote()) == [SendToRanks([B], CheckpointDone(3, 40, Commit(3, 41)))]


def test_only_complete_checkpoints_of_an_older_world_count():
    shares = two()
    shares.handle(A, wrote())
    shares.world(4, [B, A])
    assert shares.handle(B, wrote()) == []
    assert shares.handle(A, CheckpointDue(3, 50)) == []
    made = CheckpointWritten(3, 40, Commit(3, 41), "/c/r1", 100, 0.5)
    assert shares.handle(A, made) == [CheckpointCompleted(Commit(3, 41), "/c/r1", 100, 0.5)]
    assert shares.handle(Worker("h9", 0), CheckpointDue(4, 1)) == []
    assert shares.handle(A, Leaving("SIGTERM")) is None


def test_differing_replica_is_named_and_the_checkpoint_is_not_made():
    shares = three()
    shares.handle(A, wrote())
    shares.handle(B, wrote(optimizer=8))
    assert shares.handle(C, wrote()) == [
        SendToRanks([A, B, C], DROP),
        ReplicaCorrupted(B, 3, Commit(3, 41), ["optimizer"], 2),
    ]


def test_rank_0_can_be_the_corrupted_replica():
    shares = three()
    shares.handle(A, wrote(model=8))
    shares.handle(B, wrote())
    assert ReplicaCorrupted(A, 3, Commit(3, 41), ["model"], 2) in (shares.handle(C, wrote()) or [])


def test_two_differing_replicas_blame_no_rank():
    shares = three()
    shares.world(3, [A, B])
    shares.handle(A, wrote())
    assert shares.handle(B, wrote(model=8)) == [
        SendToRanks([A, B], DROP),
        ReplicasDiffer(Commit(3, 41), [[A], [B]], ["model"], True),
    ]


def test_replicas_that_never_were_equal_are_not_corrupted():
    """Parameters that are not reduced differ between ranks from the first step on, so no rank is killed for that."""
    shares = three(equal_before=False)
    shares.handle(A, wrote())
    shares.handle(B, wrote(model=8))
    assert shares.handle(C, wrote()) == [
        SendToRanks([A, B, C], DROP),
        ReplicasDiffer(Commit(3, 41), [[A, C], [B]], ["model"], False),
    ]


def observed(digest: int | None = 5, number: int = 41) -> NotFinite:
    return NotFinite(3, Commit(3, number), digest)


def test_corruption_spread_by_gradients_leaves_no_replica_as_source():
    shares = three()
    shares.handle(A, observed())
    shares.handle(B, observed(9))
    assert shares.handle(C, observed()) == [ReplicasCorrupted(3, Commit(3, 41), [B], 2)]
    assert shares.handle(C, observed()) == [], "once is enough"


def test_two_corrupted_replicas_blame_no_rank_and_are_no_source():
    shares = three()
    shares.world(3, [A, B])
    shares.handle(A, observed())
    assert shares.handle(B, observed(9)) == [ReplicasCorrupted(3, Commit(3, 41), [], 1)]


def test_batch_with_nan_gradients_everywhere_is_no_corruption():
    """Nor if another part of a replica differs and the gradients resulted from it."""
    shares = three()
    assert [shares.handle(worker, observed()) for worker in (A, B, C)] == [[]] * 3
    for worker in (A, B):
        shares.handle(worker, wrote())
    assert ReplicaCorrupted(C, 3, Commit(3, 41), ["model"], 2) in (
        shares.handle(C, wrote(model=8)) or []
    )


def test_rank_that_missed_the_beginning_is_neither_blamed_nor_a_witness():
    shares = three()
    shares.handle(A, observed())
    shares.handle(B, observed(None, 42))
    assert shares.handle(C, observed()) == []
    assert shares.handle(C, observed(9)) == [ReplicasCorrupted(3, Commit(3, 41), [], 1)]


def test_observations_before_different_commits_are_not_compared():
    """Gradients were finite in between, and two ranks have already reported that."""
    shares = three()
    for worker, digest in ((A, 5), (B, 5), (C, 5)):
        shares.handle(worker, observed(digest))
    assert shares.handle(A, observed(6, 44)) == shares.handle(B, observed(6, 44)) == []
    assert shares.handle(C, observed(7, 44)) == [ReplicasCorrupted(3, Commit(3, 44), [C], 2)]


def test_replicas_that_never_were_equal_are_not_reported_as_corrupted_by_a_gradient():
    shares = three(equal_before=False)
    assert [shares.handle(worker, observed(n)) for n, worker in enumerate((A, B, C))] == [[]] * 3


def test_checkpoint_reported_again_after_a_newer_one_is_answered_without_an_effect():
    """Rank 0 of the previous world got no answer."""
    shares = CheckpointShares()
    shares.world(2, [A, B])
    before = CheckpointWritten(2, 9, Commit(2, 9), "/c/r1", 100, 0.5)
    assert [type(each) for each in shares.handle(A, before) or []] == [
        SendToRanks,
        CheckpointCompleted,
    ]
    shares.world(3, [A, B])
    made = CheckpointWritten(3, 40, Commit(3, 41), "/c/r2", 100, 0.5)
    assert [type(each) for each in shares.handle(A, made) or []] == [
        SendToRanks,
        CheckpointCompleted,
    ]
    assert shares.handle(A, before) == []
    assert [type(each) for each in shares.handle(A, made) or []] == [SendToRanks]
