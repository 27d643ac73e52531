"""Decisions of an agent: which driver to serve, and how long to wait for a driver. Pure: no I/O, no clock.

    IDLE --attached--> SERVING --driver lost--> AWAY --attached, same job--> SERVING
             |                       |
             |                       +-- away_s passed, or fenced: kill the workers --> IDLE
             +--detached, or attached to another job: kill the workers --> IDLE

Each driver of a job has a greater term than the previous one. In etcd, terms also increase across jobs of the same
name. An agent that has served a driver rejects drivers with a lower term: such drivers were replaced and do not know it
yet.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from elastic.driver.agents.messages import Attach
from elastic.driver.events import WorkerExited
from elastic.protocol.messages import Worker

EXITS_LIMIT = 4096  # maximum number of stored exits of a job's workers; the oldest are discarded


@dataclass(frozen=True)
class AttachOutcome:
    """Decision of an agent about an `Attach` message."""

    refused: str = ""  # reason for rejecting this driver; empty if the agent serves it
    kill: bool = False  # whether to kill the running workers, because they belong to another job


@dataclass
class AgentState:
    """State of one agent. `HostAgent` may read the fields, but only this class modifies them."""

    job: str = ""  # ID of the job that the agent serves; empty if none
    term: int = 0  # greatest term served in the last job
    generation: int = 0  # greatest generation of a world sent to this host's workers
    exits: OrderedDict[Worker, WorkerExited] = field(default_factory=OrderedDict)
    # time at which the connection to the job's driver was lost; None if connected or without a job
    away_since: float | None = None
    _away_s: float = 0.0
    _lease_s: float = 0.0
    _last: str = ""  # ID of the last job served
    _over: str = ""  # ID of the last job that has ended

    def attached(self, attach: Attach, *, seated: int = 0) -> AttachOutcome:
        """Handle a driver's `Attach` message.

        A message with a lower term is accepted only for a different job, because terms restart with each job whose
        journal is a file, and when etcd loses its data. If etcd contains a leader's term, the message's term must be
        equal to it.

        Args:
            attach: the driver's message.
            seated: the leader's term according to etcd, or 0 if etcd has none.
        """
        if attach.term < self.term and (attach.job == self._last or seated not in (0, attach.term)):
            return AttachOutcome(
                refused=f"its term is {attach.term}, but this agent serves a driver of term {self.term}"
            )
        if attach.job == self._over:
            return AttachOutcome(refused="this agent has already ended its job")
        kill = bool(self.job) and attach.job != self.job
        if attach.job != self.job:
            self.exits.clear()
            self.generation = 0
        self.job, self.term, self._last = attach.job, attach.term, attach.job
        self.away_since, self._away_s, self._lease_s = None, attach.away_s, attach.lease_s
        return AttachOutcome(kill=kill)

    def superseded(self, term: int) -> bool:
        """Return whether a driver of this term replaces the current, possibly frozen driver."""
        return bool(self.job) and self.away_since is None and term > self.term

    def lost(self, now: float) -> None:
        """Handle the loss of the connection to the driver."""
        if self.job and self.away_since is None:
            self.away_since = now

    @property
    def away_by(self) -> float | None:
        """Return the time by which a driver must reconnect, in seconds, or None while a driver is connected."""
        return None if self.away_since is None else self.away_since + self._away_s

    def given_up(self, now: float) -> bool:
        """Return whether the time limit for a driver has expired, in which case the workers must be killed."""
        if self.away_by is None or now < self.away_by:
            return False
        self.release()
        return True

    def record_world(self, generation: int) -> None:
        """Record the generation of a world that was sent to workers of this host."""
        self.generation = max(self.generation, generation)

    def fenced(self, generation: int, now: float) -> bool:
        """Return whether to kill this host's workers, because the job has continued without them.

        Return True only if no driver was reachable for one liveness timeout.

        Args:
            generation: the current generation according to etcd.
            now: current time, in seconds.
        """
        if self.away_since is None or now - self.away_since < self._lease_s:
            return False
        if generation <= self.generation:
            return False
        self.release()
        return True

    def detached(self) -> None:
        """Handle the driver's message that the job has ended."""
        self._over = self.job or self._over
        self.release()

    def release(self) -> None:
        """Leave the job, whose workers on this host will be killed. The driver may connect again."""
        self.job, self.away_since = "", None
        self.exits.clear()

    def may_start(self, worker: Worker) -> bool:
        """Return whether a worker may be started. A worker that has exited is not started again."""
        return bool(self.job) and worker not in self.exits

    def exited(self, event: WorkerExited) -> None:
        """Store the exit of a worker until a driver is connected."""
        if self.job:
            self.exits[event.worker] = event
            while len(self.exits) > EXITS_LIMIT:
                self.exits.popitem(last=False)
