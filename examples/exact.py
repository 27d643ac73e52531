r"""Train with bitwise identical results, even if workers join or die: the last line is the same in every run.

    OMP_NUM_THREADS=1 python examples/exact.py
    OMP_NUM_THREADS=1 elasticrun -np 3 --min-np 1 python examples/exact.py          # kill any of its processes
    OMP_NUM_THREADS=1 python -m elastic.chaos exact --mean-time-between-faults 2 -- \
      elasticrun -np 3 --min-np 1 python examples/exact.py

A step has 8 micro-batches, on any number of workers. BatchNorm, dropout and augmentation are reproduced too.
docs/exact.md lists the settings, the checks, and unsupported features.
"""

from __future__ import annotations

import hashlib
import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic
from elastic.data import DataLoader

EPOCHS = int(os.environ.get("EPOCHS", "10"))
DEVICE = os.environ.get("DEVICE", "cpu")
# Pause after each step, which leaves time to kill a process.
PAUSE_S = float(os.environ.get("PAUSE", "0.05"))


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Noise with a bright quarter, which is the label. Pictures are mirrored at random."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = torch.Generator().manual_seed(index)
        picture = torch.randn(1, 8, 8, generator=drawn)
        label = index % 4
        picture[0, label // 2 * 4 :, label % 2 * 4 :][:4, :4] += 1.0
        if torch.rand(()) < 0.5:
            picture, label = picture.flip(-1), label ^ 1
        return picture, label


def main() -> None:
    elastic.init()
    if DEVICE == "cuda":
        torch.cuda.set_device(elastic.local_rank() % torch.cuda.device_count())
        torch.use_deterministic_algorithms(True)  # with CUBLAS_WORKSPACE_CONFIG=:4096:8
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(288, 4),
    ).to(DEVICE)
    shards = elastic.Shards(8, seed=1)
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        shards=shards,
    )
    loader = DataLoader(Pictures(), global_batch_size=64, shuffle=True, seed=1, shards=shards)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while loader.epoch < EPOCHS:
            for step in loader:
                losses = []
                for pictures, labels in shards.over(step):  # this rank's part of the 8
                    loss = F.cross_entropy(model(pictures.to(DEVICE)), labels.to(DEVICE))
                    (loss * loader.weight).backward()
                    losses.append(loss.detach() * loader.weight)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                state.loss = shards.mean(losses)
                time.sleep(PAUSE_S)
                state.commit()
            if elastic.rank() == 0:
                print(
                    f"epoch {loader.epoch}  loss {state.loss:.6f}  workers {elastic.size()}",
                    flush=True,
                )

    train(
        elastic.TorchState(model=model, optimizer=optimizer, shards=shards, loader=loader, loss=0.0)
    )
    if elastic.rank() == 0:
        held = hashlib.sha256()
        for value in model.state_dict().values():
            held.update(value.cpu().numpy().tobytes())
        print(f"after {shards.step} steps the weights are {held.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
