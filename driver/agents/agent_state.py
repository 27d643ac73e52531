"""Decides whom an agent serves, what it tells a driver that has found it, and how long it waits for one. Pure.

    IDLE --attached--> SERVING --driver lost--> AWAY --attached, same job--> SERVING
                       |                       |
                       |                       +-- away_s passed, or fenced: kill the workers --> IDLE
                       +--detached, or attached to another job: kill the workers --> IDLE

A driver has a term, which grows with every driver of a job, and in etcd with every job of one name. An agent never
serves one whose term is lower than one that it has served: that one was replaced while it could not hear of it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from elastic.driver.agents.messages import Attach
from elastic.driver.events import WorkerExited
from elastic.protocol.messages import Worker

EXITS_LIMIT = 4096  # a job's exits on one host; the oldest are forgotten


@dataclass(frozen=True)
class AttachOutcome:
    """What follows from an `Attach`."""

    refused: str = ""  # why this driver is not served; empty: it is
    kill: bool = False  # the workers that run belong to a job that is over


@dataclass
class AgentState:
    """One agent's part. Fields are read by the shell, written here only."""

    job: str = ""  # empty: none, or it is over
    term: int = 0  # the greatest that was served, of the last job
    generation: int = 0  # the greatest that workers here were told of
    exits: OrderedDict[Worker, WorkerExited] = field(default_factory=OrderedDict)
    away_since: float | None = None  # without a driver, while it serves a job
    _away_s: float = 0.0
    _lease_s: float = 0.0
    _last: str = ""  # the job that was served last
    _over: str = ""  # the job that was over last

    def attached(self, attach: Attach, *, seated: int = 0) -> AttachOutcome:
        """A driver has said who it is. ``seated``: the term of the one that leads, as etcd has told; 0: there is none.

        Terms begin anew if etcd loses its data, and with each job in a file; then it is another job. Of those in etcd
        its word counts.
        """
        if attach.term < self.term and (attach.job == self._last or seated not in (0, attach.term)):
            return AttachOutcome(
                refused=f"its term is {attach.term}, and this agent serves one of term {self.term}"
            )
        if attach.job == self._over:
            return AttachOutcome(refused="its job has ended for this agent")
        kill = bool(self.job) and attach.job != self.job
        if attach.job != self.job:
            self.exits.clear()
            self.generation = 0
        self.job, self.term, self._last = attach.job, attach.term, attach.job
        self.away_since, self._away_s, self._lease_s = None, attach.away_s, attach.lease_s
        return AttachOutcome(kill=kill)

    def superseded(self, term: int) -> bool:
        """Whether a driver of this term makes ours one of the past, which may not know it, and be stopped."""
        return bool(self.job) and self.away_since is None and term > self.term

    def lost(self, now: float) -> None:
        """The connection to the driver has ended."""
        if self.job and self.away_since is None:
            self.away_since = now

    @property
    def away_by(self) -> float | None:
        """Until then a driver must have come back."""
        return None if self.away_since is None else self.away_since + self._away_s

    def given_up(self, now: float) -> bool:
        """Whether it has waited long enough for a driver. Its workers are then to be killed."""
        if self.away_by is None or now < self.away_by:
            return False
        self.release()
        return True

    def told(self, generation: int) -> None:
        """Workers here were told of this world."""
        self.generation = max(self.generation, generation)

    def fenced(self, generation: int, now: float) -> bool:
        """The others have gone on to this generation, as far as is known from elsewhere than the driver. Whether the
        workers here must not go on in theirs, because no driver has known them for a lease.
        """
        if self.away_since is None or now - self.away_since < self._lease_s:
            return False
        if generation <= self.generation:
            return False
        self.release()
        return True

    def detached(self) -> None:
        """The job is over for this agent."""
        self._over = self.job or self._over
        self.release()

    def release(self) -> None:
        """The job goes on without its workers here; its driver may come back."""
        self.job, self.away_since = "", None
        self.exits.clear()

    def may_start(self, worker: Worker) -> bool:
        """Not one that has run here: what was said on a lost connection may be said again."""
        return bool(self.job) and worker not in self.exits

    def exited(self, event: WorkerExited) -> None:
        """Kept, because a driver that is away has to be told later."""
        if self.job:
            self.exits[event.worker] = event
            while len(self.exits) > EXITS_LIMIT:
                self.exits.popitem(last=False)
