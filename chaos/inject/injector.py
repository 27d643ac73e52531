"""Injection of a plan's faults into a job's processes from outside, and removal of lasting faults.

Faults affect only workers of this job. Their process IDs are read from the job's journal. Before a fault, the injector
opens a pidfd of the process and checks that its environment contains the job's mark and the worker's name, so that a
process with a reused ID is never affected.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic.chaos.inject import network_isolation
from elastic.chaos.inject.bit_flips import BitFlips, CorruptedFile
from elastic.chaos.inject.network_isolation import PacketFilter
from elastic.chaos.inject.plan import FLIPPED, SPOILS_FILE, Fault, Injected
from elastic.chaos.inject.resume_guard import Guard
from elastic.driver.processes.preloaded_pool import PREPARED
from elastic.protocol.messages import Worker

MARK = "ELASTIC_CHAOS"  # environment variable with a unique value for each job
# seconds for which a slowed worker runs between pauses; must exceed the agent's sampling interval
RUN_S = 0.3
# Seconds for which a worker with a flipped bit counts as a victim. The flip may have no visible effect.
FLIPPED_S = 5.0
REFRESH_S = 0.1  # interval at which a partition checks for new sockets of its victim


class NotOurs(Exception):
    """Error raised when a process does not exist, or is not a worker of this job."""


@dataclass
class _Process:
    pid: int
    pidfd: int

    def signal(self, number: int) -> bool:
        """Send a signal to the process. Return False if the process has exited."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        os.close(self.pidfd)


@dataclass
class _Lasting:
    injected: Injected
    process: _Process
    ends_at: float
    next_at: float
    stopped: bool = False
    pauses_s: float = 0.0  # seconds of each pause of a slowed worker
    packets: PacketFilter | None = field(default=None, repr=False)
    # guard that resumes a stopped worker if this process exits
    guard: Guard | None = field(default=None, repr=False)

    def close(self) -> None:
        if self.packets is not None:
            self.packets.close()
        if self.guard is not None:
            self.guard.close()


