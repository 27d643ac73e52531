"""`horovod.spark.run` and `run_elastic` on a real Spark: in the process of its driver, and on executors."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.history import SCRIPTS
from harness.job import MARK
from harness.processes import clean_environment
from harness.program import Program

pytestmark = [pytest.mark.spark, pytest.mark.nightly, pytest.mark.timeout(420)]

EXECUTORS = "local-cluster[3,1,1024]"
LONG_S = 200.0  # JVMs start slowly on a busy machine
Started = Callable[..., Program]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Starts the script; it leaves no process."""
    programs: list[Program] = []

    def start(*words: str) -> Program:
        script = [sys.executable, str(SCRIPTS / "spark_jobs.py"), *words]
        folder = tmp_path / str(len(programs))
        folder.mkdir()
        environ = {**clean_environment(), "SPARK_LOCAL_DIRS": str(folder)}
        programs.append(Program(script, folder=folder, env=environ, mark=MARK))
        return programs[-1]

    yield start
    left = [process for each in programs for process in each.end()]
    assert not left, f"these processes outlived their application: {left}"


def said(program: Program) -> dict[str, Any]:
    found = {}
    for line in program.lines:
        if shown := re.fullmatch(r"([a-z ]+) (\[.*\])", line.strip()):
            found[shown[1]] = json.loads(shown[2])
    return found


def test_jobs_run_from_the_process_of_the_spark_driver(started: Started):
    program = started("local[2]", "local")
    program.succeed(LONG_S)
    found = said(program)
    assert found["results"] == [[10, 2, 0, 2, 2.0], [11, 2, 1, 2, 2.0]]
    assert found["elastic"] == [["0", "0", "1"], ["1", "0", "1"]]
    kind, text = found["raised"]
    assert kind == "JobFailed"
    assert "KeyError" in text
    for what in ("slots", "elastic slots", "pickled"):
        assert found[what][0] == "Invalid"
    assert "rows 10" in program.lines


def step(program: Program, after: int = 0) -> re.Match[str]:
    """Return the first step after this one."""
    expression = re.compile(r"step (\d+) of (\d+) at ([\d.]+)")

    def first() -> re.Match[str] | None:
        found = filter(None, map(expression.search, program.lines))
        return next((each for each in found if int(each[1]) > after), None)

    return program.until(first, f"a step after {after}", LONG_S)


def last(program: Program) -> int:
    found = re.findall(r"step (\d+) of", program.output)
    return int(found[-1]) if found else 0


def executor(program: Program, number: int) -> psutil.Process:
    """Return the JVM of an executor."""
    for process in program.processes():
        words = process.cmdline()
        if "--executor-id" in words and words[words.index("--executor-id") + 1] == str(number):
            return process
    raise AssertionError(f"executor {number} is missing")


def test_killed_executor_costs_less_than_a_second_and_is_replaced(started: Started):
    program = started(EXECUTORS, "steps", "1500")
    program.wait_for(r"step \d+ of 3", LONG_S)
    before = last(program)
    at = time.time()
    os.kill(executor(program, 1).pid, signal.SIGKILL)
    two = program.wait_for(r"step (\d+) of 2 at ([\d.]+)", LONG_S)
    took_s = float(two[2]) - at
    assert int(two[1]) <= before + 20, "steps are repeated or skipped"
    assert took_s < 1.0, program.output
    print(f"next step {took_s:.2f} s after the kill")
    program.until(lambda: re.search(r"of 3", program.lines[-1]), "a new executor", LONG_S)
    program.succeed(LONG_S)
    assert said(program)["results"] == [[rank, 3] for rank in range(3)]


def test_decommissioned_executor_leaves_at_a_commit(started: Started):
    program = started(EXECUTORS, "decommissioned", "400")
    program.wait_for(r"step \d+ of 2", LONG_S)
    program.succeed(LONG_S)
    assert said(program)["decommissioned"] == [True]
    steps = [int(number) for number in re.findall(r"step (\d+) of", program.output)]
    assert steps == [*range(1, 401)], "steps are repeated or skipped"


def test_dynamic_allocation_adds_hosts_while_the_job_trains(started: Started):
    program = started(EXECUTORS, "growing", "100000")
    first = step(program)
    assert first[2] == "1"
    grown = program.wait_for(r"step (\d+) of 3", LONG_S)
    assert int(grown[1]) > int(first[1])
    program.process.send_signal(signal.SIGINT)
    assert program.wait(LONG_S) != 0


def test_ctrl_c_leaves_no_process(started: Started):
    program = started(EXECUTORS, "steps", "100000")
    step(program, 5)
    program.process.send_signal(signal.SIGINT)
    assert program.wait(LONG_S) != 0
