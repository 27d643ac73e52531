"""Detection of training stalls and of the ranks that cause them.

Pure: no I/O, no clock.

    a member waits inside a collective, or at a safepoint where all members stop
      --STALL_S, and a usual interval between collectives-->  stall: the members that do not wait are its culprits
      --ALL_WAIT_S, if every member waits-->                  stall without a culprit: the network, or different calls
    the collective completes, a culprit is killed or exits, the world fails, the job ends  -->  over

The start of a stall is the time at which the first member began to wait, not the time of its detection. A member in a
phase that the script marks as long is never a culprit. The page, ``status``, metrics, ``explain`` and the report use
the same `Stalls` object, an attribute of `TimeSpent`.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.driver import events
from elastic.driver.monitoring.job_view import JobView, ViewReader
from elastic.driver.reasons import counted
from elastic.protocol.messages import COPY, Worker

# Minimum wait before a stall is detected, in seconds. At about this time, the driver requests the culprit's script
# line.
STALL_S = 5.0
# Minimum wait, in seconds, if all members wait: a large collective may take this long without a fault.
ALL_WAIT_S = 30.0
CULPRITS = 8  # maximum number of culprits that are listed
KEPT = 200  # maximum number of past stalls that are stored
# number of latest reports from which the usual interval between collectives is computed
INTERVALS = 9


class StallEnd(enum.Enum):
    """Event that ended a stall."""

    RESUMED = "resumed"
    KILLED = "killed"  # the driver killed a culprit
    LOST = "lost"  # a culprit exited without being killed by the driver, or its host was lost
    BROKEN = "broken"  # the world failed, but not because of the loss of a culprit
    JOB_ENDED = "job ended"


@dataclass(frozen=True)
class Culprit:
    """Member that the other members wait for in a stall.

    Args:
        line: script line that the member executes, such as ``train.py:12``. Empty if unknown.
    """

    worker: Worker
    rank: int
    line: str = ""
    # reason why the worker is frozen, as reported by its agent; empty if it is not frozen
    frozen: str = ""


@dataclass(frozen=True)
class Stall:
    """One stall of training. Times are in seconds.

    Args:
        until: end of the stall, or the time of the query if the stall is in progress (``end`` is None).
    """

    since: float
    until: float
    culprits: tuple[Culprit, ...] = ()
    more: int = 0  # number of culprits that are not listed
    others: int = 0  # number of waiting members
    where: str = ""  # name of the collective in which the first waiting member waits
    line: str = ""  # script line at which that member waits
    end: StallEnd | None = None

    @property
    def seconds(self) -> float:
        return self.until - self.since

    def facts(self, offset: float = 0.0) -> dict[str, Any]:
        """Return the fields of the stall as JSON-serializable values.

        Args:
            offset: seconds to add to each time, which converts it to another clock.
        """
        return {
            "since": self.since + offset,
            "seconds": self.seconds,
            "culprits": [
                {"rank": c.rank, "worker": str(c.worker), "line": c.line, "frozen": c.frozen}
                for c in self.culprits
            ],
            "more": self.more,
            "others": self.others,
            "where": self.where,
            "line": self.line,
            "end": None if self.end is None else self.end.value,
        }


@dataclass
class OpenWait:
    """Wait of one or more members in the same collective, which has not completed."""

    since: float
    last: float  # time at which the last of these members began to wait
    where: str
    line: str
    workers: set[Worker] = field(default_factory=set)


class Stalls(ViewReader):
    """Stall detector of one job.

    Handling an event takes constant time in the number of members, unless a world or a wait ends.
    """

    def __init__(self, view: JobView) -> None:
        self.view = view
        self._ranks: Mapping[Worker, int] = {}  # ranks of the observed members
        self.past: deque[Stall] = deque(maxlen=KEPT)
        self.count = 0  # number of past stalls
        # whether the world has several members and is not known to have failed
        self._whole = False
        self._waits: dict[tuple[str, int], OpenWait] = {}
        self._waits_in: dict[Worker, tuple[str, int]] = {}
        self._late: dict[Worker, None] = {}  # members that are neither waiting nor have returned
        self._progressed_at: dict[Worker, float] = {}
        self._marked: set[Worker] = set()  # members in a phase that the script marks as long
        # For each member, how often it reported each script line during the current wait. The most frequent line is
        # shown, because the last report alone may be misleading.
        self._lines: dict[Worker, Counter[str]] = {}
        self._intervals: deque[float] = deque(maxlen=INTERVALS)
        # Start times, end times and cumulative durations of past stalls, with overlapping stalls merged.
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._sums: list[float] = []
        view.follow(self)

    # ---- updates ---------------------------------------------------------------------------------------------------

    def adopted(self, now: float) -> None:
        self._new_world()

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        view = self.view
        for worker in view.exited:
            self._gone(worker, now, StallEnd.LOST)
        match event:
            case events.WorkerResumed() | events.WorkersResumed() | events.WorkerSpent():
                pass  # frequent: skip the other cases
            case events.WorkerProgressed(worker, generation):
                if generation == view.generation and worker in self._ranks and self._whole:
                    self._progressed(event, now)
            case events.WorkerLocated(worker, generation, line):
                if generation == view.generation and line and self._waits:
                    self._lines.setdefault(worker, Counter())[line] += 1
            case events.WorkerPaced(worker, generation):
                if generation == view.generation and event.over_s > 0 and event.collectives:
                    self._paced(event, now)
            case events.WorkerReady(worker):
                self._ready(worker, now)
            case events.WorkersReady(workers):
                for worker in workers if self._whole else ():
                    self._ready(worker, now)
            case events.WorkerReturned(worker):
                self._leave(worker, now)
                self._late.pop(worker, None)
            case events.WorkerRaised(worker) | events.WorkerQuit(worker):
                self._gone(worker, now, StallEnd.LOST)
            case events.DriverRestarted():
                self._forget()  # Workers repeat the reports of their waits.
            case _:
                pass

    def decided(self, action: events.Action, now: float) -> None:
        match action:
            case events.KillWorker(worker):
                self._gone(worker, now, StallEnd.KILLED)
            case events.BreakWorld():
                self._over(now, StallEnd.BROKEN)
            case events.CallOffChange():
                self._complete(("", -1), now)
            case events.PublishWorld():
                # The world was replaced in a planned change, so the stall did not end with a failure.
                self._over(now, StallEnd.RESUMED)
                self._new_world()
            case events.FinishWorld():
                self._over(now, StallEnd.RESUMED)
            case events.EndJob():
                self._over(now, StallEnd.JOB_ENDED)
            case _:
                pass

    def _ready(self, worker: Worker, now: float) -> None:
        if worker in self._ranks and self._whole:
            self._leave(worker, now)
            if self.view.trains:
                self._enter(worker, ("", -1), OpenWait(now, now, "", ""))
            # A worker that waits in init() or has just entered elastic.run is not a culprit.
            self._late.pop(worker, None)

    def _progressed(self, event: events.WorkerProgressed, now: float) -> None:
        worker, key = event.worker, (event.inside, event.entered)
        if event.phase:
            self._marked.add(worker)
        elif worker in self._marked:
            self._marked.discard(worker)
            self._progressed_at[worker] = now
        if event.inside and self._waits_in.get(worker) == key:
            return  # The worker repeats its report of the same wait.
        self._leave(worker, now)
        if event.inside:
            since = now - event.waited_s
            self._enter(worker, key, OpenWait(since, since, event.inside, event.line))
        elif not event.phase:
            self._progressed_at[worker] = now

    def _paced(self, event: events.WorkerPaced, now: float) -> None:
        since = now - event.over_s
        # The worker has completed collectives without the waiting members, possibly in another process set.
        self._progressed_at[event.worker] = max(since, self._progressed_at.get(event.worker, since))
        if (not self._ends or self._ends[-1] <= since) and self.current(now) is None:
            self._intervals.append(event.over_s / event.collectives)

    # ---- queries ---------------------------------------------------------------------------------------------------

    @property
    def waits_since(self) -> float | None:
        """Return the time at which members began to wait in the current collective, or None if no member waits.

        Waits that are too short for a stall are included.
        """
        return min((wait.since for wait in self._waits.values()), default=None)

    def current(self, now: float) -> Stall | None:
        """Return the current stall, or None if there is none."""
        found = [self._stall(wait, now) for wait in self._waits.values()]
        return min(
            (stall for stall in found if stall is not None), key=lambda s: s.since, default=None
        )

    def awaited(self, now: float) -> Stall | None:
        """Return the longest current wait as a stall, even if it is too short to count as one.

        Returns None if no member waits, if all members wait, or if more than half of the members would be culprits.
        """
        if not self._waits or 2 * len(self._late) > len(self._ranks):
            return None
        wait = min(self._waits.values(), key=lambda each: each.since)
        return self._of(wait, now, [*self._late]) if self._late else None

    def seconds(self, since: float, until: float, lasting: Stall | None) -> float:
        """Return the number of seconds in an interval that were spent in stalls.

        Args:
            since: beginning of the interval.
            until: end of the interval.
            lasting: result of `current` at ``until``. No past stall may end after ``until``.
        """
        first = bisect_right(self._ends, since)
        before = self._sums[first - 1] if first else 0.0
        found = (self._sums[-1] if self._sums else 0.0) - before
        if first < len(self._ends):
            found -= max(0.0, since - self._begins[first])
        if lasting is not None:
            since = max(since, lasting.since, self._ends[-1] if self._ends else lasting.since)
            found += max(0.0, until - since)
        return found

    def undecided_since(self, now: float) -> float:
        """Return the time until which all stalls are known.

        Waits that began later may still become stalls.
        """
        if self.current(now) is not None:
            return now
        return min([now, *(wait.since for wait in self._waits.values())])

    # ---- private ---------------------------------------------------------------------------------------------------

    def _new_world(self) -> None:
        self._ranks = self.view.ranks
        self._whole = len(self._ranks) > 1
        self._late = dict.fromkeys(self._ranks)
        for known in (self._progressed_at, self._lines):
            known.clear()
        self._marked.clear()

    def _enter(self, worker: Worker, key: tuple[str, int], made: OpenWait) -> None:
        # The last member that others waited for now waits as well.
        if len(self._late) == 1 and worker in self._late:
            for each in self._waits.values():
                stall = self._stall(each, made.since)
                if stall is not None:
                    self._record(replace(stall, end=StallEnd.RESUMED))
                    each.since = made.since
            self._lines.clear()
        wait = self._waits.setdefault(key, made)
        if made.since < wait.since:
            wait.since, wait.line = made.since, made.line
        wait.last = max(wait.last, made.since)
        wait.workers.add(worker)
        self._waits_in[worker] = key
        self._late.pop(worker, None)

    def _leave(self, worker: Worker, now: float) -> None:
        key = self._waits_in.get(worker)
        if key is not None:
            # The collective has completed for one member, so it completes for all. The others report this later.
            self._complete(key, now)

    def _complete(self, key: tuple[str, int], now: float) -> None:
        wait = self._waits.get(key)
        if wait is not None:
            self._close(key, wait, now, StallEnd.RESUMED, ())

    def _close(
        self,
        key: tuple[str, int],
        wait: OpenWait,
        now: float,
        end: StallEnd,
        blamed: Sequence[Worker],
    ) -> None:
        stall = self._stall(wait, now, blamed)
        if stall is not None:
            self._record(replace(stall, end=end))
        del self._waits[key]
        if not self._waits:
            self._lines.clear()
        for worker in wait.workers:
            if self._waits_in.get(worker) == key:
                del self._waits_in[worker]
                self._late[worker] = None
                self._progressed_at[worker] = now

    def _over(self, now: float, end: StallEnd, blamed: Sequence[Worker] = ()) -> None:
        for key, wait in [*self._waits.items()]:
            self._close(key, wait, now, end, blamed)
        self._whole = False

    def _gone(self, worker: Worker, now: float, end: StallEnd) -> None:
        if worker not in self._ranks:
            return
        if worker in self._late or (end is StallEnd.KILLED and not self._late):
            self._over(now, end, [] if worker in self._late else [worker])
        self._late.pop(worker, None)

    def _forget(self) -> None:
        for wait in self._waits.values():
            self._late.update(dict.fromkeys(wait.workers))
        self._waits.clear()
        self._waits_in.clear()

    def _stall(self, wait: OpenWait, now: float, blamed: Sequence[Worker] = ()) -> Stall | None:
        least_s = self._least_s()
        if now - wait.since < least_s:
            return None
        if self._late:
            late = [
                worker
                for worker in self._late
                if worker not in self._marked and now - self._held_since(worker, wait) >= least_s
            ]
            return self._of(wait, now, late) if late else None
        if now - wait.last < max(least_s, ALL_WAIT_S) and not blamed:
            return None
        return None if wait.where == COPY else self._of(wait, now, blamed)

    def _least_s(self) -> float:
        usual = sorted(self._intervals)
        return max(STALL_S, usual[len(usual) // 2] if usual else 0.0)

    def _held_since(self, worker: Worker, wait: OpenWait) -> float:
        return max(wait.since, self._progressed_at.get(worker, wait.since))

    def _of(self, wait: OpenWait, now: float, late: Sequence[Worker]) -> Stall:
        ranked = sorted(late, key=lambda worker: self._ranks[worker])
        named = tuple(
            Culprit(w, self._ranks[w], self._line(w), self._frozen(w)) for w in ranked[:CULPRITS]
        )
        held = [self._held_since(worker, wait) for worker in late if worker in self._late]
        since = min(held, default=wait.last)
        more, others = len(ranked) - len(named), len(self._waits_in)
        return Stall(since, now, named, more, others, wait.where, wait.line)

    def _frozen(self, worker: Worker) -> str:
        known = self.view.get(worker)
        how = None if known is None else known.frozen
        return "" if how is None else how or "not able to run"

    def _line(self, worker: Worker) -> str:
        lines = self._lines.get(worker)
        return lines.most_common(1)[0][0] if lines else ""

    def _record(self, stall: Stall) -> None:
        last = self.past[-1] if self.past else None
        if last is not None and stall.since < last.until and last.culprits == stall.culprits:
            # The same ranks also blocked another process set, so both waits count as one stall.
            self.past[-1] = replace(stall, since=min(last.since, stall.since))
        else:
            self.past.append(stall)
            self.count += 1
        begin = max([stall.since, *self._ends[-1:]])
        self._begins.append(begin)
        self._ends.append(max(begin, stall.until))
        self._sums.append((self._sums[-1] if self._sums else 0.0) + max(0.0, stall.until - begin))


ENDS = {
    StallEnd.RESUMED: "it made progress",
    StallEnd.KILLED: "the job killed it",
    StallEnd.LOST: "it exited",
    StallEnd.BROKEN: "another rank failed",
    StallEnd.JOB_ENDED: "the job ended",
}


def blamed(facts: Mapping[str, Any]) -> str:
    """Describe the culprits of a stall, for example ``rank 1 (h:1#1) at train.py:12``. Empty if there are none.

    Args:
        facts: result of `Stall.facts`.
    """
    names = [
        f"rank {each['rank']} ({each['worker']})"
        + (f" at {each['line']}" if each["line"] else "")
        + (f", frozen ({each['frozen']})" if each["frozen"] else "")
        for each in facts["culprits"]
    ]
    more = [f"{facts['more']} more"] if facts["more"] else []
    return " and ".join([", ".join(names), *more]) if names else ""


def as_sentence(facts: Mapping[str, Any]) -> str:
    """Describe a stall's facts as a clause.

    For example ``3 ranks wait for rank 1 (h:1#1) at train.py:12``, or in the past tense after the end of the stall.
    """
    culprits, others = blamed(facts), counted(facts["others"], "rank")
    now = "waits" if facts["others"] == 1 else "wait"
    verb = now if facts["end"] is None else "waited"
    if culprits:
        return f"{others} {verb} for {culprits}"
    place = f" at {facts['line']}" if facts["line"] else ""
    return f"all {others} {verb} in {facts['where']!r}{place}, and no rank was missing"
