"""Elastic training whose data comes from forked DataLoader workers; SIGKILL by ``DIE=slot,step``.

``OWN_GROUP``: the script has a default process group of its own, and uses it all the time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

if "OWN_GROUP" not in os.environ:  # otherwise, the first group needs torch's compiler
    import light  # type: ignore[import-not-found]  # noqa: F401
import torch
import torch.distributed as dist

import elastic

SLOT = int(os.environ["ELASTIC_WORKER"].rpartition(":")[2].partition("#")[0])
DIE = os.environ.get("DIE", "")
STEPS = int(os.environ.get("STEPS", "20"))


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index % 7))


def main() -> None:
    torch.set_num_threads(1)
    elastic.init()
    if "OWN_GROUP" in os.environ:
        store = dist.FileStore(  # type: ignore[attr-defined]
            f"store.{os.getpid()}", 1
        )
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        group = dist.group.WORLD
    if "GRANDCHILD" in os.environ:
        # Outside of the worker's process group, like daemons of libraries.
        subprocess.Popen(["sh", "-c", "sleep 600 & exec sleep 600"], preexec_fn=os.setpgrp)
    model = torch.nn.Linear(4, 2)
    optimizer = elastic.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
    )
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=4, num_workers=2, persistent_workers=True
    )

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        print("entered", elastic.size(), flush=True)
        while state.step < STEPS:
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                state.step += 1
                if "OWN_GROUP" in os.environ:
                    ours = torch.ones(1)
                    dist.all_reduce(ours)
                    assert ours.item() == 1 and dist.group.WORLD is group
                if f"{SLOT},{state.step}" in DIE.split():
                    os.kill(os.getpid(), signal.SIGKILL)
                state.commit()
                if state.step >= STEPS:
                    break
                if state.step == STEPS - 1 and "STAY" in os.environ:
                    Path(f"stays.{SLOT}").touch()
                    while not Path("go").exists():
                        elastic.barrier()

    train(state)
    print("done", state.step, elastic.size(), flush=True)


if __name__ == "__main__":
    main()
    sys.exit(0)
