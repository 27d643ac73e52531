"""As torch's tutorial: DDP that saves where LOCAL_RANK is 0. Slot 0 dies at step 3. ``kept`` keeps it at import; else
each line reads the environment.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastic

KEPT = int(os.environ["LOCAL_RANK"]) if sys.argv[1] == "kept" else -1
STEPS = 8


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        while state.step < STEPS:
            if state.step == 3 and os.environ["HOROVOD_LOCAL_RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            first = KEPT == 0 if sys.argv[1] == "kept" else os.environ["RANK"] == "0"
            if first:
                print(f"saved {state.step} of {os.environ['WORLD_SIZE']}", flush=True)
            state.step += 1
            state.commit()

    train(elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main()
