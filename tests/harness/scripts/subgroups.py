"""Makes process groups of some ranks in every way, in each world of a job, and uses them in all worlds of four.

In each of those but the last, of which KILLS says how many there are, a worker kills itself, and its slot comes back.
"""

from __future__ import annotations

import os
import signal
import time

import light  # type: ignore[import-not-found]  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import elastic

KILLS = int(os.environ["KILLS"])


def members(group: dist.ProcessGroup) -> list[int]:
    return sorted(dist.get_process_group_ranks(group))


def made() -> dict[str, dist.ProcessGroup]:
    """Return the groups of this rank, and how each was created."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    found = {"new_group": pairs[rank // 2]} if rank // 2 < len(pairs) else {}
    found["all"] = dist.new_group(backend="gloo")
    others = [other for other in range(size) if other % 2 == rank % 2]
    found["local"] = dist.new_group(others, use_local_synchronization=True)
    if size == 4:
        found["new_subgroups"], _ = dist.new_subgroups(2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "layers"))
        found |= {name: mesh.get_group(name) for name in ("replicas", "layers")}
    return found


def use(how: str, group: dist.ProcessGroup) -> None:
    rank, ranks = dist.get_rank(), members(group)
    dist.all_reduce(total := torch.tensor([float(rank)]), group=group)
    assert total.item() == sum(ranks), how
    dist.broadcast(sent := torch.tensor([float(rank)]), src=ranks[-1], group=group)
    assert sent.item() == ranks[-1], how
    objects: list[object] = [None] * len(ranks)
    dist.all_gather_object(objects, rank, group=group)
    assert objects == ranks, how
    dist.barrier(group=group)


def main() -> None:
    dist.init_process_group()
    everyone = dist.new_group()  # numbered by torch: every worker runs this once
    state = elastic.ObjectState(rounds=0)

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        groups = made()
        if dist.get_world_size() == 4:
            for how, group in groups.items():
                use(how, group)
            use("before elastic.run", everyone)
            state.rounds += 1
            state.commit()
            if state.rounds > KILLS:
                return
            if int(os.environ["LOCAL_RANK"]) == state.rounds:
                os.kill(os.getpid(), signal.SIGKILL)
        while True:
            state.commit()
            time.sleep(0.005)

    train(state)
    print("rounds", state.rounds, flush=True)


if __name__ == "__main__":
    main()
