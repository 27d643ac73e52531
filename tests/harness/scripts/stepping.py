"""Makes empty steps until FOLDER/stop exists; each process writes FOLDER/PID.steps, see `harness.step_lines`."""

from __future__ import annotations

import os
import sys
import time

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import horovod.torch as hvd
from elastic.runtime import lifecycle

folder = sys.argv[1]
stop = os.path.join(folder, "stop")
hvd.init()
state = hvd.elastic.ObjectState(step=0)
with open(os.path.join(folder, f"{os.getpid()}.steps"), "a", buffering=1) as steps:

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        over = 0.0
        while not over:
            asks = torch.full([1000], float(os.path.exists(stop)))
            over = float(hvd.allreduce(asks, name="stop", op=hvd.Max)[0])
            state.step += 1
            place = [lifecycle.current().generation, hvd.size(), hvd.rank(), state.step]
            print(time.monotonic(), *place, file=steps)
            state.commit()
            time.sleep(0.02)

    train(state)
