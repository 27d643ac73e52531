"""Time of a training step: without reduction, with torch's DistributedDataParallel, with ours, in turns."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

import horovod.torch as hvd
from gpu.workers.model import GPT, batch, loss_of
from gpu.workers.notes import SMALL, note, own_gpu

WAYS = os.environ["WAYS"].split(",")
WARM, TIMED = (2, 3) if SMALL else (3, 20)
SECONDS = 10.0  # for the steps of a model; ranks that share a GPU may come to fewer
TRACE = os.environ.get("TRACE")
Step = Callable[[], None]

hvd.init()
device, rank, size = own_gpu(hvd.local_rank()), hvd.rank(), hvd.size()
torch.backends.cuda.matmul.allow_tf32 = True
tokens = batch(hvd.rank()).to(device)


def process_group() -> None:
    """For DDP: torch's own, beside ours."""
    store = TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = hvd.broadcast_object(store.port if store is not None else 0, root_rank=0)
    if store is None:
        store = TCPStore("127.0.0.1", port)
    distributed.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    kept.append(store)


kept: list[object] = []


class ManySmall(torch.nn.Module):
    """1,000 parameters of 4 KB, whose forward is one kernel each."""

    def __init__(self) -> None:
        super().__init__()
        count = 50 if SMALL else 1000
        self.each = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.ones(1024)) for _ in range(count)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.each:
            x = x * parameter
        return x.sum()


def training(way: str, kind: str) -> Step:
    model = (GPT() if kind == "gpt" else ManySmall()).to(device)
    wrapped: torch.nn.Module = model
    if way == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if way == "ours":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    ones = torch.ones(1024, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=not SMALL):
            loss = loss_of(wrapped, tokens) if kind == "gpt" else wrapped(ones)
        loss.backward()
        optimizer.step()

    return step


def timed(step: Step) -> float:
    torch.cuda.synchronize()
    hvd.allreduce(torch.zeros(1), name="together")
    began = time.monotonic()
    step()
    torch.cuda.synchronize()
    return time.monotonic() - began


def profile(step: Step, path: Path) -> None:
    from torch.profiler import ProfilerActivity

    # The made-up CUDA has no profiler's library.
    activities = [ProfilerActivity.CPU] + ([] if SMALL else [ProfilerActivity.CUDA])
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(2):
            step()
            torch.cuda.synchronize()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(path, "wb") as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


if "ddp" in WAYS:
    process_group()
for kind in os.environ["MODELS"].split(","):
    steps = {way: training(way, kind) for way in WAYS}
    for _ in range(WARM):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {way: [] for way in steps}
    began = time.monotonic()
    for number in range(TIMED):
        for way in list(steps)[:: 1 if number % 2 else -1]:
            times[way].append(timed(steps[way]))
        late = torch.tensor(int(time.monotonic() - began > SECONDS))
        if hvd.allreduce(late, op=hvd.Max, name="late"):
            break
    for way, seconds in times.items():
        ordered = sorted(seconds)
        middle = ordered[len(ordered) // 2]
        note(
            "time",
            model=kind,
            way=way,
            rank=rank,
            steps=len(seconds),
            median_ms=middle * 1e3,
            least_ms=ordered[0] * 1e3,
        )
    if TRACE and kind == "gpt":  # on all ranks: they reduce together
        path = Path(TRACE) if rank == 0 else Path(f"trace.{rank}.json.gz")
        profile(steps["ours"], path)
    del steps
    torch.cuda.empty_cache()
note("done")
with contextlib.suppress(Exception):
    if distributed.is_initialized():
        distributed.destroy_process_group()
