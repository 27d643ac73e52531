"""The worker of slot 1 dies, or stops, once for each word of PLACES; slot 0 continues alone until it is back, and notes
when what happened.

before-connect  it has said that it is ready, and never comes to the first communicator init            it is in the
making of the communicator when it goes; the other waits inside NCCL kernel          the other's kernel runs and waits;
its own is queued own-kernel      its own kernel runs and waits; the other's is queued
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

import horovod.torch as hvd
from elastic import PeerLost
from gpu.workers.notes import SLOT, START, note, own_gpu

PLACES = os.environ["PLACES"].split(",")
SIGNAL = signal.Signals[os.environ.get("SIGNAL", "SIGKILL")]
SETTLE_S = float(os.environ.get("SETTLE_S", "1"))  # alone after a loss, until all has gone
ALONE = os.environ["RANKS"] == "1"  # no two ranks can share a communicator here: it ends with one
BUSY_CYCLES = 2_000_000_000  # about a second
GO, KERNEL, OWN_KERNEL, END = range(4)
mine = PLACES[START - 1] if SLOT == 1 and len(PLACES) >= START else ""


def go_down() -> None:
    note("goes", place=mine, start=START)
    os.kill(os.getpid(), SIGNAL)


class NoGroup:
    """In the place of torch's own group: whoever makes it with others is gone, when all have the others' addresses."""

    kind: Any = getattr(c10d, "ProcessGroupNCCL", c10d.Backend)
    Options = kind.Options

    def __new__(cls, store: c10d.Store, rank: int, size: int, options: Any) -> Any:
        if size > 1:
            go_down()
        return cls.kind(store, rank, size, options)


if mine == "init":
    setattr(c10d, "ProcessGroupNCCL", NoGroup)  # noqa: B010 - not for mypy

hvd.init()
worlds_of_two = int(hvd.size() > 1)  # the first may break before this worker trains in it
device = own_gpu(hvd.local_rank())
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 16)).to(device)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters()
)
state = hvd.elastic.TorchState(model, optimizer, step=0, losses=0, here=0)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def watch() -> None:
    """Notes each change of the number of threads, on slot 0."""
    before = 0
    while True:
        now = threads()
        if now != before:
            note("threads", count=now)
            before = now
        time.sleep(0.02)


def settle() -> None:
    """Alone after a loss. Notes what this process and the GPU still hold."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    reserved = torch.cuda.memory_reserved()
    note(
        "settled",
        driver_mb=(total - free - reserved) / 1e6,
        torch_mb=reserved / 1e6,
        allocated_mb=torch.cuda.memory_allocated() / 1e6,
        rss_mb=pages * os.sysconf("SC_PAGESIZE") / 1e6,
        threads=threads(),
    )


def step(state: hvd.elastic.TorchState) -> int:
    """Returns what slot 0 or a victim has said that happens in this step."""
    order = GO
    if hvd.size() > 1 and mine in ("kernel", "own-kernel") and state.here > 5:
        order = KERNEL if mine == "kernel" else OWN_KERNEL
    if SLOT == 0 and state.losses >= len(PLACES) and (ALONE or hvd.size() > 1) and state.here > 5:
        order = END
    order = int(hvd.allreduce(torch.tensor([order]), op=hvd.Max, name="order"))
    optimizer.zero_grad()
    model(torch.ones(8, 256, device=device)).square().mean().backward()
    optimizer.step()
    if order in (KERNEL, OWN_KERNEL):
        if (order == KERNEL) == (SLOT == 1):
            torch.cuda._sleep(BUSY_CYCLES)
        handle = hvd.allreduce_async(torch.ones(100_000, device=device), name="last")
        if SLOT == 1:
            time.sleep(0.3)  # the kernels are where they should be; nothing can be asked about that
            go_down()
        hvd.synchronize(handle)
    float(next(model.parameters()).detach()[0, 0])  # the step is done on the GPU, too
    return order


def formed() -> None:
    """Another world has begun. It may break before this worker trains in it."""
    global worlds_of_two
    worlds_of_two += hvd.size() > 1


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    note("enter", size=hvd.size(), step=state.step)
    if mine == "before-connect":
        go_down()
    if hvd.size() == 1 and worlds_of_two > state.losses:
        state.losses = worlds_of_two  # a planned change makes a larger world, never a smaller one
        first(state)
        settle()
    state.here = 0
    try:
        while True:
            order = first(state) if state.here == 0 else step(state)
            state.step += 1
            state.here += 1
            state.commit()
            if order == END:
                return
            time.sleep(0.01)
    except PeerLost:
        note("raised", size=hvd.size())
        raise


def first(state: hvd.elastic.TorchState) -> int:
    """The first step of a world."""
    order = step(state)
    note("stepped", size=hvd.size())
    return order


state.register_reset_callbacks([formed])
if SLOT == 0:
    threading.Thread(target=watch, daemon=True).start()
train(state)
note("done", losses=state.losses)
