"""Makes something go wrong in this very process, at a place that `elastic.failpoints` has named. Decides nothing.

Before it acts it says so on stderr. Where the rules come from a file it also leaves a file behind, which is how several
processes agree who is struck: the n-th victim is whoever makes ``FILE.ID.n``; the others go on.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import itertools
import json
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic.errors import Invalid
from elastic.failpoints.rules import Rule
from elastic.rendezvous import environment

TOGETHER_S = 30.0  # for all victims of a rule to come to their place
WAIT_S = 60.0  # for a file that an action waits for
HOARD_BYTES = 64 << 20  # that an out-of-memory leaves to be used up
LOOK_S = 0.002
TURNS_PER_S = 100_000_000  # of the emptiest loop in C, roughly


def strike(rule: Rule, facts: Mapping[str, str], file: Path | None) -> None:
    """Carries out a rule, unless it has struck enough processes. May not return."""
    if file is not None and not _claim(rule, facts, file):
        return
    print(f"elastic: failpoint {rule.place}: {rule.action}", file=sys.stderr, flush=True)
    ACTIONS[rule.action](rule.argument)


def _claim(rule: Rule, facts: Mapping[str, str], file: Path) -> bool:
    """Be one of its victims, and wait for the others."""
    paths = [Path(f"{file}.{rule.id}.{n}") for n in range(rule.victims)]
    said = json.dumps({**facts, "pid": os.getpid(), "at": time.monotonic()})
    for path in paths:
        with contextlib.suppress(FileExistsError):
            with open(path, "x") as claimed:
                claimed.write(said)
            break
    else:
        return False
    deadline = time.monotonic() + TOGETHER_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            came = sum(path.exists() for path in paths)
            raise TimeoutError(
                f"failpoint {rule.place}: {came} of {rule.victims} victims came within {TOGETHER_S:g} s"
            )
        time.sleep(LOOK_S)
    return True


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _term(_: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(_: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _segv(_: str) -> None:
    faulthandler.disable()  # or it would write all stacks, as it should for a fault that nobody asked for
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.string_at(0)


def _exit(code: str) -> None:
    os._exit(int(code))


def _raise(text: str) -> None:
    raise RuntimeError(text)


def _hold_gil(seconds: str) -> None:
    """Idle in C: no other Python thread of the process runs meanwhile, and no signal ends it, as it would a sleep."""
    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the GIL
    mutex = ctypes.create_string_buffer(128)  # zeros are a mutex that is not locked
    whole, part = divmod(time.time() + float(seconds), 1)
    until = (ctypes.c_long * 2)(int(whole), int(part * 1e9))
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, until)  # by itself: a deadlock, until then


def _hold_gil_busy(seconds: str) -> None:
    """Computing in C, without a look at whether another thread wants to run."""
    turns = int(float(seconds) * TURNS_PER_S)
    collections.deque(itertools.repeat(None, turns), maxlen=0)


def _shut(_: str) -> None:
    """Every TCP connection of the process but the one to the driver."""
    driver = environment.read().driver
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as held:
                if held.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                if driver is None or held.getpeername()[1] != driver.port:
                    held.shutdown(socket.SHUT_RDWR)


def _slow(seconds: str) -> None:
    time.sleep(float(seconds))


def _disk_full(_: str) -> None:
    with open("/dev/full", "w") as full:
        full.write("a line of a log")


def _out_of_memory(_: str) -> None:
    """A limit a little above what the process uses, and then more than that."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + HOARD_BYTES, limits[1]))
    try:
        hoard = [bytearray(HOARD_BYTES // 8) for _ in range(16)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    raise AssertionError(f"{len(hoard)} pieces of memory were had in spite of the limit")


def _wait(name: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not os.path.exists(name):
        if time.monotonic() > deadline:
            raise Invalid(f"a failpoint waited {WAIT_S:g} s for {name}, which nobody made")
        time.sleep(LOOK_S)


flippers: dict[str, Callable[[int], str]] = {}  # a bit of what; says which one it was


def _flip(argument: str) -> None:
    """A bit of the memory of the state in ``elastic.run``."""
    what, _, seed = argument.partition(":")
    flipper = flippers.get(what)
    which = flipper(int(seed)) if flipper is not None else ""
    said = f"flipped {which}" if which else f"there are no {what} here"
    print(f"elastic: {said}", file=sys.stderr, flush=True)


ACTIONS: dict[str, Callable[[str], None]] = {
    "kill": _kill,
    "term": _term,
    "stop": _stop,
    "segv": _segv,
    "exit": _exit,
    "raise": _raise,
    "hold-gil": _hold_gil,
    "hold-gil-busy": _hold_gil_busy,
    "shut": _shut,
    "slow": _slow,
    "disk-full": _disk_full,
    "out-of-memory": _out_of_memory,
    "wait": _wait,
    "flip": _flip,
}
