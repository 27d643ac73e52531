"""Train with a loop similar to timm's train.py, whose workers may leave and join. Lines for hvd-elastic have (*).

    elasticrun -np 3 --min-np 1 python examples/timm_elastic.py

The loop uses DDP, autocast, a gradient scaler, clipping, a cosine schedule with warmup, and validation of averaged
weights. Kill any of its processes, even rank 0: training continues in the middle of the epoch. See docs/pytorch.md.
"""

from __future__ import annotations

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elastic

BATCH = 4  # per worker
WARMUP = 20  # steps

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--samples", type=int, default=960)
parser.add_argument("--pause", type=float, default=0.05, help="seconds in each step")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--device", default="cpu", help="cuda: each worker's own GPU (%(default)s)")
options = parser.parse_args()
if options.device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


class Block(nn.Module):
    """A small block of a ConvNet with depthwise convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.BatchNorm2d(width)
        self.scale = nn.Conv2d(width, width, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = images + self.scale(nn.functional.gelu(self.norm(self.mix(images))))
        return found


def schedule(step: int) -> float:
    """Return the factor of warmup and cosine decay. With fewer workers there are more steps, and the last value is
    kept."""
    steps = options.epochs * options.samples / BATCH
    share = min(1.0, step / steps)
    return min(1.0, (step + 1) / WARMUP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


dist.init_process_group()
torch.manual_seed(1)
net = nn.Sequential(
    nn.Conv2d(1, 8, 2, stride=2), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
).to(options.device)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
# Needed for float16, but not for bfloat16.
scaler = torch.amp.GradScaler(options.device, growth_interval=50)
random = torch.Generator().manual_seed(0)
kinds = torch.randint(4, (options.samples,), generator=random)
images = torch.randn(options.samples, 1, 8, 8, generator=random) * 0.3
images += (kinds[:, None, None, None] - 1.5) * torch.linspace(-1, 1, 8)
images, kinds = images.to(options.device), kinds.to(options.device)
data = TensorDataset(images, kinds)
loader = elastic.data.DataLoader(data, batch_size=BATCH, shuffle=True)  # (*) in place of torch's


def validate() -> float:
    """Return the accuracy of the average; each rank evaluates its share."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    average.eval()
    with torch.no_grad():
        right = (average(images[mine]).argmax(1) == kinds[mine]).sum()
    dist.all_reduce(right)
    return float(right / options.samples)


@elastic.run  # (*)
def train(state: elastic.TorchState) -> None:
    optimizer.zero_grad()  # gradients of an interrupted accumulation
    while state.epoch < options.epochs:
        loader.set_epoch(state.epoch)
        model.train()
        for number, (batch, wanted) in enumerate(loader, start=1):
            time.sleep(options.pause)  # leaves time to kill a process
            with torch.autocast(options.device, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(batch), wanted, label_smoothing=0.1)
            scaler.scale(loss / options.accumulate).backward()
            if number % options.accumulate:
                continue
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            average.update_parameters(net)
            state.step += 1
            if state.step % 10 == 0 and dist.get_rank() == 0:
                workers = dist.get_world_size()
                print(f"step {state.step} of {workers} workers, loss {loss:.5f}", flush=True)
            state.commit()  # (*)
        right = validate()
        if dist.get_rank() == 0:
            print(f"epoch {state.epoch} right {right:.3f}", flush=True)
        state.epoch += 1


state = elastic.TorchState(  # (*)
    model=model,
    average=average,
    optimizer=optimizer,
    scheduler=scheduler,
    scaler=scaler,
    loader=loader,
    epoch=0,
    step=0,
)
train(state)
total = sum(each.detach().double().sum().item() for each in average.parameters())
print(f"ended after {state.step} steps with {total:.9f}")
