"""Train with an Accelerate loop whose workers may leave and join. The three lines for hvd-elastic are marked by (*).

    elasticrun -np 3 --min-np 1 python examples/accelerate_elastic.py

Kill any of its processes, even rank 0: training continues in the middle of the epoch. See docs/transformers.md.
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import elastic
from elastic.integrations.accelerate import PreparedState

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=960)
parser.add_argument("--pause", type=float, default=0.05, help="seconds in each step")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--device", default="cpu", help="cuda: each worker's own GPU (%(default)s)")
options = parser.parse_args()

set_seed(1)
accelerator = Accelerator(
    cpu=options.device == "cpu", gradient_accumulation_steps=options.accumulate
)
inputs = torch.randn(options.samples, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer, loader, scheduler = accelerator.prepare(
    net,
    adam,
    DataLoader(data, batch_size=4, shuffle=True),
    torch.optim.lr_scheduler.StepLR(adam, 300, 0.7),
)


@elastic.run  # (*)
def train(state: PreparedState) -> None:
    while state.epoch < options.epochs:
        for batch, target in loader:
            time.sleep(options.pause)  # leaves time to kill a process
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                state.step += 1
                if state.step % 10 == 0:
                    workers = accelerator.num_processes
                    accelerator.print(f"step {state.step} of {workers} workers, loss {loss:.5f}")
                state.commit()  # (*)
        accelerator.print(f"epoch {state.epoch} is over")
        state.epoch += 1


state = PreparedState(accelerator, model=model, loader=loader, epoch=0, step=0)  # (*)
train(state)
total = sum(each.detach().double().sum().item() for each in net.parameters())
print(f"ended after {state.step} steps with {total:.9f}")
