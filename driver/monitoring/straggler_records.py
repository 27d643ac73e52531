"""Record of the stragglers of a job, with their speeds and slow periods. Pure: no I/O, no clock.

`failure_detection.stragglers` detects stragglers, and the driver logs each change of the list. ``explain``, the report
and the metrics read the same `SlowWorkers`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic.driver import events
from elastic.driver.monitoring.job_view import JobView, ViewReader
from elastic.driver.reasons import Reason, ReasonKind
from elastic.protocol.messages import Worker

KEPT = 200  # maximum number of stored stragglers; further ones are only counted


class SlowEnd(enum.Enum):
    """Reason why a worker's last slow period ended."""

    RECOVERED = "recovered"  # the worker's speed rose above the limit again
    REPLACED = "replaced"  # the worker was replaced by a standby (--replace-stragglers)
    LEFT = "left"  # the worker left the world for another reason, or was lost
    WORLD_ENDED = "world ended"  # a new world began, in which speeds are measured again
    JOB_ENDED = "job ended"


@dataclass
class SlowWorker:
    """Slow periods of one worker, with times on the journal's clock.

    Args:
        since: beginning of the first period.
        speed: lowest speed at the beginning of a period, as a fraction of the median speed of the other workers.
        seconds: total duration of the ended periods, in seconds.
        waited_s: seconds that the other workers spent in collectives during the periods, as they reported.
        over_s: seconds that these reports cover.
        end: cause of the end of the last period, or None while it lasts.
    """

    worker: Worker
    rank: int
    since: float
    speed: float
    periods: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    over_s: float = 0.0
    end: SlowEnd | None = None
    began: float = 0.0  # time at which the current period began

    def facts(self, now: float) -> dict[str, Any]:
        """Return the fields as JSON-serializable values."""
        lasting = now - self.began if self.end is None else 0.0
        return {
            "rank": self.rank,
            "worker": str(self.worker),
            "host": self.worker.host,
            "speed": self.speed,
            "periods": self.periods,
            "seconds": self.seconds + lasting,
            "others_wait": self.waited_s / self.over_s if self.over_s else None,
            "end": None if self.end is None else self.end.value,
        }


class SlowWorkers(ViewReader):
    """Record of the stragglers of one job.

    Args:
        workers: all stragglers so far, at most KEPT, in the order of their first slow period.
        more: number of stragglers that are not stored.
        current: the current stragglers.
    """

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.workers: dict[Worker, SlowWorker] = {}
        self.more = 0
        self.current: frozenset[Worker] = frozenset()
        view.follow(self)

    def happened(self, event: events.Event, actions: Sequence[events.Action], now: float) -> None:
        for worker in self.view.exited:
            self._end(worker, SlowEnd.LEFT, now)
        if self.current and isinstance(event, events.WorkerPaced):
            self._paced(event)

    def decided(self, action: events.Action, now: float) -> None:
        match action:
            case events.Report(_, _, about) if about and about.kind is ReasonKind.STRAGGLERS:
                self._named(about, now)
            case events.LetGo(worker, reason) if reason.kind is ReasonKind.REPLACED:
                self._end(worker, SlowEnd.REPLACED, now)
                if worker in self.workers:
                    self.workers[worker].end = SlowEnd.REPLACED
            case events.PublishWorld():
                for worker in self.current:
                    remains = worker in self.view.ranks
                    self._end(worker, SlowEnd.WORLD_ENDED if remains else SlowEnd.LEFT, now)
            case events.EndJob():
                for worker in self.current:
                    self._end(worker, SlowEnd.JOB_ENDED, now)
            case _:
                pass

    def _named(self, about: Reason, now: float) -> None:
        """Update the current stragglers from the list in the driver's log line."""
        names, speeds = str(about.facts["workers"]), str(about.facts["speeds"])
        listed = dict(zip(names.split(", "), speeds.split(", "), strict=True)) if names else {}
        found = {each: listed[str(each)] for each in self.view.ranks if str(each) in listed}
        for worker in self.current - found.keys():
            self._end(worker, SlowEnd.RECOVERED, now)
        for worker in found.keys() - self.current:
            self._begin(worker, float(found[worker]), now)

    def _begin(self, worker: Worker, speed: float, now: float) -> None:
        self.current |= {worker}
        slow = self.workers.get(worker)
        if slow is None:
            if len(self.workers) >= KEPT:
                self.more += 1
                return
            slow = self.workers[worker] = SlowWorker(worker, 0, now, speed)
        slow.rank, slow.speed = self.view.ranks[worker], min(slow.speed, speed)
        slow.periods, slow.began, slow.end = slow.periods + 1, now, None

    def _end(self, worker: Worker, how: SlowEnd, now: float) -> None:
        if worker not in self.current:
            return
        self.current -= {worker}
        if slow := self.workers.get(worker):
            slow.seconds, slow.end = slow.seconds + now - slow.began, how

    def _paced(self, event: events.WorkerPaced) -> None:
        if event.worker in self.current or event.generation != self.view.generation:
            return
        for slow in filter(None, map(self.workers.get, self.current)):
            slow.waited_s += event.waited_s
            slow.over_s += event.over_s
