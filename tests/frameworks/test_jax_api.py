"""`elastic.jax`, in worlds of 2 and 3 processes: see `in_jax`; and a script that loses and gains workers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from frameworks.behaviours import of_module

NEEDS = ("jax", "flax", "optax", "equinox")

test_jax = of_module("in_jax")
test_script_checks = of_module("in_jax_script_checks")

SCRIPT = Path(__file__).with_name("jax_job.py")
START_S = 150.0  # imports, on a busy machine


def outcome(running) -> tuple[list[float], set[str], set[str]]:
    text = "\n".join(running.lines)
    return (
        [float(each) for each in re.findall(r"ended off by (\S+),", text)],
        set(re.findall(r"same key (\w+)", text)),
        set(re.findall(r"replicas equal (\w+)", text)),
    )


@pytest.mark.forked("jax", "flax", "optax")
@pytest.mark.parametrize(
    ("where", "slot"),
    [
        ("outside", 0),
        pytest.param("inside", 1, marks=pytest.mark.nightly),
        pytest.param("outside", 2, marks=pytest.mark.nightly),
    ],
)
def test_training_equals_the_undisturbed_one_after_a_worker_is_killed_and_replaced(
    job, where, slot
):
    running = job(
        "-np 3 --min-np 1 --blacklist-cooldown-range 0.1 0.2 -H localhost:3",
        ["python", SCRIPT, "240", where],
        env={
            # A commit copies three parts.
            "ELASTIC_FAILPOINTS": f"snapshot kill slot={slot} incarnation=1 hit=182"
        },
    )
    running.succeed(START_S)
    off, keys, equal = outcome(running)
    assert len(off) == 3 and max(off) < 1e-5
    assert keys == equal == {"True"}
    assert len(running.worlds()) >= 3


@pytest.mark.nightly
def test_example_reaches_its_accuracy_when_a_worker_is_lost(job):
    script = SCRIPT.parents[2] / "examples" / "jax_elastic.py"
    running = job("-np 2 --min-np 1", ["python", script, "40"])
    running.wait_for(r"epoch 3 loss", START_S)
    running.kill(0)
    running.succeed(START_S)
    right = [float(each) for each in re.findall(r": ([\d.]+) % of", "\n".join(running.lines))]
    assert right and min(right) > 80


@pytest.mark.nightly
@pytest.mark.forked("jax", "flax", "optax")
def test_training_resumes_from_a_checkpoint_on_another_number_of_workers(job, tmp_path):
    flags = f"--checkpoint-dir {tmp_path / 'kept'} -H localhost:2"
    first = job(f"-np 2 {flags}", ["python", SCRIPT, "60", "outside"])
    first.succeed(START_S)
    second = job(f"-np 1 {flags} --resume", ["python", SCRIPT, "120", "outside"])
    second.succeed(START_S)
    off, keys, _ = outcome(second)
    assert len(off) == 1 and off[0] < 1e-5 and keys == {"True"}
    assert not any(re.search(r"step (20|40) of", line) for line in second.lines)
