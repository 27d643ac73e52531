"""Training script of the fault matrix: a small model over whole epochs of a small dataset, until a file exists.

It has failpoints (see `elastic.failpoints`) and checks itself: every sample of an epoch is trained once, except for at
most size - 1 repeats that fill the last round, and no process returns to a state before its own last commit.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from harness.scripts import light  # noqa: F401

# isort: split
import torch

import elastic
from elastic.failpoints import failpoint
from elastic.optimizer.gradients import gradient_reducer
from stress.fault_matrix.watched_state import BATCH, SAMPLES, STEP_S, WatchedState, inputs, wanted

EVALUATE_EVERY = 3  # steps

gradient_reducer.FIRST_BYTES = gradient_reducer.FULL_BYTES = (
    64  # several buckets for a few parameters
)


def one_step(state: WatchedState, batch: list[int]) -> None:
    state.optimizer.zero_grad()
    # Divided by the whole dataset, so that the loss does not depend on the number of workers.
    loss = (state.model(inputs[batch]) - wanted[batch]).square().sum() / SAMPLES
    loss.backward()
    state.optimizer.step()
    trained = elastic.allgather(torch.tensor(batch), name="trained").tolist()
    state.seen = [*state.seen, *trained]
    state.repeats = elastic.size() - 1
    state.step += 1


def evaluate(state: WatchedState) -> None:
    with torch.no_grad():
        failpoint("evaluation")
        loss = (state.model(inputs) - wanted).square().mean()
    mean = elastic.allreduce(loss, name="evaluation")
    assert torch.isfinite(mean), mean


def one_epoch(state: WatchedState) -> None:
    indices = list(state.sampler)
    for number, start in enumerate(range(0, len(indices), BATCH)):
        batch = indices[start : start + BATCH]
        if end_requested():
            raise Ended
        one_step(state, batch)
        state.sampler.record_batch(number, len(batch))
        time.sleep(STEP_S)
        state.commit()
        if state.step % EVALUATE_EVERY == 0:
            evaluate(state)
    assert set(state.seen) == set(range(SAMPLES)), sorted(set(range(SAMPLES)) - set(state.seen))
    repeats = len(state.seen) - SAMPLES
    assert repeats <= state.repeats, f"{repeats} repeats in epoch {state.epoch}: {state.seen}"
    state.epoch, state.seen = state.epoch + 1, []
    state.sampler.set_epoch(state.epoch)
    state.commit()


class Ended(Exception):
    """The file exists."""


def end_requested() -> bool:
    """Return whether to end: rank 0 checks the file, and all end at the same step."""
    found = torch.tensor([float(elastic.rank() == 0 and os.path.exists(OVER))])
    return bool(elastic.allreduce(found, op=elastic.Max, name="over").item())


def main() -> None:
    failpoint("before-init")
    elastic.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model.register_forward_hook(lambda *_: failpoint("forward") if model.training else None)
    optimizer: Any = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        named_parameters=model.named_parameters(),
        op=elastic.Sum,
    )
    sampler = elastic.ElasticSampler(range(SAMPLES), shuffle=True)
    state = WatchedState(
        model=model, optimizer=optimizer, sampler=sampler, step=0, epoch=0, seen=[], repeats=0
    )
    state.register_reset_callbacks([lambda: failpoint("reset")])

    @elastic.run
    def train(state: WatchedState) -> None:
        state.watch()
        try:
            while True:
                one_epoch(state)
        except Ended:
            return

    train(state)
    elastic.shutdown()
    print("the end", flush=True)


if __name__ == "__main__":
    OVER = sys.argv[1]
    main()
