"""Trains with `elastic.DiLoCo`. Each worker records every inner step that it takes, the samples of it, and the digest
of the outer parameters after each merge.

``DIE``: slot and position at which to die. ``AHEAD``: position at which the other workers wait for that. ``STEPS``:
positions to train. ``FULL``: size of the world to wait for at position ``WAIT``. Other variables are arguments of
`elastic.DiLoCo`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic

WORKER = os.environ["ELASTIC_WORKER"]
SLOT = int(WORKER.rpartition(":")[2].partition("#")[0])
STEPS, WAIT, FULL = (int(os.environ[name]) for name in ("STEPS", "WAIT", "FULL"))
DIE, DIED = os.environ.get("DIE", ""), Path(os.environ["RECORDS"]) / "died"
AHEAD = int(os.environ.get("AHEAD", "-1"))
records = open(Path(os.environ["RECORDS"]) / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115


def record(**fields: Any) -> None:
    records.write(json.dumps({"pid": os.getpid(), "slot": SLOT, **fields}) + "\n")


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
inner = torch.optim.AdamW(model.parameters(), lr=0.01)
diloco = elastic.DiLoCo(
    model,
    inner,
    every=int(os.environ.get("EVERY", "10")),
    fragments=int(os.environ.get("FRAGMENTS", "1")),
    delay=int(os.environ.get("DELAY", "0")),
    dtype=DTYPES[os.environ.get("DTYPE", "")],
)
loader = elastic.data.DataLoader(range(100_000), batch_size=4)


recorded = 0  # merges


def record_merge() -> None:
    """Record a merge since the last call, also one that this worker has received."""
    global recorded
    if sum(diloco.merged) > recorded:
        recorded = sum(diloco.merged)
        content = b"".join(each.detach().numpy().tobytes() for each in diloco.outer)
        digest = hashlib.sha256(content).hexdigest()
        record(what="merge", merged=recorded, digest=digest, size=elastic.size())


@elastic.run
def train(state: elastic.TorchState) -> None:
    record(what="enter", position=diloco.position, own=diloco.own_steps, step=state.step)
    record_merge()
    for batch in loader:
        while diloco.position >= WAIT and elastic.size() < FULL:
            time.sleep(0.01)
            state.commit()
        if diloco.position == AHEAD and not DIE.startswith(f"{SLOT},"):
            await_death()
        points = torch.stack([batch.sin(), batch.cos(), (batch / 7).sin(), batch % 3], 1).float()
        inner.zero_grad()
        (model(points) - points.sum(1, keepdim=True)).square().mean().backward()
        inner.step()
        diloco.step()
        record(what="step", own=diloco.own_steps, position=diloco.position, samples=batch.tolist())
        record_merge()
        state.step += 1
        if f"{SLOT},{diloco.position}" == DIE and not DIED.exists():
            DIED.with_suffix(".new").write_text(str(os.getpid()))
            DIED.with_suffix(".new").rename(DIED)
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
        if diloco.position >= STEPS:
            return


state = elastic.TorchState(diloco=diloco, loader=loader, step=0)
train(state)
record(what="end", position=diloco.position, step=state.step, merged=diloco.merged)
