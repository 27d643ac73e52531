"""Estimators on executors of a real Spark: the accuracy is that of one process, even if an executor is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.history import SCRIPTS
from harness.job import MARK
from harness.processes import clean_environment
from harness.program import Program

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.timeout(420),  # two applications, each with imports of Keras in several processes
]

LONG_S = 200.0
Fitted = Callable[..., Program]


@pytest.fixture
def fitted(tmp_path: Path) -> Iterator[Fitted]:
    programs: list[Program] = []

    def fit(master: str, framework: str, processes: int) -> Program:
        folder = tmp_path / str(len(programs))
        folder.mkdir()
        words = [sys.executable, str(SCRIPTS / "spark_estimators.py"), master, framework]
        environ = {**clean_environment(), "KERAS_BACKEND": "torch"}
        program = Program(
            [*words, str(processes), str(folder)], folder=folder, env=environ, mark=MARK
        )
        programs.append(program)
        return program

    yield fit
    left = [process for each in programs for process in each.end()]
    assert not left, f"these processes outlived their application: {left}"


def result(program: Program) -> tuple[float, Any]:
    """Return accuracy and history."""
    program.succeed(LONG_S)
    found = dict(line.split(" ", 1) for line in program.lines if line.startswith(("acc", "hist")))
    return float(found["accuracy"]), json.loads(found["history"])


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_accuracy_of_three_processes_matches_one_process(fitted: Fitted, framework: str):
    if framework == "keras":
        pytest.importorskip("keras")
    alone, _ = result(fitted("local[1]", framework, 1))
    together, _ = result(fitted("local-cluster[3,1,1024]", framework, 3))
    assert alone > 0.93
    assert together > alone - 0.02
    print(f"accuracy {together:.4f} with three processes, {alone:.4f} with one")


def test_executor_killed_during_fit_does_not_change_the_history(fitted: Fitted):
    whole, history = result(fitted("local-cluster[3,1,1024]", "torch", 3))
    program = fitted("local-cluster[3,1,1024]", "torch", 3)
    program.wait_for(r"epoch 1 step", LONG_S)
    os.kill(_executor(program).pid, signal.SIGKILL)
    accuracy, killed = result(program)
    program.wait_for("lost", 1.0)
    assert abs(accuracy - whole) < 0.02
    assert [entry["epoch"] for entry in killed] == [entry["epoch"] for entry in history]
    for mine, other in zip(killed, history, strict=True):
        assert mine["train"]["loss"] == pytest.approx(other["train"]["loss"], abs=0.02)


def _executor(program: Program) -> psutil.Process:
    return next(each for each in program.processes() if "--executor-id" in each.cmdline())
