"""The reference of gpt.py: the same steps with torch only, the whole batch on one GPU. Compares its parameters at
the end with those in the file SAVE.
"""

import os

import torch

from gpu.workers.model import GPT, LEARNING_RATE, batch, loss_of
from gpu.workers.notes import note, own_gpu

STEPS = int(os.environ["STEPS"])

device = own_gpu(0)
model = GPT().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
for step in range(STEPS):
    optimizer.zero_grad()
    loss = loss_of(model, batch(step).to(device))
    loss.backward()
    optimizer.step()
    if (step + 1) % 10 == 0:
        note("step", step=step + 1, loss=float(loss))
flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
theirs = torch.load(os.environ["SAVE"]).to(device)
note("done", differ_by=float((theirs - flat).norm() / flat.norm()))
