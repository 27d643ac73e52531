"""Classification of workers that others wait for as stuck, slow or excused. Pure. `stuck` detects the waits.

                     no worker waits for the suspect, or it made progress: forgotten
                        ^
    suspected --two answers to a probe--> IDLE --idle_s--> condemned --dump_s--> to be fenced
                        |                  ^ |                 ^
                        |                  | v                 |
                        +----------------> BUSY --busy_s-------+
                        +--under a debugger, or in a phase marked as long--> EXCUSED: only logged

The agent observes a worker's process from outside, because a heartbeat thread would keep running even if the training
thread is stuck. A worker that uses CPU time or performs I/O is busy. Since a step may be long, a busy worker is killed
only after a long time. A worker that does neither while others wait for it is idle, for example because of a deadlock
or because another service does not respond.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from elastic.driver.events import WorkerProbed
from elastic.driver.reasons import Reason, ReasonKind, because
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker

PROBE_S = 5.0  # maximum interval between two probes, in seconds
# A process is idle if it uses less than this fraction of one CPU and transfers less than BUSY_IO.
BUSY_CPU = 0.1
BUSY_IO = 64 * 1024  # bytes per second
TRACED, ON_DISK, RUNNABLE = "t", "D", "R"  # process states in /proc/PID/stat


def probe_every_s(settings: Settings) -> float:
    """Return the interval between two probes of a suspected worker, in seconds. It also delays the first probe."""
    limits = [limit / 6 for limit in (settings.idle_s, settings.busy_s) if limit > 0]
    limits += [settings.gpu_hang_s / 2] if settings.gpu_hang_s > 0 else []
    return max(0.1, min([PROBE_S, *limits]))


class Verdict(enum.Enum):
    UNKNOWN = "no report received yet"
    IDLE = "idle"
    BUSY = "busy"
    EXCUSED = "excused"


class Next(enum.Enum):
    """Decision about a suspect."""

    NOTHING = "nothing"
    NAME = "name"  # log a warning about the worker
    CONDEMN = "condemn"  # request the stacks of the worker, then fence it


@dataclass
class Suspicion:
    """State of a suspected worker that others wait for.

    Fields that end in ``_at`` or ``since`` are times in seconds on the caller's clock.
    """

    worker: Worker
    since: float  # time at which the other workers began to wait for this worker
    phase: str = ""
    fenced_when_busy: bool = True
    # whether an idle worker is treated like a busy one, because fencing it would end the job
    patient: bool = False
    verdict: Verdict = Verdict.UNKNOWN
    idle_since: float = 0.0
    traced: bool = False
    cpu: float = 0.0  # fraction of one CPU that the worker used between the last two probes
    io: float = 0.0  # bytes per second that the worker transferred between the last two probes
    fence_at: float | None = None  # time at which the worker is fenced; set when it is condemned
    _probe: WorkerProbed | None = None
    _probed_at: float = 0.0
    # For each verdict, the seconds that the other workers had waited when it was last logged.
    _named: dict[Verdict, float] | None = None

    def wait_since(self, since: float) -> None:
        """Move the start of the wait to ``since`` if that is later.

        Workers that began to wait before ``since`` may have made progress since then.
        """
        self.since = max(self.since, since)
        self.idle_since = max(self.idle_since, self.since)

    def probed(self, event: WorkerProbed, now: float) -> None:
        before, seconds = self._probe, now - self._probed_at
        self._probe, self._probed_at = event, now
        self.traced = event.traced or event.state == TRACED
        if self.traced:
            self.verdict = Verdict.EXCUSED
            return
        if before is None or seconds <= 0:
            return
        self.cpu = (event.cpu_s - before.cpu_s) / seconds
        self.io = (event.io_bytes - before.io_bytes) / seconds
        # A negative rate means that a child process exited and its share was removed from the counter.
        lively = self.cpu < 0 or self.io < 0 or self.cpu >= BUSY_CPU or self.io >= BUSY_IO
        # A process that is runnable at both probes but has used no CPU time is waiting to be scheduled.
        starved = before.state == RUNNABLE == event.state
        if lively or starved or event.state == ON_DISK:
            self.verdict = Verdict.BUSY
        elif self.verdict is not Verdict.IDLE:
            first = self.verdict is Verdict.UNKNOWN
            self.idle_since = self.since if first else now - seconds
            self.verdict = Verdict.IDLE

    def fence_due(self, settings: Settings) -> float | None:
        """Return the time at which the worker is condemned if its state does not change, or None for never."""
        match self.verdict:
            case Verdict.IDLE if settings.idle_s > 0 and self.patient:
                return (
                    self.since + max(settings.idle_s, settings.busy_s) if settings.busy_s else None
                )
            case Verdict.IDLE if settings.idle_s > 0:
                return self.idle_since + settings.idle_s
            case Verdict.BUSY if settings.busy_s > 0 and self.fenced_when_busy:
                return self.since + settings.busy_s
        return None

    def judge(self, settings: Settings, now: float) -> Next:
        """Return the decision about the worker at the time ``now``, in seconds."""
        due = self.fence_due(settings)
        if due is not None and due <= now:
            return Next.CONDEMN if self.fence_at is None else Next.NOTHING
        self.fence_at = None  # Cancel a scheduled fence, because the worker has made progress.
        if self.verdict is Verdict.UNKNOWN:
            return Next.NOTHING
        waited = now - self.since
        if self.verdict is Verdict.BUSY:
            limit_s = settings.busy_warning_s
            if limit_s <= 0 or waited < limit_s:
                return Next.NOTHING
        self._named = self._named or {}
        last = self._named.get(self.verdict)
        if last is not None and waited < 2 * last:
            return Next.NOTHING
        self._named[self.verdict] = waited
        return Next.NAME

    def describe(self, settings: Settings, now: float) -> tuple[str, str]:
        """Describe the state of the worker and its consequence.

        For example ``idle`` and ``it is fenced in 25 s (--idle-timeout)``.
        """
        due = self.fence_due(settings)
        left = "" if due is None else f"it will be fenced in {due - now:.0f} s"
        match self.verdict:
            case Verdict.IDLE:
                flag = "--busy-timeout" if self.patient else "--idle-timeout"
                return "idle", f"{left} ({flag})" if left else ""
            case Verdict.BUSY:
                what = f"busy ({self.rates()})"
                if not left:
                    return what, ""
                return what, f"{left} (--busy-timeout) unless the script uses elastic.long_phase"
            case Verdict.EXCUSED if self.traced:
                return "under a debugger: not treated as stuck", ""
            case Verdict.EXCUSED:
                return f"in the long phase {self.phase!r}: not treated as stuck", ""
        return str(self.verdict.value), ""

    def reason(self, now: float, where: str) -> Reason:
        """Return the reason for fencing the worker.

        Args:
            now: current time, in seconds.
            where: collective or script line at which the other workers waited.
        """
        if self.verdict is Verdict.IDLE:
            return because(ReasonKind.IDLE, for_s=now - self.idle_since, where=where)
        return because(ReasonKind.BUSY, for_s=now - self.since, rates=self.rates(), where=where)

    def rates(self) -> str:
        return f"CPU {max(0.0, self.cpu):.0%}, {max(0.0, self.io) / 1024:.0f} KiB/s"


class Suspicions:
    """Collection of all suspected workers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._all: dict[Worker, Suspicion] = {}
        # condemned workers, in the order of their fence times
        self._condemned: dict[Worker, Suspicion] = {}

    def get(self, worker: Worker) -> Suspicion | None:
        return self._all.get(worker)

    def __len__(self) -> int:
        return len(self._all)

    def only(self, suspects: Iterable[Suspicion]) -> list[Suspicion]:
        """Replace the set of suspects. Suspicions of workers that are still suspected keep their state."""
        known = self._all
        self._all = {}
        for new in suspects:
            old = known.get(new.worker)
            if old is None or old.phase != new.phase:
                old = new
            old.wait_since(new.since)
            old.fenced_when_busy, old.patient = new.fenced_when_busy, new.patient
            if old.phase:
                old.verdict = Verdict.EXCUSED
            self._all[new.worker] = old
        for worker in [w for w, s in self._condemned.items() if self._all.get(w) is not s]:
            del self._condemned[worker]
        return list(self._all.values())

    def drop(self, worker: Worker) -> bool:
        """Remove the suspicion of a worker that made progress or exited. Return whether the worker was condemned."""
        self._all.pop(worker, None)
        return self._condemned.pop(worker, None) is not None

    def judge(self, suspicion: Suspicion, now: float) -> Next:
        verdict = suspicion.judge(self._settings, now)
        if suspicion.fence_at is None:
            self._condemned.pop(suspicion.worker, None)
        if verdict is Next.CONDEMN:
            suspicion.fence_at = now + self._settings.dump_s
            self._condemned[suspicion.worker] = suspicion
        return verdict

    def check(self) -> None:
        """Check the invariants. Tests call this method after every event."""
        for worker, suspicion in self._condemned.items():
            assert self._all.get(worker) is suspicion and suspicion.fence_at is not None
        times = [s.fence_at for s in self._condemned.values() if s.fence_at is not None]
        assert times == sorted(times), "condemned workers are not in the order of their fences"

    def next_fence(self) -> float | None:
        first = next(iter(self._condemned.values()), None)
        return None if first is None else first.fence_at

    def to_fence(self, now: float) -> list[Suspicion]:
        """Return the condemned workers to fence now, because their time for writing stacks is over."""
        due: list[Suspicion] = []
        for suspicion in self._condemned.values():
            if suspicion.fence_at is None or suspicion.fence_at > now:
                break
            due.append(suspicion)
        for suspicion in due:
            self.drop(suspicion.worker)
        return due
