"""Makes empty steps until FOLDER/stop exists; each process writes its steps to a separate file.

A line is ``[step, rank, size, time]``: the step that was made, and committed after it.
"""

from __future__ import annotations

import json
import os
import sys
import time

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import horovod.torch as hvd

folder = sys.argv[1]
stop = os.path.join(folder, "stop")
hvd.init()
state = hvd.elastic.ObjectState(step=0)
# Process ids restart in each container of a pod.
name = f"{os.environ['POD_NAME']}-{os.environ['NODE_NAME']}-{os.getpid()}-{time.time_ns()}.jsonl"
with open(os.path.join(folder, name), "a", buffering=1) as steps:

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        over = 0.0
        while not over:
            asks = torch.full([1000], float(os.path.exists(stop)))
            over = float(hvd.allreduce(asks, name="stop", op=hvd.Max)[0])
            state.step += 1
            print(json.dumps([state.step, hvd.rank(), hvd.size(), time.time()]), file=steps)
            state.commit()
            time.sleep(0.005)

    train(state)
