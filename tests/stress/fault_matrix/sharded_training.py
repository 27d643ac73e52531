"""Training script of the fault matrix for the phases of a sharded state: a small FSDP2 model, until a file exists.

Like `training`, it checks itself: every sample of an epoch is trained once, and no process returns to a state before
its own last commit. Shards have no replicas to compare with, so each commit contains checksums of the gathered
parameters, which the driver compares.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic
from elastic.failpoints import failpoint
from stress.fault_matrix.watched_state import BATCH, SAMPLES, STEP_S, WatchedState, inputs, wanted


class Checksums(nn.Module):
    """Checksums of gathered parameters, as a parameter of which every rank has all."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.sums = nn.Parameter(torch.zeros(count, dtype=torch.float64), requires_grad=False)

    @torch.no_grad()
    def take(self, model: nn.Module) -> None:
        for number, parameter in enumerate(model.parameters()):
            whole = parameter.full_tensor()  # type: ignore[attr-defined]
            weights = torch.arange(1, whole.numel() + 1, dtype=torch.float64)
            self.sums[number] = whole.double().flatten() @ weights


def one_step(state: WatchedState) -> None:
    """Train the next samples of the epoch, as many on each rank as are left."""
    rank, size = elastic.rank(), elastic.size()
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(state.epoch)).tolist()
    batch = order[state.at : state.at + BATCH * size][rank::size]
    state.optimizer.zero_grad()
    # Divided by the whole dataset, so that the loss does not depend on the number of workers. FSDP2 averages gradients.
    loss = (state.model(inputs[batch]) - wanted[batch]).square().sum() * size / SAMPLES
    loss.backward()
    state.optimizer.step()
    trained: list[list[int]] = [[] for _ in range(size)]
    dist.all_gather_object(trained, batch)
    state.seen = [*state.seen, *itertools.chain(*trained)]
    state.at += BATCH * size
    state.step += 1
    if state.at >= SAMPLES:
        assert sorted(state.seen) == list(range(SAMPLES)), f"epoch {state.epoch}: {state.seen}"
        state.epoch, state.at, state.seen = state.epoch + 1, 0, []


def end_requested() -> bool:
    """Return whether to end: rank 0 checks the file, and all end at the same step."""
    found = torch.tensor([float(elastic.rank() == 0 and os.path.exists(OVER))])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def main() -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3))
    fully_shard(model[0])
    fully_shard(model)
    model.register_forward_hook(lambda *_: failpoint("forward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    checksums = Checksums(len([*model.parameters()]))
    state = WatchedState(
        model=model, optimizer=optimizer, checksums=checksums, step=0, epoch=0, at=0, seen=[]
    )

    @elastic.run
    def train(state: WatchedState) -> None:
        state.watch()
        while not end_requested():
            one_step(state)
            checksums.take(model)
            time.sleep(STEP_S)
            state.commit()

    train(state)
    elastic.shutdown()
    print("the end", flush=True)


if __name__ == "__main__":
    OVER = sys.argv[1]
    main()
