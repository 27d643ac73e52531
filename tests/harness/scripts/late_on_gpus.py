"""Rank 0 waits inside CUDA for a collective that rank 1 never joins, in a world without a driver.

python late_on_gpus.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed

import elastic
from elastic.errors import CollectiveFailed
from elastic.torch_backend import registration
from elastic.torch_backend.following_group import NAME


def main() -> None:
    over = Path(sys.argv[1]) / "over"
    elastic.init()
    torch.cuda.set_device(elastic.local_rank())
    registration.register()
    distributed.init_process_group(NAME)

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        tensor = torch.ones(4, device="cuda")
        distributed.all_reduce(tensor)
        if distributed.get_rank() == 1:
            while not over.exists():
                time.sleep(0.05)
            os._exit(0)
        began = time.monotonic()
        work = distributed.all_reduce(tensor, async_op=True)
        work.wait()
        queued_s = time.monotonic() - began
        tensor.sum().item()
        waited_s = time.monotonic() - began
        try:
            state.commit()
        except CollectiveFailed:
            print(f"queued after {queued_s:.2f} s, raised after {waited_s:.2f} s", flush=True)
        over.touch()
        os._exit(0)

    train(elastic.ObjectState())


if __name__ == "__main__":
    main()
