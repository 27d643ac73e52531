"""Detection of idle Gloo threads from the scheduling counters of the kernel, which are only read.

A collective that lost its wake-up never completes. The thread of such a collective has stopped running, unlike the
thread of a collective that still writes to tensors.
"""

from __future__ import annotations

import contextlib
import os

_TASKS = "/proc/self/task"
# Name of the threads that run collectives. Gloo's socket threads, which wake every 10 ms, have another name.
_NAME = b"pt_gloo_runloop"

Runs = frozenset[tuple[str, bytes]]


def runs() -> Runs | None:
    """Return the run count of each thread of Gloo's collectives, or None if a thread is running.

    If two results are equal, no thread ran in between. The result is empty if the system does not provide the counters.
    """
    counted = set()
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir(_TASKS):
            with contextlib.suppress(OSError):  # The thread may have ended.
                status = _status(thread)
                if status[b"Name"] != _NAME:
                    continue
                if not status[b"State"].startswith(b"S"):
                    return None
                switches = status[b"voluntary_ctxt_switches"]
                counted.add((thread, switches + b"/" + status[b"nonvoluntary_ctxt_switches"]))
    return frozenset(counted)


def _status(thread: str) -> dict[bytes, bytes]:
    with open(f"{_TASKS}/{thread}/status", "rb") as file:
        pairs = (line.partition(b":") for line in file)
        return {key: value.strip() for key, _, value in pairs}
