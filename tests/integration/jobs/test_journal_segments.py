"""Drivers that are killed while or after their journal continues in a new segment, and adopted with --resume."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.driver.events import BreakWorld, DriverRestarted, PublishWorld, StartWorker
from elastic.driver.journal.journal import read, replay
from elastic.driver.journal.segment_files import next_path, older_segments
from elastic.driver.monitoring.explain.journal_file import read_journal
from harness import wording
from harness.history import SCRIPTS, TRAINING, History
from harness.job import Job

PROGRAM = [str(SCRIPTS / "small_segments.py")]
STEPS = 400
FLAGS = "-H localhost:1,127.0.0.2:1 -np 2 --min-np 1 --resume"


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts one driver of a job after the other, in one folder."""
    started: list[Job] = []

    def start(flags: str = FLAGS, **env: str) -> Job:
        told = {"ELASTIC_DIGESTS": "1", "STEPS": str(STEPS)} | env
        command = [*map(str, TRAINING)]
        job = Job(flags, command, folder=tmp_path, env=told, forked=True, program=PROGRAM)
        started.append(job)
        return started[-1]

    yield start
    left = [process for each in reversed(started) for process in each.end()]
    assert not left, f"these processes outlived their job: {left}"
    started[-1].check_invariants()


KILLED_AT = [
    "keep_segment",
    pytest.param("after keep_segment", marks=pytest.mark.nightly),
    pytest.param("prune", marks=pytest.mark.nightly),
    pytest.param("", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("killed_at", KILLED_AT)
def test_job_of_a_driver_killed_around_a_switch_loses_no_step_and_no_worker(
    drivers, tmp_path, killed_at
):
    """Killed when the new segment is complete, has not replaced the file yet, or has replaced it, or any time later."""
    held = {"HOLD": f"{STEPS - 20}:file=go"}
    first = drivers(**held, KILLED_AT=killed_at)
    path = first.journal
    if not killed_at:
        first.until(lambda: len(older_segments(path)) >= 3, "three switches", 60)
        os.kill(first.driver.pid, signal.SIGKILL)
    assert first.driver.wait(60) == -signal.SIGKILL
    assert next_path(path).exists() is ("keep_segment" in killed_at)
    assert len(older_segments(path)) >= (1 if killed_at == "keep_segment" else 2)

    second = drivers(**held)
    second.wait_for(wording.GOES_UNCHANGED_RECONNECTED)
    (tmp_path / "go").touch()
    second.succeed()
    History(second).check(steps=STEPS)

    entries = read(path)[1]
    assert len(replay(path)) == len(entries)
    decided = [action for entry in entries for action in entry.actions]
    assert not any(isinstance(each, BreakWorld) for each in decided), "not one step failed"
    assert sum(isinstance(each, StartWorker) for each in decided) == 2
    assert [len(each.members) for each in decided if isinstance(each, PublishWorld)] == [2, 2]
    assert sum(isinstance(entry.event, DriverRestarted) for entry in entries) == 1


def test_journal_of_a_job_without_resume_is_split_and_explained(drivers):
    training = drivers("-np 2 --min-np 1", STEPS="200")
    training.succeed()
    path = training.journal
    assert len(older_segments(path)) >= 2
    reading = read_journal(path)
    assert not reading.source.from_the_middle and reading.source.left_out == 0
    assert len(replay(path)) == len(read(path)[1])
