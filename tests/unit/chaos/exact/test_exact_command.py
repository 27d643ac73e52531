"""`python -m elastic.chaos exact`: errors before the job is run under faults."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import create_autospec

import pytest

from elastic.chaos.__main__ import main
from elastic.chaos.exact import command
from elastic.chaos.harness.journal_tail import JobProgress, JournalTail
from elastic.chaos.inject.faulty_job import FaultyJob, Job, under_fire
from elastic.chaos.inject.plan import Injected, Plan
from elastic.driver.events import EndJob, Event, TimePassed, WorkerDigested
from elastic.driver.journal.file_journal import FileJournal
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import Settings
from elastic.protocol.messages import Commit, Worker
from harness.golden import recorded

JOB = ["--", "elasticrun", "-np", "2", "--min-np", "1", "true"]
Runs = Callable[..., list[Plan]]


def told(worker: int, step: int, value: int) -> WorkerDigested:
    commit = Commit(1, abs(step))
    return WorkerDigested(Worker("h", worker, 1), 1, commit, 9, step=step, tensors={"a": value})


@pytest.fixture
def runs(monkeypatch, tmp_path) -> Runs:
    """``runs(events, faults=True, then=None)``: every run of the job tells these, or the second one ``then``, and ends
    by itself. Returns the plans that it was run under.
    """
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def as_told(
        events: list[Event], faults: bool = True, then: list[Event] | None = None
    ) -> list[Plan]:
        plans: list[Plan] = []

        def run(job: Job, plan: Plan, **how) -> FaultyJob:
            plans.append(plan)
            journal = FileJournal.begin(job.journal, job.settings)
            for event in then if then is not None and len(plans) == 2 else events:
                journal.record(0.0, event, [])
            journal.record(1.0, TimePassed(), [EndJob(0, as_sentence("done"))])
            how["each_turn"](JournalTail(job.journal, JobProgress()).look(), 1, 0.0)
            kill = Injected(1, "kill", Worker("h", 0, 1), 0, 2, 0.0, "kill")
            return FaultyJob(job, 0, [kill] if plan.chance is not None and faults else [], 0)

        monkeypatch.setattr(command, "under_fire", create_autospec(under_fire, side_effect=run))
        return plans

    return as_told


def test_a_job_without_shards_is_ended_at_its_first_commit(runs, capsys):
    plans = runs([told(0, -1, 5)])
    assert main(["exact", *JOB]) == 2
    recorded("output", capsys.readouterr().err)
    assert plans == [Plan()]


def test_journal_flag_of_the_job_is_refused_and_of_the_script_accepted(runs, capsys, tmp_path):
    runs([told(0, 1, 5)])
    *words, script = JOB
    assert main(["exact", *words, f"--journal={tmp_path}/x", script]) == 2
    assert "--journal" in capsys.readouterr().err
    assert main(["exact", *JOB, "--journal", "x"]) == 0


def test_checkpoint_folder_is_refused_since_the_second_run_would_resume(runs, capsys, tmp_path):
    plans = runs([told(0, 1, 5)])
    *words, script = JOB
    assert main(["exact", *words, "--checkpoint-dir", str(tmp_path), script]) == 2
    recorded("output", capsys.readouterr().err)
    assert plans == []


def test_workers_that_do_not_agree_undisturbed_are_named_before_any_fault(runs, capsys):
    plans = runs([told(0, 1, 5), told(1, 1, 5), told(0, 2, 6), told(1, 2, 7)])
    assert main(["exact", *JOB]) == 1
    said = capsys.readouterr().out
    recorded("log", said)
    assert plans == [Plan()]


def test_equal_runs_are_repeated_with_faults(runs, capsys):
    plans = runs([told(0, 0, 4), told(0, 1, 5), told(1, 1, 5)])
    assert main(["exact", *JOB]) == 0
    said = capsys.readouterr().out
    recorded("log", said)
    assert [plan.chance is not None for plan in plans] == [False, True]


def test_equal_runs_without_a_fault_are_inconclusive(runs, capsys):
    runs([told(0, 1, 5)], faults=False)
    assert main(["exact", "--mean-time-between-faults", "9", *JOB]) == 2
    recorded("output", capsys.readouterr().out)


def test_runs_without_common_steps_are_not_reported_as_equal(runs, capsys):
    runs([told(0, 2, 5), told(0, 4, 6)], then=[told(0, 1, 9), told(0, 3, 8)])
    assert main(["exact", *JOB]) == 2
    recorded("output", capsys.readouterr().out)


@pytest.mark.parametrize("last", [1, 3])
def test_run_that_ends_after_another_step_differs(runs, capsys, last):
    """Equal as far as both went: the rest of an epoch was lost or repeated after a restore."""
    runs(
        [told(0, step, step) for step in (1, 2)],
        then=[told(0, step, step) for step in range(1, last + 1)],
    )
    assert main(["exact", *JOB]) == 1
    said = capsys.readouterr().out
    recorded("log", said, last)


def test_commits_of_only_one_run_are_counted(runs, capsys):
    runs(
        [told(0, step, step) for step in (2, 4, 6)],
        then=[told(0, 2, 2), told(0, 3, 3), told(0, 6, 6)],
    )
    assert main(["exact", *JOB]) == 0
    said = capsys.readouterr().out
    recorded("log", said)


def test_earlier_undisturbed_run_need_not_have_ended(runs, capsys, tmp_path):
    before = tmp_path / "before.jsonl"
    journal = FileJournal.begin(before, Settings(np=1, workers_min=1, workers_max=1, elastic=True))
    journal.record(0.0, told(0, 1, 1), [])
    journal.record(1.0, TimePassed(), [EndJob(143, as_sentence("stopped"))])
    runs([told(0, 1, 1), told(0, 2, 2)])
    assert main(["exact", "--undisturbed", str(before), *JOB]) == 0
    recorded("output", capsys.readouterr().out)