class Injector:
    """Injector of faults. Reports each fault through ``log``.

    Call `turn` at the time that `next_at` returns. `close` ends all lasting faults, and is idempotent.
    """

    def __init__(
        self, mark: str, log: Callable[[str], None], flips: BitFlips | None = None
    ) -> None:
        """Create an injector.

        Args:
            mark: environment entry that identifies the job's processes.
            say: called with a line of text for each fault.
            flips: performs bit flips. None if the plan contains none.
        """
        self.done: list[Injected] = []
        self._flips = flips
        self._spoilt: list[tuple[Injected, CorruptedFile]] = []
        self._mark = f"{MARK}={mark}"
        self._log = log
        self._lasting: list[_Lasting] = []

    def inject(
        self,
        fault: Fault,
        worker: Worker,
        pids: dict[Worker, int],
        place: tuple[int, int],
        now: float,
    ) -> None:
        """Begin a fault immediately.

        Args:
            fault: the fault to inject.
            worker: the victim.
            pids: process IDs of all workers.
            place: rank and size of the worker.
            now: time of the injection, in seconds.

        Raises:
            NotOurs: the victim has exited, the process ID belongs to another process, or the fault corrupts a file and
                no checkpoint exists yet.
            OSError: the fault could not be performed, for example because of missing permissions.
        """
        process = self._hold(worker, pids[worker])
        injected = Injected(
            len(self.done) + 1, fault.kind, worker, *place, at=now, what=fault.what()
        )
        try:
            if not self._begin(fault, injected, process, pids):
                raise NotOurs(f"{worker} has already exited: inject the fault earlier")
        except BaseException:
            process.close()
            raise
        self.done.append(injected)
        rank, size = place
        note = f", {injected.note}" if injected.note else ""
        self._log(f"{injected.what}: {worker}, rank {rank} of {size} (process {process.pid}){note}")
        if all(each.process is not process for each in self._lasting):
            process.close()

    def suffering(self, now: float) -> list[Worker]:
        """Return the workers that are under a fault or are expected to exit because of one."""
        going = [
            each.worker
            for each in self.done
            if each.kind in ("kill", "leave")
            or (each.kind in FLIPPED and now < each.at + FLIPPED_S)
        ]
        return [*(each.injected.worker for each in self._lasting), *going]

    def next_at(self) -> float | None:
        """Return the time at which `turn` must be called next, or None if no call is needed."""
        return min((each.next_at for each in self._lasting), default=None)

    def turn(self, now: float) -> None:
        """Perform the actions that are due."""
        for each in list(self._lasting):
            # The driver may have killed the process in the meantime.
            alive = each.process.signal(0)
            if alive and now < each.ends_at and now >= each.next_at:
                alive = self._go_on(each, now)
            if now >= each.ends_at or not alive:
                self._end(each, now)

    def close(self, now: float) -> None:
        """End all lasting faults, for example by resuming frozen processes."""
        for each in list(self._lasting):
            self._end(each, now)

    def judge(self) -> None:
        """Record for each corrupted file whether the job detected the corruption. Call this after the job has ended."""
        for injected, spoilt in self._spoilt:
            assert self._flips is not None
            try:
                injected.note = (
                    f"{spoilt.file} of {spoilt.checkpoint}: {self._flips.verdict(spoilt)}"
                )
            except OSError as error:
                injected.note = f"{spoilt.file} of {spoilt.checkpoint} can't be read: {error}"

    # ---- one fault -------------------------------------------------------------------------------

    def _begin(
        self, fault: Fault, injected: Injected, process: _Process, pids: dict[Worker, int]
    ) -> bool:
        now = injected.at
        match fault.kind:
            case "kill":
                return process.signal(signal.SIGKILL)
            case "leave":
                return process.signal(signal.SIGTERM)
            case "cut":
                others = [pid for worker, pid in pids.items() if worker != injected.worker]
                cut = network_isolation.close_connections(process.pid, others)
                injected.note = f"{cut} connections closed"
                return True
            case "freeze":
                ends_at = now + fault.for_s
                guard = Guard(process.pidfd)
                lasting = _Lasting(injected, process, ends_at, ends_at, stopped=True, guard=guard)
                self._lasting.append(lasting)
                return process.signal(signal.SIGSTOP) or self._drop(process)
            case "slow":
                pauses_s = RUN_S * (fault.factor - 1)
                lasting = _Lasting(injected, process, now + fault.for_s, now, pauses_s=pauses_s)
                lasting.guard = Guard(process.pidfd)
                self._lasting.append(lasting)
                return self._go_on(lasting, now) or self._drop(process)
            case "partition":
                packets = PacketFilter(process.pid)
                lasting = _Lasting(injected, process, now + fault.for_s, now, packets=packets)
                self._lasting.append(lasting)
                return self._go_on(lasting, now) or self._drop(process)
            case kind if kind in FLIPPED:
                assert self._flips is not None, "checked before the job was started"
                self._flips.arm(FLIPPED[kind], injected.worker)
                return process.signal(0)
            case kind if kind == SPOILS_FILE:
                return self._spoil(injected)
            case _:
                raise AssertionError(f"no method injects the fault {fault.kind}: add one")

    def _spoil(self, injected: Injected) -> bool:
        assert self._flips is not None, "checked before the job was started"
        spoilt = self._flips.spoil()
        if spoilt is None:
            raise NotOurs(
                "no checkpoint exists yet: run the job with --checkpoint-every 10commits, or inject the fault later"
            )
        self._spoilt.append((injected, spoilt))
        injected.note = f"{spoilt.file} of {spoilt.checkpoint}"
        return True

    def _drop(self, process: _Process) -> bool:
        """Discard a fault whose victim exited before the fault began."""
        for each in [each for each in self._lasting if each.process is process]:
            self._lasting.remove(each)
            each.close()
        return False

    def _go_on(self, each: _Lasting, now: float) -> bool:
        """Perform the next action of a lasting fault. Return False if the victim has exited."""
        if each.packets is not None:
            each.next_at = min(each.ends_at, now + REFRESH_S)
            try:
                each.packets.drop(network_isolation.sockets_of(each.process.pid))
            except OSError:
                return False
            return True
        if each.pauses_s:
            each.stopped = not each.stopped
            each.next_at = min(each.ends_at, now + (each.pauses_s if each.stopped else RUN_S))
            return each.process.signal(signal.SIGSTOP if each.stopped else signal.SIGCONT)
        return True

    def _end(self, each: _Lasting, now: float) -> None:
        self._lasting.remove(each)
        each.injected.until = now
        alive = each.process.signal(signal.SIGCONT if each.stopped else 0)
        each.close()
        each.process.close()
        if alive:
            self._log(f"the {each.injected.kind} of {each.injected.worker} has ended")

    def _hold(self, worker: Worker, pid: int) -> _Process:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            raise NotOurs(
                f"{worker} (process {pid}) has already exited: inject the fault earlier"
            ) from None
        process = _Process(pid, pidfd)
        # A preloaded process keeps the environment with which it was started, even if it becomes another worker.
        named = carries(pid, [self._mark, f"ELASTIC_WORKER={worker}"])
        if not named and not carries(pid, [self._mark, f"{PREPARED}=1"]):
            process.close()
            raise NotOurs(
                f"process {pid} of this machine is not {worker} of this job: run the command on the machine"
                " of the worker"
            )
        return process


def carries(pid: int, entries: Iterable[str]) -> bool:
    """Return whether a process was started with all of these ``NAME=value`` entries in its environment."""
    environment = _environment(pid)
    return all(entry.encode() in environment for entry in entries)


def _environment(pid: int) -> set[bytes]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return set(file.read().split(b"\0"))
    return set()
