"""Several communicators of one GPU, one for each optimizer and one for named collectives, used in one order."""

from __future__ import annotations

import re

import pytest

from integration.history import SCRIPTS

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow, pytest.mark.timeout(240)]


def test_no_kernel_keeps_another_communicator_from_a_gpu_that_runs_one_at_a_time(job, fake_cuda):
    """The worst that NCCL allows itself; ranks whose kernels came in different orders would wait for ever."""
    command = ["python", SCRIPTS / "several_optimizers.py"]
    env = fake_cuda(gpus=2, FAKE_NCCL_EXCLUSIVE="1")
    on_gpus = job("-np 2", command, env=env | {"DEVICE": "cuda"})
    on_gpus.succeed(150)
    on_cpus = job("-np 2", command, env={"DEVICE": "cpu"})
    on_cpus.succeed(60)
    sums = {said for each in (on_gpus, on_cpus) for said in re.findall(r"sum .*", each.output)}
    assert len(sums) == 1, sums
