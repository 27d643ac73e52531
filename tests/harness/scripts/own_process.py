"""Records the facts that a worker knows about its own process, and exits with 0; with ``wait`` it waits to be ended."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import time

import numpy

import elastic

PR_GET_PDEATHSIG = 2


def facts() -> dict[str, object]:
    deadly = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(deadly))
    pid, streams = os.getpid(), (sys.stdout, sys.stderr)
    known = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)
    return {
        "words": sys.argv,
        "path": sys.path,
        "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
        "folder": os.path.basename(os.getcwd()),
        "variables": sorted(os.environ),
        "leads": [os.getsid(0) == pid, os.getpgrp() == pid],
        "dies with its parent": deadly.value,
        "descriptors": [os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in range(3)],
        "streams": [[each.encoding, each.errors, each.isatty()] for each in streams],
        "signals": [str(signal.getsignal(number)) for number in known],
        "blocked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "shown": sorted(shown_variables()),
        "out-of-memory score": open("/proc/self/oom_score_adj").read(),
        "threads": len(os.listdir("/proc/self/task")),
        "program": os.readlink("/proc/self/exe"),
    }


def shown_variables() -> dict[str, str]:
    """Return the values that other processes see."""
    with open("/proc/self/environ") as file:
        entries = [each.partition("=") for each in file.read().split("\0") if each]
    return {name: text for name, _, text in entries}


def main() -> None:
    found = facts()
    elastic.init()
    with open(f"facts.{elastic.rank()}", "w") as file:
        drawn = [random.random(), float(numpy.random.random())]
        json.dump({**found, "pid": os.getpid(), "parent": os.getppid(), "drawn": drawn}, file)
    print("wrote its facts")  # not flushed: workers' output must be visible immediately
    while sys.argv[1:] == ["wait"]:
        time.sleep(1)


if __name__ == "__main__":
    main()
