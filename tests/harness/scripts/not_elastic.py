"""Four ranks train what SHARDS names, in the state if IN_STATE is 1, until one of them dies. Each worker prints the
kind of the refusal, and how many updates it made without that rank, or ``done``.
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
from torch.nn.parallel import DistributedDataParallel

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
    elif how == "replica":
        model = DistributedDataParallel(model)
    elif how == "group":
        group = dist.new_group([0, 1])
    return model, torch.optim.SGD(model.parameters(), lr=0.1), group


def main() -> None:
    dist.init_process_group()
    model, optimizer, group = sharded(os.environ["SHARDS"])
    updates = 0  # without the lost worker
    made_inside = os.environ["SHARDS"] == "replica_inside"
    teacher: Any = DistributedDataParallel(nn.Linear(8, 8)) if made_inside else None

    try:
        held = {"model": model, "optimizer": optimizer} if os.environ["IN_STATE"] == "1" else {}
        state = elastic.TorchState(**held, step=0)

        @elastic.run
        def train(state: elastic.TorchState) -> None:
            nonlocal updates, teacher
            if os.environ["SHARDS"] == "teacher" and teacher is None:
                from torch.distributed.fsdp import fully_shard

                teacher = fully_shard(nn.Linear(8, 8))  # in the first world only
            network, trains = model, optimizer
            if made_inside:
                network = DistributedDataParallel(nn.Linear(8, 8))
                trains = torch.optim.SGD(network.parameters(), lr=0.1)
            while updates < 5:
                trains.zero_grad()
                given = torch.ones(2, 8) if teacher is None else teacher(torch.ones(2, 8)).detach()
                network(given).sum().backward()
                trains.step()
                updates += dist.get_world_size() < 4
                if group is not None:
                    dist.all_reduce(torch.ones(1), group=group)
                dist.barrier()
                state.step += 1
                state.commit()
                if (dist.get_rank(), dist.get_world_size(), state.step) == (1, 4, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.005)

        train(state)
        print("done", flush=True)
    except elastic.NotElastic as error:
        print(f"refused: {error.kind.name} after {updates} updates", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
