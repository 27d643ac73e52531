"""Trainers, Accelerate and a loop like timm's in real jobs: examples that lose and gain workers, also rank 0."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import wording
from harness.history import SCRIPTS
from harness.processes import clean_environment

EXAMPLES = Path(__file__).parents[3] / "examples"
START_S = 90.0  # imports


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    library = request.node.callspec.params["library"]
    library = {"fabric": "lightning", "timm": "torch"}.get(library, library)
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install 'hvd-elastic[{library}]', as make test does")


LIBRARIES = ["lightning", "transformers", "accelerate"]
library = pytest.mark.parametrize("library", LIBRARIES)
# That of transformers trains by Accelerate.
in_part = pytest.mark.parametrize(
    "library",
    [
        "lightning",
        pytest.param("transformers", marks=pytest.mark.nightly),
        pytest.param("fabric", marks=pytest.mark.nightly),
        pytest.param("timm", marks=pytest.mark.nightly),
        "accelerate",
    ],
)
SHORT = "--epochs 2 --samples 240 --pause 0.01"


def script(library: str, words: str) -> list[str | Path]:
    return ["python", EXAMPLES / f"{library}_elastic.py", *words.split()]


def ends(training: Any) -> list[tuple[int, str]]:
    return [
        (int(m[1]), m[2])
        for m in re.finditer(r"ended after (\d+) steps with (\S+)", training.output)
    ]


def steps(training: Any) -> int:
    return len(re.findall(r"step \d+ of", training.output))


def kill_while_training(training: Any, rank: int) -> None:
    """At some step; and waits until the others have gone on."""
    seen, worlds = steps(training), len(training.worlds())
    training.until(lambda: steps(training) > seen, "a step")
    training.kill(rank)
    training.until(lambda: len(training.worlds()) > worlds, "a world without it")


def judge(training: Any, samples: int, of_a_step: int = 4) -> None:
    """All that are left have the same bits. Replicas were equal, and samples counted once, at every commit.

    ``of_a_step``: samples of a worker.
    """
    found = ends(training)
    assert found and len(set(found)) == 1, found
    summary = training.check_invariants()
    assert summary.commits_compared > 10
    # What a killed worker has said of its last commit may not have arrived.
    assert samples - of_a_step <= summary.samples_counted <= samples


@in_part
@pytest.mark.forked
def test_samples_are_trained_once_when_rank_0_is_lost_in_an_epoch(job: Any, library: str):
    """Its samples are trained on by the others, once."""
    training = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 60 60",
        script(library, SHORT),
        env={"ELASTIC_DIGESTS": "1", "PYTHONUNBUFFERED": "1"},
    )
    training.wait_for(r"step 10 of 2", START_S)
    kill_while_training(training, 0)
    training.succeed(START_S)
    judge(training, 480)
    assert training.worlds()[-1]["generation"] == 3


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["lightning"])
def test_shards_have_the_same_bits_when_rank_0_is_killed(job: Any, library: str):
    """One undisturbed worker, and two of which rank 0 is killed: the same weights after as many steps."""
    words, env = f"{SHORT} --shards 4", {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    alone = job("-np 1", script(library, words), env=env)
    alone.succeed(START_S)
    training = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 60 60",
        script(library, words.replace("0.01", "0.1")),
        env={**env, "ELASTIC_DIGESTS": "1"},
    )
    training.wait_for(r"step 10 of 2", START_S)
    kill_while_training(training, 0)
    training.succeed(START_S)
    judge(training, 480, of_a_step=8)
    assert set(ends(training)) == set(ends(alone))


@pytest.mark.parametrize("library", [*LIBRARIES, "timm"])
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", ["", "--accumulate 3"], ids=["plain", "accumulating"])
def test_twenty_kills_with_joins_between(job: Any, library: str, words: str):
    training = job(
        "-np 3 --min-np 1 --blacklist-cooldown-range 0.1 0.2 --slot-attempts 50 --preload auto",
        script(library, f"--epochs 40 --samples 4800 --pause 0.02 {words}"),
        env={"ELASTIC_DIGESTS": "1", "PYTHONUNBUFFERED": "1"},
    )
    training.wait_for(r"step 10 of 3", START_S)
    for kill in range(20):
        training.wait_for_world(3, START_S)
        kill_while_training(training, 0 if kill % 2 == 0 else 1)
    training.driver.terminate()
    training.wait(START_S)
    summary = training.check_invariants()
    assert summary.recoveries >= 20
    assert summary.commits_compared > 200


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_script_trains_again_after_a_training_that_lost_rank_0(job: Any, library: str):
    """Between them it tests, validates and predicts. One worker is left: 24 steps in each epoch."""
    training = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 100 100",
        ["python", SCRIPTS / "fits_again.py", library],
    )
    found = training.succeed(2 * START_S)
    assert len(training.worlds()) == 3
    assert re.findall(r"fit ([23]: \d+ steps)", found) == ["2: 24 steps", "3: 24 steps"]
    assert found.count(wording.SCRIPT_TRAINED_BEFORE) == 2


def rates(training: Any) -> dict[int, float]:
    """Learning rates by step. Raises AssertionError where two workers had different ones."""
    found: dict[int, set[float]] = {}
    for step, rate in re.findall(r"rate (\d+) (\S+)", training.output):
        found.setdefault(int(step), set()).add(float(rate))
    assert all(len(each) == 1 for each in found.values()), found
    return {step: each for step, (each,) in found.items()}


def of_a_schedule(job: Any, whose: str) -> Any:
    training = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 60 60",
        ["python", SCRIPTS / "schedules.py", whose],
    )
    training.succeed(START_S)
    return training


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["transformers"])
def test_the_trainers_schedule_ends_with_the_last_step_after_a_loss(job: Any, library: str):
    training = of_a_schedule(job, "trainer")
    found = rates(training)
    last = max(found)
    assert last > 60, "one worker has more steps than the 48 that two would have had"
    assert found[last] == pytest.approx(0.01 / 48 / 2, rel=1e-3)
    differences = [found[step] - found[step + 1] for step in range(last)]
    assert all(0 < each < 0.01 / 47 for each in differences), "no jump"
    assert "StaleValueWarning" not in training.output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("library", "whose"), [("transformers", "own"), ("lightning", "lightning")]
)
def test_a_schedule_of_the_script_is_reported_once_after_a_loss(job: Any, library: str, whose: str):
    assert len(re.findall(r"StaleValueWarning:", of_a_schedule(job, whose).output)) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("library", "whose"), [("torch", "joins"), ("lightning", "joins-lightning")]
)
def test_joining_worker_with_another_schedule_ends_before_training(
    job: Any, tmp_path: Path, library: str, whose: str
):
    """Its function was created for the number of steps of two workers; that of the survivor for one."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    training = job(
        f"-np 1 --min-np 1 --host-discovery-script {discover} --blacklist-cooldown-range 60 60",
        ["python", SCRIPTS / "schedules.py", whose],
    )
    training.wait_for(r"rate 3 ", START_S)
    hosts.write_text("localhost:2\n")
    training.wait_for_world(2, START_S)
    training.wait_for_world(1, START_S)
    (training.folder / "out").mkdir(exist_ok=True)
    (training.folder / "out" / "stop").touch()
    training.succeed(START_S)
    rates(training)
    assert "elastic.errors.StateMismatch" in training.output
    # The survivor does not wait for the end of its process, which may even outlive the survivor's.
    [quit_event] = training.events("WorkerQuit")
    assert quit_event["worker"] == ["localhost", 1, 1]


@library
@pytest.mark.nightly
def test_example_without_elasticrun_fails_with_the_start_command(library: str):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{library}_elastic.py")],
        capture_output=True,
        text=True,
        timeout=START_S,
        env=clean_environment(),
    )
    assert done.returncode != 0
    assert wording.ELASTICRUN_NP_PYTHON_SCRIPT in done.stderr
