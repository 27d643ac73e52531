"""Train with ZeroRedundancyOptimizer (ZeRO-1), and continue when workers are lost or join. See docs/sharded.md.

elasticrun -np 4 --min-np 2 examples/zero_elastic.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import elastic

SIZE, LENGTH, WORDS, WIDTH = 24, 32, 64, 64


def batch(step: int) -> torch.Tensor:
    """Return int64 [share of this rank, LENGTH + 1]; all shares together are the same in every world."""
    random = torch.Generator().manual_seed(step)
    first = torch.randint(WORDS, (SIZE, 1), generator=random)
    stride = torch.randint(1, 4, (SIZE, 1), generator=random)
    words = (first + stride * torch.arange(LENGTH + 1)) % WORDS
    return words[dist.get_rank() :: dist.get_world_size()]


def main(steps: int) -> None:
    dist.init_process_group()
    torch.manual_seed(1)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in "12"]
    network = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
    model = DistributedDataParallel(network)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while state.step < steps:
            words = batch(state.step)
            optimizer.zero_grad()
            found = model(words[:, :-1]).transpose(1, 2)
            loss = nn.functional.cross_entropy(found, words[:, 1:])
            loss.backward()
            optimizer.step()
            state.step += 1
            if state.step % 50 == 0 and dist.get_rank() == 0:
                print(f"step {state.step} loss {loss.item():.4f}, {dist.get_world_size()} workers")
            state.commit()

    train(state)


main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
