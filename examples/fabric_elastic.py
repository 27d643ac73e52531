"""Train with a Fabric loop whose workers may leave and join. The lines for hvd-elastic are marked by (*).

    elasticrun -np 3 --min-np 1 python examples/fabric_elastic.py

Kill any of its processes, even rank 0: training continues in the middle of the epoch. See docs/lightning.md.
"""

from __future__ import annotations

import argparse
import time

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import TensorDataset

import elastic
from elastic.integrations.lightning import ElasticFabricStrategy

BATCH = 4  # per worker

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=960)
parser.add_argument("--pause", type=float, default=0.05, help="seconds in each step")
options = parser.parse_args()

seed_everything(1)
fabric = Fabric(accelerator="cpu", strategy=ElasticFabricStrategy())  # (*)
fabric.launch()
inputs = torch.randn(options.samples, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
# The schedule raises after its last step; the number of steps of one worker is enough for any number of workers.
most = options.epochs * -(-options.samples // BATCH)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=most)
loader = elastic.data.DataLoader(data, batch_size=BATCH, shuffle=True)  # (*)


@elastic.run  # (*)
def train(state: elastic.TorchState) -> None:
    while state.epoch < options.epochs:
        loader.set_epoch(state.epoch)
        for batch, target in loader:
            time.sleep(options.pause)  # leaves time to kill a process
            loss = torch.nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()
            state.step += 1
            if state.step % 10 == 0:
                fabric.print(f"step {state.step} of {fabric.world_size} workers")
            state.commit()  # (*)
        state.epoch += 1


state = elastic.TorchState(  # (*)
    model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, epoch=0, step=0
)
train(state)
total = sum(each.detach().double().sum().item() for each in net.parameters())
assert scheduler.last_epoch == state.step
print(f"ended after {state.step} steps with {total:.9f}")
