"""State of an `AgentPool`: hosts, deadlines, and the actions for the current event. Pure: no I/O, no clock."""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass, field

from elastic.driver.agents.messages import AgentId, AgentMessage, Start
from elastic.driver.agents.pool_events import PoolAction, SendToAgents
from elastic.driver.events import Report
from elastic.protocol.messages import Worker

# initial and maximum delay between attempts to start an agent on a lost host, in seconds
AGAIN_S = (2.0, 60.0)


@dataclass(eq=False)
class AgentRecord:
    """State of one host's agent."""

    name: str
    agent: AgentId | None = None  # last agent that registered
    here: bool = False  # whether the agent is connected and has reported its workers
    ends: bool = False  # whether the agent exits when it is dismissed
    # whether a started agent, which may outlive this driver, has yet to connect
    coming: bool = False
    # queued orders to start workers, sent once the agent connects
    starts: list[Start] = field(default_factory=list)
    starting: bool = False  # whether an agent is being started
    # workers that were ordered to start or reported as running, and have not exited
    running: set[Worker] = field(default_factory=set)
    doomed: set[Worker] = field(default_factory=set)  # workers to kill once the agent is connected
    overdue_why: str = ""  # reason for the loss of the host if its agent does not connect in time
    again_s: float = AGAIN_S[0]  # seconds until the next attempt to start an agent on this host
    # whether the driver considers the host lost and does not wait for its agent
    given_up: bool = False
    trouble: str = ""  # error of the last failed agent start, stored to log each error once


class DeadlineKind(enum.IntEnum):
    """Kind of a deadline, named after the event that is expected or the action that is due."""

    ARRIVAL = 1  # host is lost if its agent has not connected
    RETRY = 2  # start of the host's agent is retried
    RESIGNATION = 3  # all unresponsive hosts are lost if none has become reachable
    BEAT = 4


class PoolDeadlines:
    """Deadlines of an `AgentPool`, one for each host and kind. The host ``""`` stands for all hosts."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, DeadlineKind], float] = {}
        # Heap that may contain outdated deadlines, so that updates are fast when thousands of agents reconnect after a
        # failover.
        self._queue: list[tuple[float, tuple[str, DeadlineKind]]] = []

    def __contains__(self, key: tuple[str, DeadlineKind]) -> bool:
        return key in self._at

    def put(self, host: str, due: DeadlineKind, at: float) -> None:
        self._at[host, due] = at
        heapq.heappush(self._queue, (at, (host, due)))

    def drop(self, host: str, due: DeadlineKind) -> None:
        self._at.pop((host, due), None)

    def clear(self) -> None:
        self._at.clear()
        self._queue.clear()

    def first(self) -> float | None:
        while self._queue:
            at, key = self._queue[0]
            if self._at.get(key) == at:
                return at
            heapq.heappop(self._queue)
        return None

    def pop(self, now: float) -> tuple[str, DeadlineKind] | None:
        """Remove and return the earliest expired deadline, or None if none has expired."""
        first = self.first()
        if first is None or first > now:
            return None
        _, key = heapq.heappop(self._queue)
        del self._at[key]
        return key


class PoolActions:
    """Collector of the actions for one event, in the order in which they must be performed.

    Attributes:
        now: time of the event, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.decided: list[PoolAction] = []

    def begin(self, now: float) -> None:
        self.now, self.decided = now, []

    def add(self, action: PoolAction) -> None:
        self.decided.append(action)

    def log(self, level: str, text: str) -> None:
        self.add(Report(level, text))

    def send(self, host: AgentRecord, message: AgentMessage) -> None:
        """Add an action that sends a message to the agent of a host, if the agent is connected."""
        if host.here and host.agent is not None:
            self.add(SendToAgents([host.agent], [message]))
