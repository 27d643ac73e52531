"""Trains with `elastic.DiLoCo`. Each worker records every inner step that it takes, the samples of it, and the
digest of the outer parameters after each merge.

``DIE``: who dies, and the position: ``1,16`` is the worker of slot 1, ``HOST leader,16`` the leader of an island if
it is on that host, ``HOST island,16`` all workers of that host. ``AHEAD``: position at which the other workers, or
hosts, wait for that. ``STEPS``: positions to train. ``FULL``: size of the world to wait for at position ``WAIT``.
``ISLANDS``: hosts are islands. ``SHARDED``: the model is sharded over the ranks of an island, with ``COPIES`` of
each shard. ``LATE``: a slot or a host, and the number of own steps after which its workers wait until another
worker has applied ``AWAY`` merges. ``GRACE``: the argument grace_s of `elastic.DiLoCo`. ``TOKENS``: report the
samples of each step. Other variables are arguments of `elastic.DiLoCo`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import torch
import torch.distributed.fsdp

import elastic

WORKER = os.environ["ELASTIC_WORKER"]
HOST = WORKER.rpartition(":")[0]
SLOT = int(WORKER.rpartition(":")[2].partition("#")[0])
STEPS, WAIT, FULL = (int(os.environ[name]) for name in ("STEPS", "WAIT", "FULL"))
WHO, _, AT = os.environ.get("DIE", "").rpartition(",")
RECORDS = Path(os.environ["RECORDS"])
DIED = RECORDS / "died"
ISLANDS, TOKENS = "ISLANDS" in os.environ, "TOKENS" in os.environ
SHARDED = "SHARDED" in os.environ
AHEAD = int(os.environ.get("AHEAD", "-1"))
records = open(RECORDS / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115


def record(**fields: Any) -> None:
    records.write(json.dumps({"pid": os.getpid(), "slot": SLOT, "host": HOST, **fields}) + "\n")


def is_victim() -> bool:
    leads = WHO.startswith(f"{HOST} ") and elastic.island_group().islands.leads
    return leads or str(SLOT) == WHO


def die() -> None:
    DIED.with_suffix(".new").write_text(str(os.getpid()))
    DIED.with_suffix(".new").rename(DIED)
    if WHO.endswith(" island"):
        for path in RECORDS.glob(f"{HOST}-*.pid"):
            if (pid := int(path.read_text())) != os.getpid():
                os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def await_death() -> None:
    until = time.monotonic() + 60.0
    while not DIED.exists():
        assert time.monotonic() < until, "no worker has died"
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # it has been reaped
        assert select.select([os.pidfd_open(int(DIED.read_text()))], [], [], 60.0)[0]


elastic.init()
torch.manual_seed(SLOT)  # the outer parameters become those of rank 0
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
DTYPES: dict[str, torch.dtype | str | None] = {"": None, "bfloat16": torch.bfloat16, "int4": "int4"}
if ISLANDS:
    (RECORDS / f"{HOST}-{SLOT}.pid").write_text(str(os.getpid()))
if SHARDED:
    torch.distributed.init_process_group()
    mesh = elastic.island_mesh("cpu")
    for layer in (model[0], model):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
network: torch.nn.Module = model
if ISLANDS and not SHARDED:
    network = torch.nn.parallel.DistributedDataParallel(model, process_group=elastic.island_group())
diloco = elastic.DiLoCo(
    network,
    inner,
    every=int(os.environ.get("EVERY", "10")),
    fragments=int(os.environ.get("FRAGMENTS", "1")),
    delay=int(os.environ.get("DELAY", "0")),
    grace_s=float(os.environ["GRACE"]) if "GRACE" in os.environ else None,
    dtype=DTYPES[os.environ.get("DTYPE", "")],
)
loader = elastic.data.DataLoader(range(100_000), batch_size=4)


LATE, _, LATE_AT = os.environ.get("LATE", "").rpartition(",")
AWAY = int(os.environ.get("AWAY", "0"))


def wait_for_the_others() -> None:
    until = time.monotonic() + 60.0
    while not list(RECORDS.glob("*.away")):
        assert time.monotonic() < until, "the other workers wait for a late one"
        time.sleep(0.01)


recorded = 0  # merges


def record_merge() -> None:
    """Record a merge since the last call, also one that this worker has received."""
    global recorded
    # A collective of the island with a sharded model, of whose ranks some may have recorded this merge.
    content = digest(diloco.outer) if SHARDED else ""
    if sum(diloco.merged) > recorded:
        recorded = sum(diloco.merged)
        absent = diloco.rounds.absent.get(recorded - 1)
        size = elastic.size()
        content = content or digest(diloco.outer)
        record(what="merge", merged=recorded, digest=content, size=size, absent=absent)
        if AWAY and recorded >= AWAY and LATE not in (str(SLOT), HOST):
            (RECORDS / f"{os.getpid()}.away").touch()


def digest(tensors: Sequence[Any]) -> str:
    whole = [each.detach().full_tensor() if SHARDED else each.detach() for each in tensors]
    content = b"".join(each.numpy().tobytes() for each in whole)
    return hashlib.sha256(content).hexdigest()


@elastic.run
def train(state: elastic.TorchState) -> None:
    global recorded
    record(what="enter", position=diloco.position, own=diloco.own_steps, step=state.step)
    recorded = min(
        recorded, sum(diloco.merged)
    )  # A sharded island may repeat a merge of its last step.
    record_merge()
    for batch in loader:
        while diloco.position >= WAIT and elastic.size() < FULL:
            time.sleep(0.01)
            state.commit()
        if diloco.position == AHEAD and str(SLOT) != WHO and not WHO.startswith(f"{HOST} "):
            await_death()
        if LATE in (str(SLOT), HOST) and str(diloco.own_steps) == LATE_AT:
            wait_for_the_others()
        points = torch.stack([batch.sin(), batch.cos(), (batch / 7).sin(), batch % 3], 1).float()
        inner.zero_grad()
        (network(points) - points.sum(1, keepdim=True)).square().mean().backward()
        inner.step()
        diloco.step(len(batch) if TOKENS else None)
        record(
            what="step",
            own=diloco.own_steps,
            position=diloco.position,
            samples=batch.tolist(),
            inner=digest(diloco.inner),
            merged=sum(diloco.merged),
            island=elastic.island_group().islands.name if ISLANDS else "",
        )
        record_merge()
        state.step += 1
        if str(diloco.position) == AT and not DIED.exists() and is_victim():
            die()
        state.commit()
        if diloco.position >= STEPS:
            return


state = elastic.TorchState(
    diloco=diloco, loader=loader, step=0, copies=int(os.environ.get("COPIES", "1"))
)
train(state)
record(what="end", position=diloco.position, step=state.step, merged=diloco.merged)
