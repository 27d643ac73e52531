"""A script for Horovod with its own retry loop and without elastic.run. The weight is the number of steps.

At step 5 slot 1 raises HorovodInternalError itself; at the step in ``DIE`` it is killed.
"""

from __future__ import annotations

import os
import signal

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import horovod.torch as hvd

SLOT = int(os.environ["HOROVOD_LOCAL_RANK"])
STEPS = 12
given_up = False


def train(state: hvd.elastic.TorchState) -> None:
    global given_up
    while state.step < STEPS:
        if SLOT == 1 and state.step == 5 and not given_up:
            given_up = True
            raise hvd.HorovodInternalError("the script has had enough of this world")
        if SLOT == 1 and str(state.step) == os.environ.get("DIE"):
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            state.model.weight += hvd.allreduce(torch.ones(1), name="one")
        state.step += 1
        if state.step % 4 == 0:
            state.commit()


hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
state = hvd.elastic.TorchState(model=model, step=0)
while True:
    try:
        state.sync()
        train(state)
        break
    except hvd.HorovodInternalError:
        print("said", SLOT, "caught", state.step, flush=True)
        state.restore()
    hvd.shutdown()
    hvd.init()
    state.on_reset()
    print("said", SLOT, "again", state.step, model.weight.item(), flush=True)
print("said", SLOT, "ends", model.weight.item(), hvd.size(), flush=True)
