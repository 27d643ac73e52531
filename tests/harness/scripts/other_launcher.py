"""State of a script under another launcher than elasticrun: ``other_launcher.py WHAT``. Prints it as a line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

import horovod.torch as hvd

CYCLES = 100
EARLY = 20  # by then all one-time resources exist
SETTLE_S = 5.0  # time for asynchronous closing


def total(value: float) -> float:
    return float(hvd.allreduce(torch.tensor([value]), op=hvd.Sum, name="total"))


def place() -> list[int]:
    return [
        *(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()),
        *(hvd.cross_rank(), hvd.cross_size()),
    ]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def cycles() -> dict[str, object]:
    """Repeat shutdown() and init(), with a collective between two of them."""
    before = (0, 0)
    for cycle in range(CYCLES):
        hvd.shutdown()
        hvd.init()
        assert total(1.0) == hvd.size()
        if cycle == EARLY:
            before = descriptors(), threads()
    deadline = time.monotonic() + SETTLE_S
    while (descriptors(), threads()) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"before": before, "after": (descriptors(), threads())}


def under_torchrun() -> dict[str, object]:
    """The first start fails; in the second, the script also creates torch's own process group."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and hvd.rank() == 1:
        sys.exit(3)
    # This can't end until the agent has killed the first start's other ranks.
    said: dict[str, object] = {"sum": total(hvd.rank() + 1.0)}
    torch.distributed.init_process_group("gloo")
    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    torch.distributed.destroy_process_group()
    return said | {"torch's own": float(ones), **cycles()}


def loses_a_peer() -> dict[str, object]:
    hvd.allreduce(torch.ones(1), name="one")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            hvd.allreduce(torch.ones(1), name="another")
    except hvd.HorovodInternalError as error:
        said = {"raised": str(error), "after": time.monotonic() - began}
    try:
        hvd.shutdown()
        hvd.init()
    except hvd.HorovodInternalError as error:
        return said | {"again": str(error)}
    return said | {"again": "nothing was raised"}


def main(what: str) -> None:
    hvd.init()
    hvd.init()  # changes nothing
    said: dict[str, object] = {"place": place()}
    match what:
        case "place":
            said["sum"] = total(hvd.rank() + 1.0)
        case "torchrun":
            said |= under_torchrun()
        case "loss":
            said |= loses_a_peer()
    # In one write, because several processes write into one pipe.
    sys.stdout.write(f"\nsaid {json.dumps(said)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
