"""DistributedDataParallel in real jobs: unchanged under elasticrun, and with workers that die in backward or join."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import wording
from harness.history import SCRIPTS
from harness.processes import clean_environment
from harness.torchrun import torchrun

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 12

sys.path.append(str(SCRIPTS))
ddp = pytest.importorskip("ddp")


def trained(
    job: Any, feature: str, die: str, flags: str = "", steps: int = STEPS, **env: str
) -> list[dict[str, Any]]:
    """Return the final records of every worker."""
    cooldown = "" if flags else "--blacklist-cooldown-range 100 100"
    training = job(
        f"-np 3 --min-np 1 {cooldown} {flags}",
        ["python", SCRIPTS / "ddp.py"],
        env={"FEATURE": feature, "STEPS": str(steps), "DIE": die} | env,
    )
    training.succeed(250)
    return [json.loads(file.read_text()) for file in sorted(training.folder.glob("out/*.json"))]


def check(found: list[dict[str, Any]], feature: str, steps: int = STEPS) -> None:
    assert len({each["digest"] for each in found}) == 1, "replicas differ"
    assert all(len(each["sizes"]) == steps for each in found), "a committed step was lost"
    assert sorted(each["world"] for each in found) == [
        [rank, len(found)] for rank in range(len(found))
    ]
    wanted = ddp.alone(feature, steps)
    exact = feature not in ("fp16", "builtin", "powersgd", "buffers")
    assert found[0]["loss"] == pytest.approx(wanted, rel=1e-5 if exact else 0.3)


@pytest.mark.forked
@pytest.mark.parametrize(
    "feature",
    [
        each
        if each in ("powersgd", "static_graph")  # plain: the next test
        else pytest.param(each, marks=pytest.mark.nightly)
        for each in ddp.FEATURES
    ],
)
def test_rank_0_is_killed_in_the_middle_of_a_backward_pass(job: Any, feature: str):
    found = trained(job, feature, "slot=0,step=6")
    check(found, feature)
    assert found[0]["sizes"] == [3] * 6 + [2] * (STEPS - 6)


@pytest.mark.forked
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_losses_equal_an_undisturbed_run_after_kills_and_joins_with_ddp(job: Any, kills: int):
    """Also of rank 0; a dead worker returns, and finds its place in the reducer of the others."""
    steps = 40 * kills
    die = ";".join(
        f"slot={kill % 3},start={kill // 3 + 1},step={40 * kill + 20}" for kill in range(kills)
    )
    found = trained(
        job,
        "plain",
        die,
        "--blacklist-cooldown-range 0.01 0.02 --slot-attempts 50",
        steps,
        FULL="3",
    )
    check(found, "plain", steps)
    sizes = found[0]["sizes"]
    assert min(sizes) < 3, "nobody died"
    assert sum(one < other for one, other in itertools.pairwise(sizes)) >= kills - 1, (
        "few have come back"
    )


@pytest.mark.forked
def test_two_ranks_communicate_while_a_third_computes_in_each_world(job: Any):
    training = job(
        "-np 3 --min-np 2 --blacklist-cooldown-range 0.01 0.02",
        ["python", SCRIPTS / "torch_messages.py"],
    )
    assert training.succeed().count("] ended") == 3


SKIPS = """
import time, torch
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group(timeout=timedelta(seconds=15))
if dist.get_rank() == 1:
    time.sleep(300)  # skips it
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    print("said:", error, flush=True)
    raise
"""


@pytest.mark.nightly  # half a minute
def test_a_rank_that_skips_a_collective_is_named_with_its_line(job: Any, tmp_path: Path):
    script = tmp_path / "skips.py"
    script.write_text(SKIPS)
    training = job("-np 2 --idle-timeout 100", ["python", script])
    line = r"Timed out after 15 s: rank 1 .*; rank 1 is at skips\.py:7"
    training.wait_for(rf"said: allreduce: {line}$", 60)


AGAIN = """
import os, signal, sys, torch, torch.distributed as dist, elastic
dist.init_process_group()

def train(number):
    torch.manual_seed(dist.get_rank())  # rank 0's weights are everybody's
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    @elastic.run
    def go(state):
        while state.step < 10:
            model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
            state.step += 1
            if sys.argv[1:] == [f"{number} {dist.get_rank()} {state.step}"]:
                os._exit(9)
            if sys.argv[1:] == [f"freezes in {number}"] and dist.get_rank() == state.step == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            state.commit()
        return sum(each.grad.sum().item() for each in model.parameters())
    print("training", number, go(elastic.TorchState(model=model, step=0)), flush=True)

train(1)
train(2)
"""


INSIDE = """
import os, signal, sys, torch, elastic
from torch.nn.parallel import DistributedDataParallel

elastic.init()
torch.distributed.init_process_group()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
kept = []

@elastic.run
def train(state):
    replica = DistributedDataParallel(model)
    kept.append(replica)
    while state.step < 8:
        optimizer.zero_grad()
        loss = replica(torch.ones(2, 4)).sum()
        if state.step == 3 and elastic.size() == 3 and elastic.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
try:
    kept[0](torch.ones(2, 4))
except elastic.NotElastic as error:
    print("refused:", error.kind.name)
