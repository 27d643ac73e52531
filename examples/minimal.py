"""The smallest elastic training: a line is fitted while workers come and go.

    elasticrun -np 4 --min-np 1 python examples/minimal.py

Kill any of its processes, rank 0 too: the others go on from the last commit. Run plainly, it's a world of one.
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
        time.sleep(0.05)  # so that there is time to kill something
        state.commit()  # everyone can return to here


train(elastic.TorchState(model=model, optimizer=optimizer, step=0))
if elastic.rank() == 0:
    print(f"y = {model.weight.item():.2f} x + {model.bias.item():.2f}")
