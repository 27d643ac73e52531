"""Jobs on fake GPUs: torch's own ProcessGroupNCCL, streams, events and allocator; see `harness.fake_cuda`."""

import pytest

from harness import wording
from harness.history import RETURN, History, sizes, started

pytestmark = [pytest.mark.fakecuda, pytest.mark.timeout(240)]


@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("Adam", marks=pytest.mark.slow)])
def test_job_continues_without_a_killed_worker_with_the_weights_of_a_cpu_job(
    job, fake_cuda, optimizer
):
    dies = {"STEPS": "12", "OPTIMIZER": optimizer, "DIE": "slot=1,step=5,place=backward"}
    on_gpus = started(job, 3, **fake_cuda(gpus=3), DEVICE="cuda", **dies)
    on_gpus.succeed(110)
    assert sizes(on_gpus)[-2:] == [3, 2]
    on_cpus = started(job, 3, **dies)
    on_cpus.succeed()
    History(on_gpus).check(steps=12, optimizer=optimizer)
    digests = [{done["sha"] for done in History(each).all("done")} for each in (on_gpus, on_cpus)]
    assert digests[0] == digests[1] and len(digests[0]) == 1
    assert wording.NOT_MADE_UP not in on_gpus.output
    assert wording.SPOILT not in on_gpus.output


@pytest.mark.slow
def test_two_workers_train_on_one_gpu_when_nccl_allows_multiple_ranks(job, fake_cuda):
    shared = {"FAKE_NCCL_VERSION": "23007", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    training = started(job, 2, **fake_cuda(gpus=1, **shared), DEVICE="cuda")
    training.succeed(110)
    assert sizes(training)[-1] == 2
    History(training).check()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_newcomer_gets_the_state_over_nccl(job, fake_cuda, optimizer):
    """Rank 0 and the newcomer have a separate communicator, and the digests of all are equal afterwards."""
    training = started(
        job,
        3,
        RETURN,
        **fake_cuda(gpus=3, FAKE_CUDA_LOG="1"),
        DEVICE="cuda",
        OPTIMIZER=optimizer,
        OWN_WEIGHTS="1",
        DIE="slot=2,step=2,place=forward",
        HOLD="6:size=3",
        STEPS="9",
    )
    training.succeed(200)
    history = History(training)
    history.check(steps=9, optimizer=optimizer)
    joined = [each for each in history.all("enter") if each["worker"] == "localhost:2#2"]
    assert joined[0]["step"] == 6
    assert wording.RANK_READY_DEVICE in training.output


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["kernel:die,device=2,nth=1", "kernel:die,device=0"])
def test_death_during_a_state_transfer_over_nccl_is_recovered_from(job, fake_cuda, dies):
    """The newcomer's, in its first kernel ever; or that of rank 0, which sends: the next rank 0 sends what it has."""
    faults = [
        "kernel:die,device=2,nth=12,once=first",
        "connect:slow,device=2,ms=500,when=first,once=second",
        f"{dies},when=second,once=third",
    ]
    training = started(
        job,
        3,
        RETURN,
        **fake_cuda(gpus=3, FAKE_CUDA_LOG="1", FAKE_FAULTS=";".join(faults)),
        DEVICE="cuda",
        OPTIMIZER="Adam",
        OWN_WEIGHTS="1",
        HOLD="6:size=3",
        STEPS="9",
    )
    training.succeed(200)
    assert (training.folder / "third").exists(), "nobody died"
    history = History(training)
    history.check(steps=9, optimizer="Adam")
    died = "localhost:0#1" if "device=0" in dies else "localhost:2#2"
    entered = {record["worker"]: record["step"] for record in history.all("enter")}
    assert "localhost:2#2" in entered if died == "localhost:0#1" else died not in entered
    assert len(history.all("done")) == 3
    assert died not in {record["worker"] for record in history.all("done")}
