"""Faults at random, one after another, in jobs on made-up GPUs: nothing is lost, nobody hangs, the weights are right.

make faults FAULTS=200 SEED=7           as many, of this seed
SEED=7 ONLY=12 make faults FAULTS=13    one of them alone: what failed says how
KINDS="death in init,endless copy"      only of these kinds
COSTS=FILE                              what each cost: JSON, line by line

How long survivors of a death take, on a machine that does nothing else:
KINDS="death in init,death in connect,death in kernel,death in launch" COSTS=costs.jsonl make faults FAULTS=40
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest
import torch

from fakecuda.replay import replayed
from fakecuda.strikes import KINDS, Strike, strikes
from fakecuda.struck_job import Cost, StruckJob
from harness.history import History

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow, pytest.mark.timeout(0)]
SEED = int(os.environ.get("SEED", "6"))
OF_A_JOB = 16  # faults
CHOSEN = tuple(filter(None, os.environ.get("KINDS", "").split(","))) or KINDS
DRAWN = list(enumerate(strikes(SEED, int(os.environ.get("FAULTS", "6")), CHOSEN)))
if "ONLY" in os.environ:
    DRAWN = [DRAWN[int(os.environ["ONLY"])]]
JOBS = [DRAWN[first : first + OF_A_JOB] for first in range(0, len(DRAWN), OF_A_JOB)]


@pytest.mark.parametrize("drawn", JOBS, ids=lambda drawn: f"{SEED}-{drawn[0][0]}")
def test_random_faults_lose_nothing_and_hang_nobody(job, fake_cuda, drawn):
    optimizer = "Adam" if drawn[0][0] // OF_A_JOB % 2 else "SGD"
    struck = StruckJob(job, fake_cuda, OPTIMIZER=optimizer)
    costs = [suffered(struck, number, strike) for number, strike in drawn]
    check(struck.finish(), optimizer)
    too_many = [cost for cost in costs if cost.lost_too]
    assert not too_many, "workers were lost that should not have been"


def suffered(struck: StruckJob, number: int, strike: Strike) -> Cost:
    again = f"SEED={SEED} FAULTS={number + 1} ONLY={number}"
    again += f' KINDS="{",".join(CHOSEN)}"' if CHOSEN != KINDS else ""
    try:
        cost = struck.suffer(number, strike)
    except BaseException:
        print(f"FAILED {again}: {strike}", flush=True)
        raise
    trouble = f"; LOST TOO: {cost.lost_too}" if cost.lost_too else ""
    print(f"{again}: {strike}: {cost.seconds:.2f} s, NCCL {cost.nccl_s:.3f}{trouble}", flush=True)
    if "COSTS" in os.environ:
        with open(os.environ["COSTS"], "a") as file:
            file.write(json.dumps(asdict(cost)) + "\n")
    return cost


def check(history: History, optimizer: str) -> None:
    history.check(steps=None)
    done = history.all("done")
    assert done, "no worker came to the end"
    losses, parameters = replayed(history, optimizer)
    for record in done:
        assert record["step"] == len(losses)
        assert torch.equal(torch.tensor(record["parameters"]), parameters), "the weights are wrong"