print("weights:", model[0].weight.sum().item())
"""


@pytest.mark.forked
def test_replicas_created_in_the_function_train_after_a_loss_while_earlier_ones_exist(
    job: Any, tmp_path: Path
):
    script = tmp_path / "inside.py"
    script.write_text(INSIDE)
    training = job(
        "-np 3 --min-np 1 --blacklist-cooldown-range 100 100", ["python", script]
    ).succeed()
    assert re.findall(r"refused: (\w+)", training) == ["REPLICA"] * 2
    weights = re.findall(r"weights: (\S+)", training)
    assert len(weights) == 2 and len(set(weights)) == 1


@pytest.mark.forked
@pytest.mark.parametrize("die", ["", pytest.param("2 1 5", marks=pytest.mark.nightly)])
def test_second_training_of_a_script_runs_in_a_world_without_lost_workers(
    job: Any, tmp_path: Path, die: str
):
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    training = job("-np 2 --min-np 1", ["python", script, *filter(None, [die])])
    if die:
        assert training.wait(60) == 1
        assert wording.ENDED_SCRIPT_TRAINED_BEFORE in training.output
    else:
        training.succeed()
    found = re.findall(r"training (\d) (.+)", training.output)
    assert found.count(("1", "140.0")) == 2
    assert found.count(("2", "140.0")) == (0 if die else 2)


@pytest.mark.nightly
def test_worker_frozen_in_a_second_training_ends_the_job(job: Any, tmp_path: Path):
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    training = job("-np 2 --min-np 1 --idle-timeout 1", ["python", script, "freezes in 2"])
    assert training.wait(120) == 1
    assert wording.CODE_RUNS_AFTER_TRAINING in training.output


@pytest.mark.nightly
def test_fully_sharded_layers_train_as_in_one_process(job: Any):
    found = job("-np 2", ["python", SCRIPTS / "fully_sharded.py"]).succeed(120)
    offs = [float(each) for each in re.findall(r"off by ([\d.]+)", found)]
    assert len(offs) == 2
    assert max(offs) < 1e-5


def losses(output: str) -> list[str]:
    return re.findall(r"epoch \d+ loss [\d.]+", output)


@pytest.mark.nightly
@pytest.mark.forked
def test_plain_ddp_script_has_the_same_losses_as_under_torchrun(job: Any):
    found = losses(job("-np 2", ["python", EXAMPLES / "ddp_static.py"]).succeed())
    assert found == losses(torchrun(EXAMPLES / "ddp_static.py", env=clean_environment()))
    assert len(found) == 3


@pytest.mark.nightly  # test_losses_equal_an_undisturbed_run_after_kills_and_joins_with_ddp loses rank 0 as well
@pytest.mark.forked
def test_the_elastic_example_continues_after_a_kill(job: Any):
    training = job("-np 3 --min-np 1", ["python", EXAMPLES / "ddp_elastic.py", "--steps", "500"])
    training.wait_for_world(3)
    training.until(lambda: "step 50" in training.output, "step 50")
    training.kill(0)
    assert "step 500" in training.succeed()


@pytest.mark.forked
@pytest.mark.parametrize("how", ["kept", "read"])
def test_script_that_saves_by_its_environment_gets_one_warning_when_slot_0_is_lost(
    job: Any, how: str
):
    """Values kept at import do not follow the world; values that are read each time do."""
    training = job(
        "-np 2 --min-np 1 --blacklist-cooldown-range 100 100",
        ["python", SCRIPTS / "saves_by_local_rank.py", how],
    )
    training.succeed(60)
    saved = re.findall(r"saved (\d) of (\d)", training.output)
    of_two = [(str(step), "2") for step in range(3)]
    of_one = [(str(step), "1") for step in range(3, 8)]
    assert saved == (of_two if how == "kept" else of_two + of_one)
    assert len(re.findall("StaleValueWarning:", training.output)) == 1


@pytest.mark.forked
@pytest.mark.parametrize(
    "how",
    [
        "plain",
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("ddp", "subclass", "spawn")),
    ],
)
def test_a_distributed_sampler_gives_each_sample_once_per_epoch_after_a_loss(job: Any, how: str):
    """Rank 0 of 3 is killed in epoch 1, which the two others begin again."""
    training = job(
        "-np 3 --min-np 1 --blacklist-cooldown-range 100 100",
        ["python", SCRIPTS / "distributed_sampler.py", how],
    )
    training.succeed(90)
    taken: dict[tuple[int, int], list[int]] = {}
    for epoch, size, ids in re.findall(r"took (\d) (\d) ([\d ]+)", training.output):
        taken.setdefault((int(epoch), int(size)), []).extend(map(int, ids.split()))
    whole = list(range(60))
    assert sorted(taken[0, 3]) == whole
    assert [sorted(taken[epoch, 2]) for epoch in (1, 2, 3)] == [whole] * 3
    assert re.findall(r"evaluated (\d+)", training.output) == ["60", "60"]


@pytest.mark.forked
@pytest.mark.nightly
def test_the_elastic_tutorial_loses_rank_0_and_trains_to_its_end(job: Any):
    training = job(
        "-np 3 --min-np 1 --blacklist-cooldown-range 100 100",
        ["python", SCRIPTS / "ddp_tutorial_elastic.py", "30", "2"],
    )
    training.wait_for(r"epoch 2 ", 60)
    training.kill(0)
    training.succeed(60)
    last = re.findall(r"epoch 29 \| steps (\d+)", training.output)
    assert last == ["120", "120"]
