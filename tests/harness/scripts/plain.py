"""Training with collectives in a loop without ``elastic.run``. One rank fails in the middle.

``plain.py BAD_RANK HOW``, where HOW is an exit code, ``kill``, ``raise``, or ``late``: after the last collective.
"""

from __future__ import annotations

import os
import signal
import sys

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic


def fail(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("this sample is damaged")
    sys.exit(int(how))


def main(bad_rank: int, how: str) -> None:
    elastic.init()
    for step in range(5):
        total = elastic.allreduce(torch.ones(1), op=elastic.Sum, name="gradient")
        print("step", step, float(total), flush=True)
        if step == 2 and elastic.rank() == bad_rank and how != "late":
            fail(how)
    if elastic.rank() == bad_rank and how == "late":
        sys.exit(4)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
