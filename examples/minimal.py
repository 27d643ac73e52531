"""Fit a line while workers join and leave: the smallest elastic training script.

    elasticrun -np 4 --min-np 1 python examples/minimal.py

Kill any of its processes, even rank 0: the others continue from the last commit. Without elasticrun, it trains alone.
"""

from __future__ import annotations

import time

import torch

import elastic

elastic.init()
model = torch.nn.Linear(1, 1)
optimizer = elastic.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
)


@elastic.run
def train(state: elastic.TorchState) -> None:
    while state.step < 200:
        x = torch.rand(32, 1)
        loss = torch.nn.functional.mse_loss(model(x), 3 * x + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.step += 1
        if state.step % 20 == 0 and elastic.rank() == 0:
            print(f"step {state.step}  loss {loss.item():.5f}  workers {elastic.size()}")
        time.sleep(0.05)  # leaves time to kill a process
        state.commit()  # all workers can return to this point


train(elastic.TorchState(model=model, optimizer=optimizer, step=0))
if elastic.rank() == 0:
    print(f"y = {model.weight.item():.2f} x + {model.bias.item():.2f}")
