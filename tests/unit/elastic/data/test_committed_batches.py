"""Committed samples of a loader: conversations between a training loop and its loader."""

from __future__ import annotations

from elastic.data.committed_batches import DataProgress
from elastic.data.sample_partition import Position
from elastic.errors import Invalid
from harness.golden import raises


def at(epoch: int, consumed: int) -> Position:
    return Position(epoch, consumed)


def begun(*, ahead: int = 0) -> DataProgress:
    progress = DataProgress()
    progress.ahead = ahead
    assert progress.begin(10) == at(0, 0)
    return progress


def test_batches_handed_out_count_as_committed_without_an_optimizer():
    progress = begun()
    progress.hand(4)
    assert progress.committed() == at(0, 4)
    progress.hand(8)
    assert progress.committed() == at(0, 8)


def test_batches_count_as_committed_after_an_optimizer_step():
    progress = begun()
    progress.hand(4)
    progress.stepped()
    progress.hand(8)  # a commit before the step, or half-way through an accumulation
    assert progress.committed() == at(0, 4)
    progress.stepped()
    assert progress.committed() == at(0, 8)


def test_no_batch_counts_before_the_first_optimizer_step_when_gradients_exist():
    progress = begun()
    progress.hand(4)
    assert progress.committed(before_steps=True) == at(0, 0)


def test_end_of_an_epoch_begins_the_next_epoch():
    progress = begun()
    progress.hand(4)
    progress.stepped()
    progress.hand(10)
    assert progress.committed() == at(0, 4)
    progress.finish()
    assert (progress.position, progress.committed()) == (at(1, 0), at(1, 0))
    assert progress.begin(99) == at(1, 0)  # the dataset may have grown between epochs


def test_a_commit_in_the_last_batch_is_at_the_end_of_its_epoch():
    progress = begun()
    progress.hand(10)
    progress.stepped()
    restored = DataProgress()
    restored.load_state_dict(progress.state_dict())
    # Nothing of it is left: the script counts its epoch itself.
    assert restored.begin(10) == at(0, 10)
    restored.finish()
    assert restored.position == at(1, 0)


def test_loop_that_prefetches_a_batch_commits_the_previous_one():
    progress = begun(ahead=1)
    progress.hand(4)
    progress.hand(8)
    progress.stepped()
    assert progress.committed() == at(0, 4)
    progress.hand(10)
    progress.stepped()
    assert progress.committed() == at(0, 8)
    progress.finish()  # requested a batch after the last one, which is trained on now
    progress.stepped()
    assert (progress.position, progress.committed()) == (at(1, 0), at(0, 10))
    progress.settle()
    assert progress.committed() == at(1, 0)


def test_a_dataset_that_changes_within_an_epoch_is_refused():
    progress = begun()
    progress.hand(4)
    with raises(Invalid):
        progress.begin(12)
    progress.go_to(at(1, 0))
    assert progress.begin(12) == at(1, 0)
