"""Log lines about checkpoints: few while checkpoints are frequent, and always one for the last."""

from __future__ import annotations

import pytest

from elastic.driver.events import CheckpointMade, Event, WorkerSpent
from elastic.driver.job.checkpoint_log_lines import MADE_S, CheckpointLines, kept_line
from elastic.driver.job.checkpoint_shares import CheckpointCompleted, CheckpointFailed
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.settings import StartCheckpoint
from elastic.protocol.messages import Commit, Times, Worker
from harness.golden import recorded


class Spoken:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[str, str]] = []
        self.about = CheckpointLines(lambda: self.now, lambda *line: self.lines.append(line))

    def made(self, number: int) -> None:
        self.about.made(CheckpointCompleted(Commit(2, number), f"/shared/{number}", 400_000, 0.1))

    def info(self) -> list[str]:
        return [text.partition(":")[0] for level, text in self.lines if level == "info"]


def test_last_checkpoint_is_logged_at_the_end() -> None:
    job = Spoken()
    job.made(20)
    job.made(40)
    job.made(60)
    job.now += 12.4  # the storage accepts no more
    recorded("messages", job.info())
    job.about.ended()
    recorded("messages", job.info())


def test_logged_checkpoint_is_not_logged_again() -> None:
    job = Spoken()
    job.made(20)
    job.now += MADE_S + 1
    job.made(40)
    job.about.ended()
    recorded("messages", job.info())


def test_checkpoints_when_an_hour_passes_then_one_each_ten_minutes_is_logged() -> None:
    job = Spoken()
    for number in range(120):
        job.made(number)
        job.now += 30.0
    assert len(job.info()) == 6
    assert len([text for _, text in job.lines if "MB" in text]) == 120, "--verbose shows each"


def test_checkpoint_when_following_a_logged_failure_then_is_logged() -> None:
    job = Spoken()
    job.made(20)
    job.now += 31.0
    job.about.failed(CheckpointFailed(1, A, "disk full", unusual=False))
    job.made(40)
    assert len(job.info()) == 1, "only problems that were logged count"
    job.about.failed(CheckpointFailed(1, A, "disk full", unusual=True))
    job.made(60)
    job.made(80)
    assert len(job.info()) == 2
    assert [level for level, _ in job.lines].count("warning") == 1


def test_checkpoint_after_the_end_is_logged() -> None:
    job = Spoken()
    job.made(20)
    job.about.ended()
    job.made(40)
    recorded("messages", job.info())


A = Worker("h", 0)
BEGINS = StartCheckpoint("r0001-g0002-c00000300", "/shared/bert", 300)


def reported(generation: int, number: int) -> WorkerSpent:
    return WorkerSpent(A, generation, Times(), "training", Commit(generation, number))


def view_of(*events: Event) -> JobView:
    view = JobView()
    for event in events:
        view.note(event, [], 1.0)
    return view


@pytest.mark.parametrize(
    ("events", "unsaved"),
    [
        ([], 0),
        ([reported(2, 7)], 7),
        ([reported(2, 7), CheckpointMade(Commit(2, 5))], 2),
        ([reported(2, 7), CheckpointMade(Commit(2, 7))], 0),
        ([CheckpointMade(Commit(2, 9)), reported(2, 7)], 0),  # the report was late
        ([reported(2, 7), CheckpointMade(Commit(2, 5)), reported(3, 4)], 6),
        ([reported(2, 7), reported(3, 4), CheckpointMade(Commit(3, 1))], 3),
    ],
)
def test_commits_when_newer_than_the_last_checkpoint_then_are_unsaved(events, unsaved):
    assert view_of(*events).unsaved == unsaved


@pytest.mark.parametrize(
    ("made", "begins", "writes"),
    [
        (5, BEGINS, True),
        (7, None, True),
        (None, BEGINS, True),
        (None, None, True),
        (None, None, False),
    ],
)
def test_job_when_stopped_then_the_last_line_names_the_kept_checkpoint(made, begins, writes):
    view = view_of(reported(2, 7), *([CheckpointMade(Commit(2, made))] if made else []))
    line = kept_line(view, writes=writes, begins=begins, adopted=False)
    recorded("log", line)


@pytest.mark.parametrize("events", [[], [reported(1, 0)]])
def test_job_when_no_commit_was_made_then_has_no_line_about_kept_or_lost_commits(events):
    assert kept_line(view_of(*events), writes=True, begins=None, adopted=False) is None


@pytest.mark.parametrize(("made", "known"), [([], False), ([CheckpointMade(Commit(2, 5))], True)])
def test_driver_when_earlier_checkpoints_are_unknown_then_reports_none(made, known):
    view = view_of(reported(2, 7), *made)
    line = kept_line(view, writes=True, begins=None, adopted=True)
    assert (line is not None) is known
