"""Reactions of a job to faults inside NCCL and CUDA, named by place; see `harness.fake_cuda`."""

from __future__ import annotations

import pytest

from harness import wording
from harness.history import STAY_AWAY, History, started

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow, pytest.mark.timeout(240)]


SOON = "--gpu-hang-timeout 2"
ON_GPUS = {"DEVICE": "cuda", "STEPS": "12"}


def trained(job, fake_cuda, fault: str, np: int = 3, flags: str = "", **env: str) -> History:
    """Check a job with one failing process, which ends normally."""
    made_up = fake_cuda(gpus=np, FAKE_FAULTS=f"{fault},once=suffered")
    training = started(job, np, f"{STAY_AWAY} {flags}", **made_up, **env, **ON_GPUS)
    training.succeed(110)
    assert (training.folder / "suffered").exists(), "nothing went wrong"
    history = History(training)
    history.check(steps=12)
    return history


@pytest.mark.parametrize(
    "fault",
    [
        "init:die,rank=1",
        "init:die,rank=2,nth=2",
        "connect:die,rank=1,nth=2",
        "kernel:die,rank=1,nth=12",
        "kernel:die,rank=0,nth=20",
        "abort:slow,ms=800",
        "abort:hang,rank=0",
    ],
)
def test_death_inside_nccl_is_recovered_from(job, fake_cuda, fault):
    trained(job, fake_cuda, fault if "die" in fault else f"{fault};kernel:die,rank=1,nth=12")


def test_error_reported_by_nccl_breaks_the_world_and_loses_no_worker(job, fake_cuda):
    history = trained(job, fake_cuda, "kernel:error,rank=1,nth=12")
    assert {record["rank"] for record in history.all("done")} == {0, 1, 2}


def test_memory_that_a_peers_kernel_may_still_read_is_not_freed(job, fake_cuda):
    """Slot 2 learns late of the loss: its kernel runs for most of a second after the other survivor's abort."""
    history = trained(
        job,
        fake_cuda,
        "abort:slow,rank=0,ms=300;kernel:die,rank=1,nth=12",
        FAKE_NCCL_FREE="strict",
        ELASTIC_FAILPOINTS="cut slow=0.7 slot=2",
    )
    assert len(history.all("done")) == 2
    assert wording.SPOILT not in history.job.output


def test_no_memory_is_freed_after_an_error_reported_only_by_nccl(job, fake_cuda):
    history = trained(job, fake_cuda, "kernel:error,rank=1,nth=12", FAKE_NCCL_FREE="strict")
    assert len(history.all("done")) == 3
    assert wording.SPOILT not in history.job.output


def test_peers_continue_without_a_frozen_rank(job, fake_cuda):
    history = trained(job, fake_cuda, "kernel:freeze,rank=1,nth=12")
    assert len(history.all("done")) == 2


def test_a_failing_gpu_ends_only_its_worker(job, fake_cuda):
    history = trained(job, fake_cuda, "work:error,device=1,nth=250")
    assert len(history.all("done")) == 2


def test_slow_copies_lose_no_data_when_a_worker_dies(job, fake_cuda):
    trained(job, fake_cuda, "copy:slow,ms=3;kernel:die,rank=1,nth=15")


def test_only_the_worker_of_a_hung_gpu_is_fenced(job, fake_cuda):
    """Its stream does nothing more: all wait, and no process has died. Much earlier than any collective timeout."""
    history = trained(job, fake_cuda, "work:hang,device=1,nth=275", flags=SOON)
    fenced = [str(e) for e in history.job.output.splitlines() if "fencing" in e]
    assert len(fenced) == 1 and wording.GPU_HANGS_NOT_COME in fenced[0], fenced
    assert {record["worker"] for record in history.all("done")} == {
        "localhost:0#1",
        "localhost:2#1",
    }


def test_hang_of_all_kernels_breaks_the_world_and_fences_no_worker(job, fake_cuda):
    """NCCL's kernels wait for each other until they are aborted: in a new communicator all continue."""
    stall = "kernel:slow,ms=16000,nth=20"  # and then they see that they are
    training = started(
        job, 3, f"{STAY_AWAY} {SOON}", **fake_cuda(gpus=3, FAKE_FAULTS=stall), **ON_GPUS
    )
    training.succeed(110)
    history = History(training)
    history.check(steps=12)
    assert wording.NCCL_HANGS_OR_NETWORK in training.output
    assert "fencing" not in training.output
    assert {record["rank"] for record in history.all("done")} == {0, 1, 2}
