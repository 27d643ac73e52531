"""Sends from rank 0 to rank 1 while rank 2 calls nothing of torch.distributed, in each of two worlds of 3.

Between them a worker of the first one's ends itself. Rank 2 looks for a file that rank 1 writes once it has received.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import light  # type: ignore[import-not-found]  # noqa: F401
import torch
import torch.distributed as dist

import elastic

WAIT_S = 30.0


def come_by(file: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not file.exists():
        assert time.monotonic() < until, f"nobody has written {file}"
        time.sleep(0.005)


def main() -> None:
    dist.init_process_group()
    state = elastic.ObjectState(step=0)

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        while state.step < 2:
            while dist.get_world_size() < 3:
                time.sleep(0.005)
                state.commit()
            rank, received = dist.get_rank(), Path(f"received{state.step}")
            if rank == 0:
                dist.send(torch.tensor([float(state.step)]), 1)
            elif rank == 1:
                dist.recv(got := torch.zeros(1), 0)
                assert got.item() == state.step
                received.touch()
            else:
                come_by(received)
            dist.barrier()
            state.step += 1
            state.commit()
            if state.step == 1 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    train(state)
    print("ended")


if __name__ == "__main__":
    main()
