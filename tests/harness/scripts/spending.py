"""Trains until a file ends it, and prints its time account. ELASTIC_TEST_FOLDER: where that file will be.

Where there is a file ``die``, rank 1 does: in the third step after a commit, and after 50 steps in its world.
"""

import os
import signal
import time
from pathlib import Path

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic

elastic.init()
folder = Path(os.environ["ELASTIC_TEST_FOLDER"])
net = torch.nn.Linear(8, 8)
optimizer = elastic.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01))
state = elastic.TorchState(model=net, optimizer=optimizer, step=0)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.ones(8)


@elastic.run
def train(state):
    began = state.step
    while True:
        for batch in torch.utils.data.DataLoader(Data(), batch_size=4):
            optimizer.zero_grad()
            net(batch).square().sum().backward()
            optimizer.step()
            state.step += 1
            due = state.step % 5 == 3 and state.step > began + 50 and elastic.rank() == 1
            if due and (folder / "die").exists():
                (folder / "die").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            if state.step % 5 == 0:
                state.commit()
        over = elastic.allreduce(torch.tensor(float((folder / "enough").exists())), name="over")
        if over:
            return


train(state)
spent = elastic.goodput()
print(f"wall {spent.wall_s:.3f} data {spent.data_s:.3f} joining {spent.joining_s:.3f}", flush=True)
