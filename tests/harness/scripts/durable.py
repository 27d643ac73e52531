"""Trains until a file ends it. Its weights depend only on the step, so that they can be compared."""

import hashlib
import os
import sys
from pathlib import Path

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic

elastic.init()
folder = Path(os.environ.get("ENOUGH") or os.environ["ELASTIC_CHECKPOINT_DIR"])
torch.manual_seed(1)
width = int(os.environ.get("WIDTH", "50"))
net = torch.nn.Linear(50, width)
optimizer = elastic.DistributedOptimizer(torch.optim.Adam(net.parameters()))
state = elastic.TorchState(model=net, optimizer=optimizer, step=0, seen="")


def digest() -> str:
    return hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest()


checkpoints = elastic.Checkpoints()


@elastic.run
def train(state):
    if elastic.rank() == 0:
        print("rank 0 begins at", state.step, flush=True)
        if state.step:
            print("the same bits" if state.seen == digest() else "other bits", flush=True)
    loaders = int(os.environ.get("LOADERS", "0"))
    numbers = torch.utils.data.TensorDataset(torch.arange(10**5))
    loader = torch.utils.data.DataLoader(numbers, num_workers=loaders)
    batches = iter(loader if loaders else ())
    while True:
        if loaders:
            next(batches)
        optimizer.zero_grad()
        torch.manual_seed(state.step)
        net(torch.randn(4, 50)).square().sum().backward()
        optimizer.step()
        state.step += 1
        if os.environ.get("FLIP") == str(elastic.rank()) and state.step == 15:
            net.bias.detach().view(torch.int32)[7] ^= 1 << 9
        state.seen = digest()
        state.commit()
        over = elastic.allreduce(torch.tensor(float((folder / "enough").exists())), name="over")
        if over:
            if elastic.rank() == 0:
                print("rank 0 ends at", state.step, flush=True)
            return
        if state.step in (5, 10):
            checkpoints.save()


train(state)
sys.exit(0)
