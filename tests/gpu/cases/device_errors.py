"""A GPU's context is lost: only its worker ends. The script is not blamed if two are lost alike."""

from __future__ import annotations

from pathlib import Path

from gpu.machine import Machine
from gpu.programs import STAY_AWAY, Job
from gpu.results import Result


def run(machine: Machine, result: Result, folder: Path) -> None:
    env = {"APART": "0"}
    if machine.ranks == 1:
        env = {"APART": "1"}
        result.leave_out("gradients over NCCL meanwhile", machine.why_few)
    for fault in ("assert", "illegal"):
        one = env | {"VICTIMS": "1", "FAULT": fault}
        with Job(machine, folder / fault, "device_error.py", np=2, flags=STAY_AWAY, **one) as job:
            job.done(30)
            result.figure(f"{fault} on one", errors(job))
            assert len(job.notes("fails")) == 1 and not job.notes("survived"), job.notes("survived")
            assert [each["size"] for each in job.notes("done")] == [1]
    # The same hardware error on two at the same commit, and a third: more than NCCL lets share a GPU.
    both = {"APART": str(int(machine.ranks < 3)), "VICTIMS": "1,2", "FAULT": "illegal"}
    with Job(machine, folder / "two", "device_error.py", np=3, flags=STAY_AWAY, **both) as job:
        job.done(40)
        result.figure("illegal on two of three", errors(job))
        assert len(job.notes("fails")) == 2, job.notes("fails")
        assert [each["size"] for each in job.notes("done")] == [1]


def errors(job: Job) -> list[str]:
    """What the victims' scripts met. Torch's watchdog may be first: then the process ends with SIGABRT."""
    met = [f"{each['kind']} {each['code'] or ''}".strip() for each in job.notes("error")]
    return met + ["ended by torch's watchdog"] * (len(job.notes("fails")) - len(met))
