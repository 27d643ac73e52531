"""At step 5 the GPU of the ranks in VICTIMS fails with FAULT: once in each slot.

assert   an index out of range: torch's kernel asserts (710), the script's own fault illegal  a kernel uses memory that
was given back to the driver (700), which is a hardware error to torch

Gradients travel over NCCL, or with APART=1 only losses do, over the CPU: for one GPU and an NCCL that can't share it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

import horovod.torch as hvd
from gpu.workers.notes import START, note, own_gpu

STEPS = 12
VICTIMS = [int(rank) for rank in os.environ["VICTIMS"].split(",")]
FAULT = os.environ["FAULT"]
APART = os.environ.get("APART") == "1"

hvd.init()
device = own_gpu(hvd.local_rank())
torch.manual_seed(0)
model = torch.nn.Linear(64, 8).to(device)
descent = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = descent if APART else hvd.DistributedOptimizer(descent, model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0)


def fail() -> None:
    note("fails", fault=FAULT)
    if FAULT == "assert":
        torch.index_select(model.weight, 0, torch.tensor([1 << 20], device=device))
    else:
        lent = torch.zeros(64 << 20, dtype=torch.uint8, device=device)  # an allocation of its own
        torch.cuda.synchronize()
        maps = Path("/proc/self/maps").read_text().split()
        runtime = ctypes.CDLL(next(word for word in maps if "libcudart" in word))
        runtime.cudaFree(ctypes.c_void_p(lent.data_ptr()))
        lent.add_(1)
    torch.cuda.synchronize()
    note("survived")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    note("enter", size=hvd.size(), step=state.step)
    while state.step < STEPS:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        value = loss.detach()
        hvd.allreduce(value.cpu() if APART else value, name="loss")
        if state.step == 5 and START == 1 and hvd.rank() in VICTIMS:
            fail()
        state.step += 1
        state.commit()


try:
    train(state)
except Exception as error:
    note("error", kind=type(error).__name__, code=getattr(error, "error_code", None))
    raise
note("done", size=hvd.size())
