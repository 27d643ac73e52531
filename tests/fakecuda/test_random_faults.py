"""Faults at random, one after another, in jobs on fake GPUs: no commit is lost, no worker hangs, the weights are right.

make faults FAULTS=200 SEED=7           as many, of this seed
SEED=7 ONLY=12 make faults FAULTS=13    one of them alone: what failed says how
KINDS="death in init,endless copy"      only of these kinds
MODELS=sharded,zero                     only with FSDP2 and ZeroRedundancyOptimizer, commits in the background
COSTS=FILE                              what each cost: JSON, line by line

Recovery time after a killed worker, on an idle machine:
KINDS="death in init,death in connect,death in kernel,death in launch" COSTS=costs.jsonl make faults FAULTS=40
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch

from fakecuda.replay import replayed
from fakecuda.strikes import KINDS, Strike, strikes
from fakecuda.struck_job import Cost, StruckJob
from harness.history import History

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow, pytest.mark.timeout(0)]
SEED = int(os.environ.get("SEED", "6"))
OF_A_JOB = 16  # faults
MODELS = tuple(os.environ.get("MODELS", "replicated,sharded,zero").split(","))
CHOSEN = tuple(filter(None, os.environ.get("KINDS", "").split(","))) or KINDS
FAULTS = int(os.environ.get("FAULTS", "6"))


def jobs(model: str) -> Iterator[Any]:
    """The faults of each job."""
    drawn = list(enumerate(strikes(SEED, FAULTS, CHOSEN, sharded=model != "replicated")))
    if "ONLY" in os.environ:
        drawn = [drawn[int(os.environ["ONLY"])]]
    for first in range(0, len(drawn), OF_A_JOB):
        some = drawn[first : first + OF_A_JOB]
        yield pytest.param(model, some, id=f"{model}-{SEED}-{some[0][0]}")


@pytest.mark.parametrize(("model", "drawn"), [each for model in MODELS for each in jobs(model)])
def test_random_faults_lose_no_commit_and_hang_no_worker(job, fake_cuda, model, drawn):
    optimizer = "Adam" if drawn[0][0] // OF_A_JOB % 2 else "SGD"
    sharded = {} if model == "replicated" else {"SHARDED": model, "ELASTIC_DIGESTS": "0"}
    if sharded and drawn[0][0] // OF_A_JOB % 4 < 2:
        sharded["NO_ROOM"] = "1"
    struck = StruckJob(job, fake_cuda, OPTIMIZER=optimizer, **sharded)
    costs = [suffered(struck, number, strike) for number, strike in drawn]
    check(struck.finish(), optimizer, sharded=bool(sharded))
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


def check(history: History, optimizer: str, *, sharded: bool) -> None:
    if sharded:  # ranks have no parameters in common whose digests the driver could compare
        history.check_commits_kept(unsealed=1)
        history.check_written()
    else:
        history.check(steps=None)
    done = history.all("done")
    assert done, "no worker came to the end"
    losses, parameters = replayed(history, optimizer)
    for record in done:
        assert record["step"] == len(losses)
        assert torch.equal(torch.tensor(record["parameters"]), parameters), "the weights are wrong"
