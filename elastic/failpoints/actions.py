"""Actions that inject faults into this process, at the places named by `elastic.failpoints`.

A line on stderr precedes each fault. With rules from a file, processes also use files to agree on the victims: the n-th
victim is the process that creates ``FILE.ID.n``.
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
from elastic.rendezvous import worker_settings

TOGETHER_S = 30.0  # timeout in seconds for all victims of a rule to reach the failpoint
WAIT_S = 60.0  # timeout in seconds for the file of a wait action to appear
HOARD_BYTES = 64 << 20  # number of bytes that the action out-of-memory leaves free
LOOK_S = 0.002
TURNS_PER_S = 100_000_000  # approximate number of iterations per second of an empty loop in C


def strike(rule: Rule, facts: Mapping[str, str], file: Path | None) -> None:
    """Perform the action of a rule, unless enough processes have already been hit.

    This function does not return if the action ends the process.
    """
    if file is not None and not _claim(rule, facts, file):
        return
    print(f"elastic: failpoint {rule.place}: {rule.action}", file=sys.stderr, flush=True)
    ACTIONS[rule.action](rule.argument)


def _claim(rule: Rule, facts: Mapping[str, str], file: Path) -> bool:
    paths = [Path(f"{file}.{rule.id}.{n}") for n in range(rule.victims)]
    identity = json.dumps({**facts, "pid": os.getpid(), "at": time.monotonic()})
    for path in paths:
        with contextlib.suppress(FileExistsError):
            with open(path, "x") as claimed:
                claimed.write(identity)
            break
    else:
        return False
    deadline = time.monotonic() + TOGETHER_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            came = sum(path.exists() for path in paths)
            raise TimeoutError(
                f"only {came} of {rule.victims} victims reached failpoint {rule.place} within {TOGETHER_S:g} s: lower"
                " victims=, or start more workers"
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
    # Disable faulthandler, which would print all stacks as if the fault were unexpected.
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.string_at(0)


def _exit(code: str) -> None:
    os._exit(int(code))


def _raise(text: str) -> None:
    raise RuntimeError(text)


def _hold_gil(seconds: str) -> None:
    """Block in C while holding the GIL, so that no other Python thread runs. Unlike a sleep, no signal ends it."""
    libc = ctypes.PyDLL(None)  # PyDLL holds the GIL during calls, unlike CDLL.
    mutex = ctypes.create_string_buffer(128)  # An all-zero pthread_mutex_t is an unlocked mutex.
    whole, part = divmod(time.time() + float(seconds), 1)
    until = (ctypes.c_long * 2)(int(whole), int(part * 1e9))
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_timedlock(mutex, until)  # Locking the mutex a second time deadlocks.


def _hold_gil_busy(seconds: str) -> None:
    turns = int(float(seconds) * TURNS_PER_S)
    collections.deque(itertools.repeat(None, turns), maxlen=0)


def _shut(_: str) -> None:
    """Shut down every TCP connection of the process except the one to the driver."""
    driver = worker_settings.read().driver
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
    """Set a memory limit slightly above the current use, and then exceed it."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + HOARD_BYTES, limits[1]))
    try:
        hoard = [bytearray(HOARD_BYTES // 8) for _ in range(16)]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    raise AssertionError(
        f"{len(hoard)} blocks of memory were allocated despite RLIMIT_AS: check that the kernel"
        " enforces the limit"
    )


def _wait(name: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not os.path.exists(name):
        if time.monotonic() > deadline:
            raise Invalid(
                f"a failpoint waited {WAIT_S:g} s for the file {name}, which does not exist: create the file from the"
                " test"
            )
        time.sleep(LOOK_S)


# For each kind of tensor, a function that flips a bit and returns a description, or an empty string if no such tensor
# exists.
flippers: dict[str, Callable[[int], str]] = {}


def _flip(argument: str) -> None:
    """Flip a bit of a tensor in the state that ``elastic.run`` trains."""
    what, _, seed = argument.partition(":")
    flipper = flippers.get(what)
    which = flipper(int(seed)) if flipper is not None else ""
    result = f"flipped {which}" if which else f"no {what} exist here"
    print(f"elastic: {result}", file=sys.stderr, flush=True)


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
