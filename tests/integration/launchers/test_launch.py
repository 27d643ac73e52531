"""`elastic.launch` and `horovod.run`: a function on many workers, its values by rank, its failures as exceptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from harness.history import SCRIPTS


def launched(what: str, **variables: str) -> tuple[Any, str]:
    """The result as the launching process prints it, and all that it has printed."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "launching.py", what],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return json.loads(line.removeprefix("result ")), done.stdout


def test_values_come_back_by_rank():
    result, _ = launched("results")
    assert result == [["hello!", rank, 3] for rank in range(3)]


def test_values_of_a_function_that_never_calls_init():
    result, _ = launched("large")
    assert result == [5_000_000, 5_000_000]


@pytest.mark.nightly  # the elastic function below is called by it too
def test_horovod_run():
    result, printed = launched("horovod", HOROVOD_LOG_LEVEL="ERROR")
    assert result == [["hello!", rank, 2] for rank in range(2)]
    assert "elastic |" not in printed, "the driver's lines are of lower levels"


def test_an_exception_in_the_function_is_a_failed_job():
    """The message says who failed and how; the traceback has been printed by then."""
    result, printed = launched("failure")
    assert "rank 1 (localhost:1#1 on localhost)" in result
    assert "exit code 1" in result
    assert "ValueError: this sample is damaged" in result
    assert "ValueError: this sample is damaged" in printed.partition("result ")[0]


def test_an_elastic_function_survives_a_kill_of_rank_0():
    """Called by horovod.run."""
    result, _ = launched("elastic")
    assert [(step, size) for step, size, _ in result] == [(10, 2), (10, 2)]
    for _, _, seen in result:
        assert sorted(set(seen)) == list(range(1, 11))


def test_bad_arguments_are_refused_before_anything_starts():
    (too_few, no_number, missing), printed = launched("bad arguments")
    assert too_few.startswith("Invalid: ") and "min" in too_few
    assert no_number.startswith("Invalid: ") and "localhost:many" in no_number
    assert "/nowhere/python" in missing
    assert "hello" not in printed.partition("result ")[0]


def test_launch_from_inside_an_event_loop():
    """As in a notebook."""
    result, _ = launched("loop")
    assert result == [["hello", 0, 1]]
