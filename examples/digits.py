"""Classify handwritten digits (scikit-learn's 1,797 images of 8 x 8). The script uses only Horovod's API.

    elasticrun -np 4 --min-np 1 python examples/digits.py
    python examples/kill_workers.py -- python examples/digits.py      # the same, with random SIGKILLs

The script prints the test accuracy at the end, and exits with 1 if it is below --target.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--target", type=float, default=0.97, help="test accuracy to reach")
args = parser.parse_args()

hvd.init()
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
digits = torch.tensor(labels)
order = torch.randperm(len(digits))
train_set = TensorDataset(pixels[order[360:]], digits[order[360:]])
test_pixels, test_digits = pixels[order[:360]], digits[order[:360]]

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=args.lr), named_parameters=model.named_parameters()
)
sampler = hvd.elastic.ElasticSampler(train_set, shuffle=True)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)


@torch.no_grad()
def accuracy() -> float:
    """Return the accuracy on the whole test set; every worker computes the same."""
    model.eval()
    right = (model(test_pixels).argmax(1) == test_digits).float().mean()
    model.train()
    return float(right)


def step(x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> float:
    while state.epoch < args.epochs:
        for batch, (x, y) in enumerate(loader):
            step(x, y)
            state.sampler.record_batch(batch, args.batch_size)
            state.commit()
        if hvd.rank() == 0:
            print(
                f"epoch {state.epoch + 1:2}/{args.epochs}  test accuracy {accuracy():.1%}  {hvd.size()} workers"
            )
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return accuracy()


reached = train(hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0))
if hvd.rank() == 0:
    print(f"test accuracy {reached:.1%} (wanted: {args.target:.0%})")
if reached < args.target:
    sys.exit(1)
