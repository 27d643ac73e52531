"""Faults that a process of a matrix job can't inject into itself: stop and continue it, cut its network.

One-time actions run at the start; `act` returns the rest as a function to call repeatedly until the cell ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic.chaos.harness.journal_tail import Json
from elastic.chaos.inject.network_isolation import PacketFilter, Socket, sockets_of
from stress.fault_matrix import cells, expectations
from stress.fault_matrix.cells import Cell
from stress.fault_matrix.expectations import HOLD_S, MOMENT_S
from stress.fault_matrix.job import END_S, LOOK_S, MatrixJob

Turn = Callable[[], None]
_numbers = itertools.count(os.getpid() * 1000)  # numbers of nftables tables, unique on this machine


def act(
    job: MatrixJob, cell: Cell, struck: Sequence[Json], go: Path, stack: contextlib.ExitStack
) -> Turn:
    """Inject the fault of a cell; ``stack`` undoes it. The ``struck`` workers of a fault from outside wait for
    ``go``.
    """
    if cell.victim == cells.DRIVER:
        return _to_driver(job, cell.fault, go)
    if cell.fault == cells.DROP:
        return _drop(job, struck, go, stack)
    if cell.fault == cells.STOP:
        return _continue(job, struck, HOLD_S if expectations.expected(cell).fenced else MOMENT_S)
    return lambda: None


def _drop(job: MatrixJob, struck: Sequence[Json], go: Path, stack: contextlib.ExitStack) -> Turn:
    filtered = PacketFilter(next(_numbers))
    stack.callback(filtered.close)

    def drop() -> list[Socket]:
        found = []
        for each in struck:
            with contextlib.suppress(OSError):  # the process is gone
                sockets = sockets_of(each["pid"])
                filtered.drop(sockets)
                found += sockets
        return found

    # Sockets of this moment: a worker that is cut off may be killed before the next look.
    ports = [f" {socket.own[1]} " for socket in drop()]

    def dropped() -> bool:  # nft acts asynchronously
        words = ["nft", "list", "table", *filtered.table.split()]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=END_S).stdout
        return all(port in listed.replace(",", " , ") for port in ports)

    job.until(dropped, "nft to drop the packets", END_S)

    def again() -> None:
        drop()

    go.touch()
    return again


def _continue(job: MatrixJob, struck: Sequence[Json], after_s: float) -> Turn:
    at = time.monotonic() + after_s
    left = {each["worker"]: each["pid"] for each in struck}

    def carry_on() -> None:
        while left and time.monotonic() >= at:
            worker, pid = left.popitem()
            if worker not in job.story.exited:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    return carry_on


def _to_driver(job: MatrixJob, fault: str, go: Path) -> Turn:
    driver = job.driver
    until = time.monotonic() + MOMENT_S
    match fault:
        case cells.KILL:
            driver.kill()
        case cells.SEGV:
            driver.send_signal(signal.SIGSEGV)
        case cells.TERM:
            driver.terminate()
        case cells.DISK:
            job.fill_disk()
        case cells.STOP | cells.SLOW:
            driver.send_signal(signal.SIGSTOP)
    go.touch()

    def each_turn() -> None:
        over = time.monotonic() >= until
        if fault == cells.STOP and over:
            driver.send_signal(signal.SIGCONT)
        elif fault == cells.SLOW:
            driver.send_signal(signal.SIGCONT)
            if not over:  # it runs in one of ten turns
                time.sleep(LOOK_S)
                driver.send_signal(signal.SIGSTOP)
                time.sleep(9 * LOOK_S)

    return each_turn
