"""What SHARDS splits among four ranks is trained on until one of them dies, in the state where IN_STATE is 1. Each
worker prints of which kind the refusal was, and how many updates it made without that one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import elastic


def sharded(how: str) -> tuple[Any, Any, Any]:
    """A model, its optimizer and a process group for sums, or None."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    group = None
    if how in ("zero", "zero_overlap"):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        overlap = how == "zero_overlap"
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=overlap, lr=0.1
        )
        return model, zero, None
    if how in ("fully_shard", "hybrid"):
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
        fully_shard(model, mesh=mesh if how == "hybrid" else init_device_mesh("cpu", (4,)))
    elif how == "tensor_parallel":
        from torch.distributed.tensor import parallel

        styles = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
        parallel.parallelize_module(model, init_device_mesh("cpu", (4,)), styles)
    elif how == "group":
        group = dist.new_group([0, 1])
    return model, torch.optim.SGD(model.parameters(), lr=0.1), group


def main() -> None:
    dist.init_process_group()
    model, optimizer, group = sharded(os.environ["SHARDS"])
    updates = 0  # without the lost worker

    try:
        held = {"model": model, "optimizer": optimizer} if os.environ["IN_STATE"] == "1" else {}
        state = elastic.TorchState(**held, step=0)

        @elastic.run
        def train(state: elastic.TorchState) -> None:
            nonlocal updates
            while True:
                optimizer.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                updates += dist.get_world_size() < 4
                if group is not None:
                    dist.all_reduce(torch.ones(1), group=group)
                dist.barrier()
                state.step += 1
                state.commit()
                if os.environ["LOCAL_RANK"] == "1" and state.step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.005)

        train(state)
    except elastic.NotElastic as error:
        print(f"refused: {error.kind.name} after {updates} updates", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
