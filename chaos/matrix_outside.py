"""Does to processes of a matrix job what none can do to itself: stop, be continued, lose the network. Acts.

What has to be done once is done at the start; the rest is returned, to be called again and again until the cell ends.
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

from elastic.chaos import faults, matrix_cells
from elastic.chaos.faults import Cell
from elastic.chaos.matrix_cells import HOLD_S, MOMENT_S
from elastic.chaos.matrix_job import END_S, LOOK_S, MatrixJob
from elastic.chaos.matrix_story import Json
from elastic.chaos.network import PacketFilter, Socket, sockets_of

Turn = Callable[[], None]
_numbers = itertools.count(os.getpid() * 1000)  # of tables: unique on this machine


def act(
    job: MatrixJob, cell: Cell, struck: Sequence[Json], go: Path, stack: contextlib.ExitStack
) -> Turn:
    """``struck`` wait for the file ``go``, if the fault comes from outside; ``stack`` undoes what has to be undone."""
    if cell.victim == faults.DRIVER:
        return _to_driver(job, cell.fault, go)
    if cell.fault == faults.DROP:
        return _drop(job, struck, go, stack)
    if cell.fault == faults.STOP:
        return _continue(job, struck, HOLD_S if matrix_cells.expected(cell).fenced else MOMENT_S)
    return lambda: None


def _drop(job: MatrixJob, struck: Sequence[Json], go: Path, stack: contextlib.ExitStack) -> Turn:
    filtered = PacketFilter(next(_numbers))
    stack.callback(filtered.close)

    def drop() -> list[Socket]:
        found = []
        for each in struck:
            with contextlib.suppress(OSError):  # it is gone
                sockets = sockets_of(each["pid"])
                filtered.drop(sockets)
                found += sockets
        return found

    # Of this moment: whoever is cut off may have been killed for it before it is looked at again.
    ports = [f" {socket.own[1]} " for socket in drop()]

    def dropped() -> bool:  # nft does what it is told a moment later
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
        case faults.KILL:
            driver.kill()
        case faults.SEGV:
            driver.send_signal(signal.SIGSEGV)
        case faults.TERM:
            driver.terminate()
        case faults.DISK:
            job.fill_disk()
        case faults.STOP | faults.SLOW:
            driver.send_signal(signal.SIGSTOP)
    go.touch()

    def each_turn() -> None:
        over = time.monotonic() >= until
        if fault == faults.STOP and over:
            driver.send_signal(signal.SIGCONT)
        elif fault == faults.SLOW:
            driver.send_signal(signal.SIGCONT)
            if not over:  # it runs in one of ten turns
                time.sleep(LOOK_S)
                driver.send_signal(signal.SIGSTOP)
                time.sleep(9 * LOOK_S)

    return each_turn
