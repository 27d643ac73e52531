"""Trains on an `elastic.data.DataLoader`. A weight for each sample, of which a step takes 1 from those of its samples:
so at the end every weight says how often its sample counts.

``DIE`` has pairs of slot and total number of batches at which to die. ``FULL`` is the size of the world to wait for in
the second epoch. ``STREAM``: the samples come as a stream.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic

SLOT = int(os.environ["ELASTIC_WORKER"].rpartition(":")[2].partition("#")[0])
SAMPLES, EPOCHS, BATCH, ACCUMULATE, BATCHES_PER_COMMIT = 203, 2, 4, 2, 3


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


elastic.init()
model = torch.nn.ParameterList([torch.zeros(SAMPLES, dtype=torch.float64)])
optimizer = elastic.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=ACCUMULATE,
    op=elastic.Sum,
)
streams = bool(os.environ.get("STREAM"))
loader = elastic.data.DataLoader(
    Stream() if streams else range(SAMPLES),
    batch_size=BATCH,
    shuffle=not streams,
    num_workers=int(os.environ.get("LOADER_WORKERS", "0")),
)


@elastic.run
def train(state: elastic.TorchState) -> None:
    pending = 0
    while state.epoch < EPOCHS:
        loader.set_epoch(state.epoch)
        for batch in loader:
            while state.epoch == 1 and elastic.size() < int(os.environ.get("FULL", "0")):
                time.sleep(0.01)
                state.commit()  # before the step of this batch
            model[0][batch].sum().backward()
            pending += 1
            if pending == ACCUMULATE:
                optimizer.step()
                optimizer.zero_grad()
                pending = 0
            state.batches += 1
            if f"{SLOT},{state.batches}" in os.environ.get("DIE", "").split():
                os.kill(os.getpid(), signal.SIGKILL)
            if state.batches % BATCHES_PER_COMMIT == 0:
                state.commit()  # half of them in the middle of an accumulation
        if pending:
            optimizer.step()
            optimizer.zero_grad()
            pending = 0
        state.epoch += 1
        state.commit()


state = elastic.TorchState(model, optimizer, loader=loader, epoch=0, batches=0)
train(state)
counted = sorted(set((-model[0]).tolist()))
print("each sample counts", counted, "size", elastic.size(), flush=True)
