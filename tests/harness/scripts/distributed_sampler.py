"""A plain DataLoader with a DistributedSampler: ``distributed_sampler.py plain|subclass|spawn|ddp``. Rank 0 dies once.

Prints ``took EPOCH SIZE ID ...`` for each batch, in the step in which it was trained on, and ``evaluated COUNT``: how
many samples a sampler with ``num_replicas=1`` has.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import horovod.torch as hvd

HOW = sys.argv[1]
SAMPLES, EPOCHS, DIES_IN = 60, 4, 1


class Ours(DistributedSampler[Any]):
    """Reads rank and size in its own method."""

    def __iter__(self) -> Any:
        return iter(range(self.rank, self.total_size, self.num_replicas))


def main() -> None:
    hvd.init()
    model: Any = torch.nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
    dataset = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32)[:, None])
    sampler: Any
    if HOW == "ddp":
        torch.distributed.init_process_group()
        model, sampler = DistributedDataParallel(model), DistributedSampler(dataset)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        kind: Any = Ours if HOW == "subclass" else DistributedSampler
        sampler = kind(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    workers: dict[str, Any] = {}
    if HOW != "ddp":
        method = "spawn" if HOW == "spawn" else "fork"
        workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": method}
    loader = DataLoader(dataset, batch_size=5, sampler=sampler, **workers)
    whole = DataLoader(dataset, sampler=DistributedSampler(dataset, num_replicas=1, rank=0))

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < EPOCHS:
            sampler.set_epoch(state.epoch)
            for number, (samples,) in enumerate(loader):
                if (state.epoch, number, hvd.rank(), hvd.size()) == (DIES_IN, 2, 0, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(samples).square().mean().backward()
                optimizer.step()
                ids = " ".join(str(int(each)) for each in samples[:, 0])
                print(f"took {state.epoch} {hvd.size()} {ids}", flush=True)
                state.commit()
            state.epoch += 1
        print(f"evaluated {len(whole)}", flush=True)

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0))


if __name__ == "__main__":
    main()
