"""Signals that make the threads of a worker print their Python stacks one after another. `in_order` is pure.

The signal handler prints the stack of the thread that receives the signal. For a thread without Python code, it prints
nothing. The signal is blocked while the handler runs, so a thread has finished when the signal is neither pending nor
blocked.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial

from elastic.driver.processes import proc_stats
from elastic.driver.processes.proc_stats import ThreadStatus

STACKS_S = 4.0  # timeout for all threads of a worker together, in seconds
LOOK_S = 0.001  # interval between two checks of whether a thread has finished, in seconds
UNINTERRUPTIBLE = "D"

_libc = ctypes.CDLL(None, use_errno=True)
# numbers of the system call tgkill, for which glibc has no function before 2.30
_TGKILL = {"x86_64": 234, "aarch64": 131}


def in_order(
    threads: Sequence[ThreadStatus], number: int, first: int, *, all_threads: bool
) -> list[ThreadStatus]:
    """Return the threads that can receive a signal, in the order in which to send it. Pure.

    Threads in an uninterruptible system call come last, because all later threads wait for them.

    Args:
        threads: all threads of a process.
        number: signal number. Threads that block the signal are omitted.
        first: ID of the thread that comes first.
        all_threads: whether to return the other threads as well.
    """
    chosen = [
        thread
        for thread in threads
        if not thread.blocked >> (number - 1) & 1 and (all_threads or thread.id == first)
    ]
    return sorted(chosen, key=lambda each: (each.state == UNINTERRUPTIBLE, each.id != first))


async def signal_in_turn(
    pid: int, threads: Sequence[ThreadStatus], number: int, announce: Callable[[ThreadStatus], None]
) -> int:
    """Send a signal to threads of a process one after another, waiting for each thread's handler to return.

    Args:
        pid: process ID.
        threads: the threads.
        number: the signal.
        announce: called with each thread before the signal is sent to it.

    Returns:
        Number of threads that have not finished within STACKS_S seconds. Of these, only the first has received the
        signal.

    Raises:
        OSError: the signal cannot be sent.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + STACKS_S
    for index, thread in enumerate(threads):
        announce(thread)
        try:
            signal_thread(pid, thread.id, number)
        except ProcessLookupError:
            continue
        # The kernel clears the pending bit shortly before it blocks the signal, so one check may find neither.
        finished = 0
        while finished < 2:
            if loop.time() >= deadline:
                return len(threads) - index
            await asyncio.sleep(LOOK_S)
            status = proc_stats.thread_of(pid, thread.id)
            busy = status is not None and (status.pending | status.blocked) >> (number - 1) & 1
            finished = 0 if busy else finished + 1
    return 0


def signal_thread(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread of a process.

    Raises:
        OSError: the signal cannot be sent.
        ProcessLookupError: the thread does not exist.
    """
    ctypes.set_errno(0)
    code = _TGKILL.get(platform.machine())
    send = _libc.tgkill if code is None else partial(_libc.syscall, code)
    if send(pid, thread, number):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
