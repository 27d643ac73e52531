"""A GPT learns random bytes by SGD. The batch of a step is the same whatever the number of ranks, which share it.

STEPS of them, or as many as SECONDS allow: where ranks share a GPU, a reduction takes many turns. Rank 0 writes the
parameters to the file SAVE.
"""

from __future__ import annotations

import hashlib
import os
import time

import torch

import horovod.torch as hvd
from gpu.workers.model import GPT, LEARNING_RATE, batch, loss_of
from gpu.workers.notes import note, own_gpu

STEPS = int(os.environ["STEPS"])
SECONDS = float(os.environ["SECONDS"])
EVERY = 10

hvd.init()
device = own_gpu(hvd.local_rank())
model = GPT().to(device)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9), model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
state = hvd.elastic.TorchState(model, optimizer, step=0)
enough = False
note("made", parameters=sum(p.numel() for p in model.parameters()))


def digest() -> str:
    whole = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole.update(tensor.cpu().numpy().tobytes())
    return whole.hexdigest()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    global enough
    entered = began = time.monotonic()
    while not enough:
        optimizer.zero_grad()
        mine = batch(state.step)[hvd.rank() :: hvd.size()]
        loss = loss_of(model, mine.to(device))
        loss.backward()
        optimizer.step()
        mean = float(hvd.allreduce(loss.detach(), name="loss"))
        state.step += 1
        if state.step % EVERY == 0:
            now = time.monotonic()
            note("step", step=state.step, loss=mean, sha=digest(), ms=(now - began) / EVERY * 1e3)
            state.commit()
            began = time.monotonic()
            over = torch.tensor(int(state.step >= STEPS or began - entered > SECONDS))
            enough = bool(hvd.allreduce(over, op=hvd.Max, name="enough"))


train(state)
flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
assert flat.isfinite().all()
if hvd.rank() == 0:
    torch.save(flat.cpu(), os.environ["SAVE"])
note("done", step=state.step, peak_gpu_mb=torch.cuda.max_memory_allocated() / 1e6)
