"""A script that fails at its fifth step in the way of CASE."""

import os
import sys
import time

import torch

import horovod.torch as hvd
from elastic.runtime import lifecycle


class Mute(Exception):
    """An exception without a message."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def fail(case: str, rank: int) -> None:
    match case:
        case "names":
            hvd.allreduce(torch.ones(3), name=f"x{rank}")
        case "kinds" if rank == 0:
            hvd.allreduce(torch.ones(3), name="x")
        case "kinds":
            hvd.broadcast(torch.ones(3), 0, name="x")
        case "shapes":
            hvd.allreduce(torch.ones(3 + rank), name="x")
        case "dtypes":
            hvd.allreduce(torch.ones(3, dtype=(torch.float32, torch.float64)[rank]), name="x")
        case "optimizers":
            named = [("weight", torch.nn.Parameter(torch.ones(1 + rank)))]
            plain = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
            optimizer = hvd.DistributedOptimizer(plain, named_parameters=named)
            named[0][1].sum().backward()
            optimizer.step()
        case "exit with a message":
            sys.exit("no data")
        case "interrupt":
            raise KeyboardInterrupt
        case "mute" if rank == 1:
            raise Mute
        case "exit code" if rank == 1:
            sys.exit(3)
        case "unexplained" if rank == 1:
            os._exit(7)
        case "lost driver" if rank == 1:
            lifecycle.current().session.driver_lost("it is tried out")
        case _:
            pass


CASE = os.environ["CASE"]
hvd.init()
if CASE == "one slot" and hvd.local_rank() == 1:
    raise ValueError("copies=0")
model = torch.nn.Linear(2, 1 + hvd.rank() if CASE == "models" else 1)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < 10 or CASE == "models":
        hvd.allreduce(torch.ones(1), name="loss")
        if state.step == 5:
            fail(CASE, hvd.rank())
        state.step += 1
        state.commit()
        if CASE == "models":
            time.sleep(0.01)


train(hvd.elastic.TorchState(model=model, step=0))
