"""Trains 30 steps of torch and never calls commit(): the first kind of mistake."""

from __future__ import annotations

import torch

import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))


@hvd.elastic.run
def train(state):
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.ones(4, 4)).square().mean().backward()
        optimizer.step()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer))
