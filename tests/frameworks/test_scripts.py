"""TensorFlow and Keras scripts in Horovod's style run unchanged; elastic ones also lose workers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from frameworks import behaviours
from harness import wording

SCRIPTS = Path(__file__).parents[2] / "examples" / "horovod"
SAYS_WHEN_IT_TRACES = Path(__file__).with_name("reports_tracing.py")
ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
START_S = 90.0  # imports
PATIENCE_S = 540.0  # a minute of CPU time per worker, on a busy machine
PATIENT = pytest.mark.timeout(PATIENCE_S + 60)
# Four seconds of CPU time per worker.
forked = pytest.mark.forked("tensorflow", "keras", "sklearn.datasets")


def command(script: str, flags: str = "") -> list[str | Path]:
    return ["python", SCRIPTS / script, *flags.split()]


def number(running, pattern: str) -> list[float]:
    return [float(m[1]) for line in running.lines if (m := re.search(pattern, line))]


@pytest.mark.nightly
@PATIENT
def test_keras_fit_trains_with_warm_up_and_callbacks(job):
    running = job("-np 2", command("keras_mnist.py", "--epochs 6"), env=ENV)
    running.succeed(PATIENCE_S)
    assert number(running, r"Test accuracy: ([\d.]+)")[0] > 0.8
    assert (running.folder / "checkpoint-6.keras").exists()


@pytest.mark.nightly
@PATIENT
def test_custom_loop_with_a_tape_trains(job):
    running = job("-np 2", command("tensorflow2_mnist.py"), env=ENV)
    running.succeed(PATIENCE_S)
    assert number(running, r"Last loss of all ranks: ([\d.]+)")[0] < 1.0


@pytest.mark.nightly
@PATIENT
def test_tensorflow_1_graph_example_trains(job):
    running = job("-np 2", command("tensorflow1_mnist.py"), env=ENV)
    running.succeed(PATIENCE_S)
    assert max(number(running, r"ended with loss ([\d.]+)")) < 1.0


@pytest.mark.nightly
@PATIENT
def test_synthetic_benchmark_runs_and_reports(job):
    flags = "--width 64 --num-iters 2 --fp16-allreduce"
    running = job("-np 2", command("tensorflow2_synthetic_benchmark.py", flags), env=ENV)
    running.succeed(PATIENCE_S)
    assert number(running, r"on 2 worker\(s\): ([\d.]+)")[0] > 0


@pytest.mark.nightly
@PATIENT
def test_training_job_uses_data_of_a_separate_compute_job(job, tmp_path):
    file = tmp_path / "compute.json"
    service = ["python", "-m", "horovod.tensorflow.data.compute_worker", file, "--timeout", "300"]
    compute = job("-np 2", service, env=ENV)
    training = job("-np 2", [*command("tensorflow2_data_service.py"), file], env=ENV)
    training.succeed(PATIENCE_S)
    compute.succeed(START_S)
    assert number(training, r"Epoch \d: (\d+) samples on 2 ranks") == [1797.0] * 3
    assert not file.exists()


@forked
def test_elastic_graph_loop_loses_rank_0_and_gets_a_replacement(job):
    flags = "--steps 240 --pause 0.02"
    running = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 0.1 0.2 -H localhost:2",
        command("tensorflow2_elastic.py", flags),
        env=ENV,
    )
    running.wait_for(r"Step #20\b.*of 2", START_S)
    running.kill(0)
    running.wait_for(wording.RECOVERED, START_S)  # alone, or with the new one immediately
    running.succeed(START_S)
    ends = [
        m[1] for line in running.lines if (m := re.search(r"ended after 240 steps with (.*)", line))
    ]
    assert len(ends) == 2 and len(set(ends)) == 1
    steps = [int(m[1]) for line in running.lines if (m := re.search(r"Step #(\d+)\t", line))]
    assert sorted(set(steps)) == list(range(0, 240, 20))


BACKENDS = [
    pytest.param("tensorflow", marks=forked),
    *(pytest.param(b, marks=[pytest.mark.nightly, PATIENT]) for b in ("torch", "jax")),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_keras_fit_continues_in_the_middle_of_an_epoch_with_the_same_losses(job, backend):
    env = {**ENV, "KERAS_BACKEND": backend}
    alone = job("-np 1 -H localhost:1", command("keras_elastic.py"), env=env)
    struck = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 0.1 0.2 -H localhost:2",
        ["python", SAYS_WHEN_IT_TRACES, *command("keras_elastic.py", "--pause 0.03")[1:]],
        # Each of 28 batches of an epoch commits, two parts each: in the middle of the third epoch.
        env={**env, "ELASTIC_FAILPOINTS": "snapshot kill slot=1 incarnation=1 hit=141"},
    )
    alone.succeed(PATIENCE_S)
    struck.wait_for(r"epoch 2 of 2 workers", PATIENCE_S)
    struck.succeed(PATIENCE_S)
    assert len(struck.worlds()) >= 3
    wanted, found = (
        dict(
            (int(m[1]), float(m[2]))
            for line in each.lines
            if (m := re.search(r"epoch (\d+) of \d workers: loss ([\d.]+) from batch 0$", line))
        )
        for each in (alone, struck)
    )
    # An epoch in which the world changed has the mean of its part after that.
    assert wanted.keys() == set(range(1, 9)) and {1, 2} <= found.keys() and 3 not in found
    for epoch, loss in found.items():
        assert abs(wanted[epoch] - loss) < 1e-4, (epoch, wanted, found)
    assert len(number(struck, r"epoch \d+ of \d workers: loss ([\d.]+)")) == 8
    losses = {
        m[1] for line in struck.lines if (m := re.search(r"8 epochs with loss ([\d.]+)", line))
    }
    assert len(losses) == 1
    # A joining worker did that before the others waited for it.
    traces = sorted(m[1] for line in struck.lines if (m := re.search(wording.TRACES_STEP, line)))
    assert traces == (["ahead of one", *["in a world"] * 2] if backend == "tensorflow" else [])
    assert abs(float(losses.pop()) - number(alone, r"8 epochs with loss ([\d.]+)")[0]) < 1e-4


def check_all_pass(job, module: str, **env: str) -> None:
    """Run a module as a script: all of its behaviours pass on each rank."""
    script = Path(__file__).with_name(f"{module}.py")
    running = job("-np 2", ["python", script], env={**ENV, **env})
    running.succeed(PATIENCE_S)
    passed = {m[1] for line in running.lines if (m := re.search(r"passed (test_\w+)", line))}
    assert passed == set(behaviours.names_of(module))


@pytest.mark.nightly
@PATIENT
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_behaviours_pass_on_each_keras_backend(job, backend):
    check_all_pass(job, "in_each_backend", KERAS_BACKEND=backend)


@pytest.mark.nightly
@PATIENT
@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="needs tf-keras")
def test_behaviours_pass_with_legacy_keras(job):
    tests = str(Path(__file__).parents[1])
    check_all_pass(job, "in_legacy_keras", TF_USE_LEGACY_KERAS="1", PYTHONPATH=tests)
