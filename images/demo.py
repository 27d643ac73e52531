"""Fit a line in the given number of steps, with a pause after each that leaves time to kill a process: demo.py
STEPS"""

from __future__ import annotations

import sys
import time

import torch

import horovod.torch as hvd

steps = int(sys.argv[1])
hvd.init()
model = torch.nn.Linear(1, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters()
)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < steps:
        x = torch.rand(32, 1)
        loss = torch.nn.functional.mse_loss(model(x), 3 * x + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.step += 1
        if state.step % 20 == 0 and hvd.rank() == 0:
            print(f"step {state.step}, {hvd.size()} workers, loss {loss.item():.6f}", flush=True)
        time.sleep(0.05)
        state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
if hvd.rank() == 0:
    print(f"y = {model.weight.item():.2f} x + {model.bias.item():.2f}")
