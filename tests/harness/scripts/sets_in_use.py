"""Uses process sets at every step, as a script for Horovod does: static ones, ones made of ``size()``, and one that the
training function adds anew whenever it starts.

What each set gathered is appended to ``history/<worker>.jsonl``. ``DIE`` has pairs of slot and step: the first worker
of the slot dies there, with the others of its sets in a collective, once all that die at this step have come so far.
``HOLD``: a step and the size to wait for.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import horovod.torch as hvd
from elastic.runtime import lifecycle

WORKER = os.environ["ELASTIC_WORKER"]
SLOT, START = map(int, WORKER.rpartition(":")[2].split("#"))
STEPS = int(os.environ["STEPS"])
PAIRS = [pair.split(",") for pair in os.environ["DIE"].split()]
DIE = {int(slot): int(step) for slot, step in PAIRS}
DIES_AT = DIE.get(SLOT, STEPS) if START == 1 else STEPS
HOLD = {int(step): int(size) for step, size in map(str.split, os.environ["HOLD"].split(";"))}

first = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[first])
even = hvd.add_process_set(range(0, hvd.size(), 2))
odd = hvd.add_process_set(range(1, hvd.size(), 2))
Path("history").mkdir(exist_ok=True)


def die() -> None:
    Path(f"history/dying-{SLOT}").touch()
    together = [Path(f"history/dying-{slot}") for slot, step in DIE.items() if step == DIES_AT]
    deadline = time.monotonic() + 20
    while not all(each.exists() for each in together) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: hvd.elastic.ObjectState) -> None:
    late = hvd.add_process_set([1, 2, 3])
    state.sets = [first, late]  # copied at every commit, and sent to newcomers
    sets = {"first": first, "even": even, "odd": odd, "late": late}
    while state.step < STEPS:
        while hvd.size() < HOLD.get(state.step, 0):
            time.sleep(0.01)
            state.commit()
        seen = {}
        for name, each in sets.items():
            if not each.included():
                continue
            # Not only at that step: another rank may have committed it, and all continue from there.
            if name == "late" and state.step >= DIES_AT:
                die()
            rank = torch.tensor([hvd.rank()])
            seen[name] = hvd.allgather(rank, name=name, process_set=each).tolist()
            total = hvd.allreduce(rank, op=hvd.Sum, name=name, process_set=each)
            assert total.tolist() == [sum(seen[name])]
            ones = torch.ones(each.size() or 0, dtype=torch.int32)
            rows = torch.full_like(ones, hvd.rank())
            swapped, _ = hvd.alltoall(rows, ones, name, process_set=each)
            assert swapped.tolist() == seen[name]
        record = {
            "worker": WORKER,
            "generation": lifecycle.current().generation,
            "step": state.step,
            "rank": hvd.rank(),
            "size": hvd.size(),
            "sets": {name: [each.process_set_id, each.ranks] for name, each in sets.items()},
            "seen": seen,
        }
        with open(f"history/{WORKER}.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        assert state.sets == [first, late]
        state.step += 1
        state.commit()


train(hvd.elastic.ObjectState(step=0, sets=[]))
