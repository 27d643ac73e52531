"""`elastic.launch` and `horovod.run`: a function on many workers, its values by rank, its failures as exceptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.forking import SPARE_WORKERS
from harness.history import SCRIPTS
from harness.job import MARK
from harness.processes import clean_environment
from harness.program import Program

WORKERS = 3  # at most, in one job
Launched = Callable[..., tuple[Any, str]]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    """The result as the launching process prints it, and all that it has printed. Nothing is left of it."""
    programs: list[Program] = []

    def launch(what: str, **variables: str) -> tuple[Any, str]:
        programs.append(
            Program(
                [str(SCRIPTS / "launching.py"), what],
                folder=tmp_path,
                env={**clean_environment(), SPARE_WORKERS: str(WORKERS), **variables},
                mark=MARK,
                forked=True,
            )
        )
        printed = programs[-1].succeed(100)
        [line] = [line for line in printed.splitlines() if line.startswith("result ")]
        return json.loads(line.removeprefix("result ")), printed

    yield launch
    left = [process for each in programs for process in each.end()]
    assert not left, f"these processes outlived their job: {left}"


def test_values_are_returned_by_rank(launched: Launched):
    result, _ = launched("results")
    assert result == [["hello!", rank, 3] for rank in range(3)]


def test_function_that_never_calls_init_returns_its_values(launched: Launched):
    result, _ = launched("large")
    assert result == [5_000_000, 5_000_000]


@pytest.mark.nightly  # the elastic function below is called by it too
def test_horovod_run_returns_values_of_all_ranks(launched: Launched):
    result, printed = launched("horovod", HOROVOD_LOG_LEVEL="ERROR")
    assert result == [["hello!", rank, 2] for rank in range(2)]
    assert "elastic |" not in printed, "the driver's lines are of lower levels"


def test_an_exception_in_the_function_is_a_failed_job(launched: Launched):
    """The message has the worker and the error; the traceback has been printed by then."""
    result, printed = launched("failure")
    assert "rank 1 (localhost:1#1 on localhost)" in result
    assert "exit code 1" in result
    assert "ValueError: this sample is damaged" in result
    assert "ValueError: this sample is damaged" in printed.partition("result ")[0]


def test_an_elastic_function_survives_a_kill_of_rank_0(launched: Launched):
    """Called by horovod.run."""
    result, _ = launched("elastic")
    assert [(step, size) for step, size, _ in result] == [(10, 2), (10, 2)]
    for _, _, seen in result:
        assert sorted(set(seen)) == list(range(1, 11))


def test_bad_arguments_are_refused_before_any_worker_starts(launched: Launched):
    (too_few, no_number, missing), printed = launched("bad arguments")
    assert too_few.startswith("Invalid: ") and "min" in too_few
    assert no_number.startswith("Invalid: ") and "localhost:many" in no_number
    assert "/nowhere/python" in missing
    assert "hello" not in printed.partition("result ")[0]


def test_launch_works_inside_an_event_loop(launched: Launched):
    """As in a notebook."""
    result, _ = launched("loop")
    assert result == [["hello", 0, 1]]
