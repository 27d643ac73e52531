"""A script written for Horovod only: sampler, DataLoader, a commit every few batches, a callback.

When it commits, a rank appends to ``samples/<worker>`` what it has done since, so that the files hold the committed
history and nothing else. ``DIE`` has pairs of slot and total number of batches at which its first worker dies, or one
later: where the others commit next, they would commit what it has had a part in and has not told. ``FULL`` is the size
of the world to wait for in the second epoch.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import light  # type: ignore[import-not-found]  # noqa: F401
import torch
import torch.nn.functional as F

import horovod.torch as hvd

WORKER = os.environ["ELASTIC_WORKER"]
SLOT, FIRST = WORKER.rpartition(":")[2].split("#")
DIES = dict(pair.split(",") for pair in os.environ.get("DIE", "").split())
DIE_AT = int(DIES.get(SLOT, 0)) if FIRST == "1" else 0
SAMPLES = int(os.environ.get("SAMPLES", "203"))
EPOCHS, BATCH, BATCHES_PER_COMMIT = 2, 4, 5
LR = 0.01


class Numbered(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        return index, torch.full((3,), index / SAMPLES), index % 2


def note(entries: list[dict]) -> None:
    with open(f"samples/{WORKER}", "a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


hvd.init()
Path("samples").mkdir(exist_ok=True)
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=LR * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(Numbered(), seed=7)
loader = torch.utils.data.DataLoader(Numbered(), batch_size=BATCH, sampler=sampler)
done: list[dict] = []  # since the last commit


def on_state_reset() -> None:
    for group in optimizer.param_groups:
        group["lr"] = LR * hvd.size()


def commit(state: hvd.elastic.TorchState) -> None:
    note(done)
    done.clear()
    state.commit()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    done.clear()  # undone
    while state.epoch < EPOCHS:
        offset = state.batch
        for number, (indices, data, target) in enumerate(loader):
            state.batch = offset + number
            # Also for workers that return here.
            waits = (state.epoch, state.batch) >= (1, BATCHES_PER_COMMIT)
            while waits and hvd.size() < int(os.environ.get("FULL", "0")):
                time.sleep(0.01)
                commit(state)
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
            sampler.record_batch(number, BATCH)
            state.total += 1
            done.append({"epoch": state.epoch, "batch": state.batch, "samples": indices.tolist()})
            commits_next = (state.batch + 1) % BATCHES_PER_COMMIT == 0
            if DIE_AT and state.total >= DIE_AT and not commits_next:
                os.kill(os.getpid(), signal.SIGKILL)
            state.batch += 1
            if state.batch % BATCHES_PER_COMMIT == 0:
                commit(state)
        note(done)
        done.clear()
        sampler.set_epoch(state.epoch + 1)
        state.epoch += 1
        state.batch = 0
        state.commit()


state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, total=0
)
state.register_reset_callbacks([on_state_reset])
train(state)
print("done", state.epoch, hvd.size(), optimizer.param_groups[0]["lr"], flush=True)
