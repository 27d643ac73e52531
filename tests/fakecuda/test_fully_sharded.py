"""Fully sharded models on made-up GPUs: FSDP2 over NCCL, on streams that the training thread does not wait for."""

import os
import re

import pytest

from fakecuda.replay import replayed
from harness import wording
from harness.history import SCRIPTS, History, sizes, started
from harness.torchrun import torchrun

pytestmark = [pytest.mark.fakecuda, pytest.mark.timeout(240)]


def check(training, optimizer="Adam", unsealed=0):
    """To the bit, as one process that adds up the gradients of so many ranks."""
    history = History(training)
    history.check_commits_kept(unsealed)
    history.check_written()
    losses, parameters = replayed(history, optimizer)
    done = history.all("done")
    assert done
    for record in done:
        assert record["step"] == len(losses)
        assert record["parameters"] == parameters.tolist()
    assert wording.NOT_MADE_UP not in training.output
    assert wording.SPOILT not in training.output


@pytest.mark.parametrize(
    "rule",
    [
        "kernel:die,rank=1,nth=40",
        *(
            pytest.param(rule, marks=pytest.mark.slow)
            for rule in (
                "kernel:die,rank=0,nth=41",
                "kernel:die,rank=2,nth=42",
                "launch:die,rank=1,nth=43",
                "kernel:freeze,rank=1,nth=44",
                "kernel:error,rank=1,nth=45",
            )
        ),
    ],
)
def test_fault_in_a_step_without_an_awaited_result_is_recovered(job, fake_cuda, rule):
    training = started(
        job,
        3,
        **fake_cuda(gpus=3, FAKE_FAULTS=f"{rule},once=struck"),
        DEVICE="cuda",
        SHARDED="1",
        OPTIMIZER="Adam",
        STEPS="12",
    )
    training.succeed(200)
    assert (training.folder / "struck").exists(), "no fault"
    assert len(sizes(training)) >= 3
    check(training)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["fully", "zero"])
@pytest.mark.parametrize("room", [True, False])
def test_rank_is_lost_while_commits_are_copied_in_the_background(job, fake_cuda, sharded, room):
    """Without digests, which commit() would have to wait for."""
    training = started(
        job,
        3,
        **fake_cuda(gpus=3, FAKE_FAULTS="kernel:die,rank=1,nth=60,once=struck"),
        **({} if room else {"NO_ROOM": "1"}),
        DEVICE="cuda",
        SHARDED=sharded,
        OPTIMIZER="Adam",
        STEPS="12",
        ELASTIC_DIGESTS="0",
    )
    training.succeed(200)
    assert (training.folder / "struck").exists(), "no fault"
    assert sizes(training)[-1] == 2
    check(training, unsealed=1)


@pytest.mark.slow
def test_reduce_scatters_and_all_gathers_are_correct_for_each_dtype_and_stream(job, fake_cuda):
    training = job("-np 3", ["python", SCRIPTS / "scatters_on_gpus.py"], env=fake_cuda(gpus=3))
    assert training.succeed(200).count("found all right") == 3


@pytest.mark.slow
def test_rank_that_waits_inside_cuda_without_a_driver_is_freed_at_the_timeout(fake_cuda, tmp_path):
    env = os.environ | fake_cuda(gpus=2, ELASTIC_COLLECTIVE_TIMEOUT="3")
    output = torchrun(SCRIPTS / "late_on_gpus.py", str(tmp_path), env=env)
    (times,) = re.findall(r"queued after ([\d.]+) s, raised after ([\d.]+) s", output)
    queued_s, raised_s = map(float, times)
    assert queued_s < 1.0 and 2.0 < raised_s < 20.0
