"""Ends while a thread of its own is forming a group in torch: ``leaving_early.py LATE_S``, by which rank 1 comes late.

The end of the interpreter takes a second, in which that thread would come back from torch.
"""

from __future__ import annotations

import sys
import threading
import time

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic
from elastic.collectives.gloo import sockets


class Lingering:
    """Stored in sys, which the interpreter clears last."""

    def __del__(self, sleep=time.sleep):
        sleep(1.0)


sys.lingering = Lingering()  # type: ignore[attr-defined]


def come_late(late_s: float) -> None:
    find_listener = sockets.find_listener

    def find_late(value: bytes) -> sockets.Endpoint | None:
        time.sleep(late_s)
        return find_listener(value)

    sockets.find_listener = find_late  # type: ignore[assignment]


def forming() -> bool:
    return any(thread.name == "elastic-gloo" for thread in threading.enumerate())


def main(late_s: float) -> None:
    elastic.init()
    elastic.barrier()  # needs no group
    if elastic.rank() == 1:
        come_late(late_s)
    elastic.allreduce_async(torch.ones(1), name="loss")
    deadline = time.monotonic() + 10.0
    while not forming():
        assert time.monotonic() < deadline, "no group was formed"
    print("leaves", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
