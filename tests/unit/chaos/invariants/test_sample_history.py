"""Each sample of the committed history counts once: reports of workers, and the findings."""

from __future__ import annotations

import pytest

from elastic.chaos.invariants.invariants import BrokenInvariant
from elastic.chaos.invariants.sample_history import SampleHistory
from elastic.protocol.messages import Commit, Worker
from harness.conversation import exited, ready
from harness.golden import raises
from harness.scripted_journal import ScriptedJournal, broken, digested, training, world


def test_samples_of_the_committed_history_are_counted_once():
    """Ten samples: three workers train six, the third dies, two train the rest."""
    told = training(samples=10)
    told.lines_of(
        digested("h:0", (2, 1), samples=[0, 3]),
        digested("h:1", (2, 1), samples=[1, 4]),
        digested("h:2", (2, 1), samples=[2, 5]),
        digested("h:2", (2, 2), samples=[8]),  # undone: no worker continues from it
    )
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(ready("h:1", 2, (2, 1)))
    told.line(ready("h:0", 2, (2, 1)), world(3, "h:0", "h:1", holders=2, commit=(2, 1)))
    told.lines_of(digested("h:0", (3, 1), samples=[6, 8]), digested("h:1", (3, 1), samples=[7, 9]))
    assert told.end().samples_counted == 10


def one_epoch(*reports: tuple[str, tuple[int, int], list[int]], size: int = 2) -> ScriptedJournal:
    told = training(size, samples=5)
    return told.lines_of(*(digested(name, c, samples=each) for name, c, each in reports))


def test_last_round_may_contain_repeats():
    told = one_epoch(("h:0", (2, 1), [0, 2]), ("h:1", (2, 1), [1, 3]))
    told.lines_of(digested("h:0", (2, 2), samples=[4]), digested("h:1", (2, 2), samples=[0]))
    told.end()


@pytest.mark.parametrize(
    ("reports", "what"),
    [
        (
            [("h:0", (2, 1), [0, 2]), ("h:1", (2, 1), [1])],
            "2 samples of epoch 0 are in no commit, the first is 3",
        ),
        (
            [("h:0", (2, 1), [0, 2, 4]), ("h:1", (2, 2), [1, 3, 0, 2])],
            "sample 2 of epoch 0 counts in g2c1 and again in g2c2: repeat 2 in a world of 2",
        ),
    ],
)
def test_missing_or_repeated_sample_is_found(reports, what):
    told = one_epoch(*reports)
    with pytest.raises(BrokenInvariant, match=f"EACH SAMPLE ONCE: {what}"):
        told.end()


def a_world_of_two_after_three_samples(samples: int) -> ScriptedJournal:
    told = training(samples=samples)
    told.lines_of(*(digested(f"h:{n}", (2, 1), samples=[n]) for n in range(3)))
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(ready("h:1", 2, (2, 1)))
    return told.line(ready("h:0", 2, (2, 1)), world(3, "h:0", "h:1", holders=2, commit=(2, 1)))


def test_sample_cursor_off_by_one_is_found():
    """Three were done, and the next world begins at the third again."""
    told = a_world_of_two_after_three_samples(6)
    told.lines_of(digested("h:0", (3, 1), samples=[2]), digested("h:1", (3, 1), samples=[3]))
    told.lines_of(digested("h:0", (3, 2), samples=[4]), digested("h:1", (3, 2), samples=[5]))
    with raises(BrokenInvariant):
        told.end()


def test_unnecessary_repeat_in_the_last_round_is_found():
    told = a_world_of_two_after_three_samples(5)
    told.lines_of(digested("h:0", (3, 1), samples=[3]), digested("h:1", (3, 1), samples=[4, 0]))
    with raises(BrokenInvariant):
        told.end()


def test_missing_last_report_of_a_dead_worker_is_accepted():
    told = training(samples=6)
    told.lines_of(digested("h:0", (2, 1), samples=[0, 3]), digested("h:1", (2, 1), samples=[1, 4]))
    told.line(exited("h:2"), broken(2, "h:0", "h:1"))
    told.line(ready("h:1", 2, (2, 1)))
    told.line(ready("h:0", 2, (2, 1)), world(3, "h:0", "h:1", holders=2, commit=(2, 1)))
    told.end()


def test_samples_are_counted_again_in_the_next_epoch():
    told = training(2, samples=2)
    for epoch in range(3):
        told.lines_of(
            digested("h:0", (2, epoch), samples=[0], epoch=epoch),
            digested("h:1", (2, epoch), samples=[1], epoch=epoch),
        )
    assert told.end().samples_counted == 6


def test_commit_may_end_an_epoch_and_begin_the_next():
    told = training(2, samples=2)
    for name, sample in (("h:0", 0), ("h:1", 1)):
        told.line(digested(name, (2, 1), samples=[sample]))
        told.line(digested(name, (2, 1), samples=[1 - sample], epoch=1))
    assert told.end().samples_counted == 4
    told = training(2).line(digested("h:0", (2, 1), samples=[0]))
    told.breaks("EACH SAMPLE ONCE", digested("h:0", (2, 1), samples=[0]))


def test_a_resume_from_a_checkpoint_undoes_the_starts_of_later_worlds():
    history, worker, durable = SampleHistory(4), Worker("h", 0), Commit(1, 1)
    story = [(1, None, 0), (2, durable, 1), (3, Commit(2, 1), 2), (4, Commit(3, 1), 3)]
    again = [(5, durable, 1), (6, Commit(5, 1), 2), (7, Commit(6, 1), 3)]
    for generation, begins, sample in [*story, *again]:
        assert history.began(generation, 1, begins, back_to=1) == ""
        assert history.reported(worker, Commit(generation, 1), 0, [sample]) == ""
    assert history.finish(complete=True) == ""
    assert history.counted == 4


def test_checkpoint_unreported_before_the_restart_keeps_its_samples():
    """Its writer died between the manifest and the report; a world that fails while it loads follows."""
    history, worker, known = SampleHistory(3), Worker("h", 0), Commit(2, 1)
    assert history.began(2, 1, None, back_to=0) == ""
    for number, sample in enumerate((0, 1, 2), 1):
        assert history.reported(worker, Commit(2, number), 0, [sample]) == ""
    assert history.began(3, 1, known, back_to=2) == ""
    assert history.began(4, 1, known, back_to=2) == ""
    history.restored(Commit(2, 2))
    assert history.reported(worker, Commit(4, 1), 0, [2]) == ""
    assert history.finish(complete=True) == ""
    assert history.counted == 3


def test_a_checkpoint_of_a_later_world_keeps_the_samples_of_both():
    history, worker = SampleHistory(4), Worker("h", 0)
    assert history.began(2, 1, None, back_to=0) == ""
    for number, sample in enumerate((0, 1), 1):
        assert history.reported(worker, Commit(2, number), 0, [sample]) == ""
    assert history.began(3, 1, Commit(2, 2), back_to=2) == ""
    assert history.reported(worker, Commit(3, 1), 0, [2]) == ""
    assert history.began(4, 1, Commit(2, 1), back_to=2) == ""
    history.restored(Commit(3, 1))
    assert history.reported(worker, Commit(4, 1), 0, [3]) == ""
    assert history.finish(complete=True) == ""
    assert history.counted == 4
