"""Cost of a commit: training steps with and without one after each, for MEGABYTES of state. With ROOM=0 the GPU's
memory is taken before, but for a little, so that no copy fits on it.
"""

from __future__ import annotations

import os
import time

import psutil
import torch

import horovod.torch as hvd
from gpu.workers.notes import SMALL, note, own_gpu

MEGABYTES = float(os.environ["MEGABYTES"])
ROOM = os.environ["ROOM"] == "1"
STEPS = 3 if SMALL else 8
EACH = 1 << (16 if SMALL else 22)  # elements of a parameter: 16 MiB

hvd.init()
device = own_gpu(0)
count = max(1, round(MEGABYTES * 1e6 / (8 * EACH)))  # four bytes of each, and four of momentum
model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(EACH)) for _ in range(count)]).to(
    device
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
work = torch.randn(256 if SMALL else 8192, 256 if SMALL else 8192, device=device)


def step() -> None:
    """Some tens of milliseconds of the GPU, and every byte of the state is written."""
    product = work
    for _ in range(2 if SMALL else 4):
        product = product @ work
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def host_mb() -> float:
    return float(psutil.Process().memory_info().rss / 1e6)


def pinned_mb() -> float | None:
    """What torch holds in pinned host memory, rounded up as it is."""
    numbers: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
    found = [
        numbers[name]
        for name in ("allocated_bytes.current", "segment_bytes.current")
        if name in numbers
    ]
    return max(found) / 1e6 if found else None


step()
torch.cuda.synchronize()
optimizer.zero_grad()
before_mb = host_mb()
filling = None
if not ROOM:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    state_bytes = count * EACH * 8
    left = 1.5 * state_bytes + (8e6 if SMALL else 1e9)  # for gradients and what a step allocates
    if free > left:
        filling = torch.empty(int(free - left), dtype=torch.uint8, device=device)
state = hvd.elastic.TorchState(model, optimizer, step=0)
blocked: list[float] = []


def run(commits: bool) -> list[float]:
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.monotonic()
        step()
        if commits:
            called = time.monotonic()
            state.commit()
            blocked.append(time.monotonic() - called)
        step()  # what a copy on its way holds up
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return seconds


run(False)
plain = run(False)
began = time.monotonic()
state.commit()
first_s = time.monotonic() - began
step()
began = time.monotonic()
state.commit()
second_s = time.monotonic() - began
blocked.clear()
committed = run(True)
kept = [parameter.detach().clone() for parameter in list(model.parameters())[:2]]
state.commit()
step()
state.restore()
for a, b in zip(kept, list(model.parameters())[:2], strict=True):
    assert torch.equal(a, b.detach()), "restore() brought other bits"
middle = STEPS // 2
note(
    "cost",
    state_mb=round(count * EACH * 8 / 1e6, 1),
    room=ROOM,
    filled_mb=0 if filling is None else round(filling.nbytes / 1e6),
    two_steps_ms=round(sorted(plain)[middle] * 1e3, 2),
    stall_ms=round((sorted(committed)[middle] - sorted(plain)[middle]) * 1e3, 2),
    blocked_ms=round(sorted(blocked)[middle] * 1e3, 2),
    first_ms=round(first_s * 1e3, 1),
    second_ms=round(second_s * 1e3, 1),
    pinned_mb=pinned_mb(),
    host_mb=round(host_mb() - before_mb, 1),
    gpu_mb=round(torch.cuda.max_memory_allocated() / 1e6),
)
note("done")
