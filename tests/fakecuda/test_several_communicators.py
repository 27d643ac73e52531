"""Several communicators on one GPU, one for each optimizer and one for named collectives, used in one order."""

import re

import pytest

from harness.history import SCRIPTS

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow, pytest.mark.timeout(240)]


def test_communicators_do_not_deadlock_on_a_gpu_that_runs_one_kernel_at_a_time(job, fake_cuda):
    """The worst case that NCCL allows; ranks whose kernels are launched in different orders would wait forever."""
    env = fake_cuda(gpus=2, FAKE_NCCL_EXCLUSIVE="1", DEVICE="cuda")
    training = job("-np 2", ["python", SCRIPTS / "several_optimizers.py"], env=env)
    training.succeed(200)
    sums = re.findall(r"sum .*", training.output)
    assert len(sums) == 2 and len(set(sums)) == 1, sums
