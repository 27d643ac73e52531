"""init, a few collectives, shutdown: a hundred times in one process, with a count of what it holds after each."""

from __future__ import annotations

import json
import os
import statistics
import threading

import torch

import horovod.torch as hvd

CYCLES = 100
SETTLED = 30  # memory is measured from here on

torch.set_num_threads(1)


def resident_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def grown_per_cycle(kb: list[int]) -> float:
    """Return the Theil-Sen slope: the median of the slopes of all pairs, which single jumps do not affect."""
    pairs = [(j - i, kb[j] - kb[i]) for i in range(len(kb)) for j in range(i + 5, len(kb))]
    return statistics.median(grown / cycles for cycles, grown in pairs)


descriptors, threads, tasks, resident = [], [], [], []
for _ in range(CYCLES):
    hvd.init()
    size = hvd.size()
    assert hvd.allreduce(torch.ones(8), op=hvd.Sum, name="sum")[0] == size
    handles = [hvd.allreduce_async(torch.ones(4), name=f"mean {n}") for n in range(4)]
    assert all(hvd.synchronize(handle)[0] == 1 for handle in handles)
    assert len(hvd.allgather(torch.ones(2))) == 2 * size
    hvd.shutdown()
    assert not hvd.is_initialized()
    descriptors.append(len(os.listdir("/proc/self/fd")))
    threads.append(threading.active_count())
    tasks.append(len(os.listdir("/proc/self/task")))
    resident.append(resident_kb())

found = {
    "descriptors": descriptors,
    "threads": threads,
    "tasks": tasks,
    "grown_kb_per_cycle": grown_per_cycle(resident[SETTLED:]),
}
print("cycles", json.dumps(found), flush=True)
