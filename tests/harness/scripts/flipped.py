"""Trains until a file ends it, and records the content of each commit independently of the job.

A line for each commit in FOLDER/<worker>: its generation and number, and a hash of all that must be equal on all ranks.
"""

import hashlib
import os
import time
from pathlib import Path

import torch

import elastic
from elastic.runtime import lifecycle

torch.set_num_threads(1)
elastic.init()
folder = Path(os.environ["FOLDER"])
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 20))
optimizer = elastic.DistributedOptimizer(torch.optim.Adam(net.parameters()))
state = elastic.TorchState(model=net, optimizer=optimizer, step=0)


def replicated() -> list[torch.Tensor]:
    entries = optimizer.state_dict()["state"]
    return [*net.parameters(), *(entry for number in entries for entry in entries[number].values())]


@elastic.run
def train(state):
    rt = lifecycle.current()
    with (folder / os.environ["ELASTIC_WORKER"]).open("a", buffering=1) as log:
        while True:
            optimizer.zero_grad()
            drawn = torch.Generator().manual_seed(1000 * state.step + elastic.rank())
            net(torch.randn(8, 20, generator=drawn)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            tensors = [each.detach() for each in replicated()]
            content = hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors))
            commit = rt.session.recovery.newest
            time.sleep(0.01)  # leaves time for other processes
            log.write(f"{commit} {content.hexdigest()}\n")
            over = torch.tensor(float((folder / "enough").exists()))
            if elastic.allreduce(over, name="over"):
                return


train(state)
