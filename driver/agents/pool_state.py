"""What an `AgentPool` keeps of each host, its deadlines, and what it has decided about the event at hand. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from elastic.driver.agents.messages import AgentMessage, HostAgent, Start
from elastic.driver.agents.pool_events import PoolAction, TellAgents
from elastic.driver.events import Report
from elastic.protocol.messages import Worker

AGAIN_S = (2.0, 60.0)  # between two tries to start an agent where one was lost: first, longest


@dataclass(eq=False)
class AgentRecord:
    """What is known of one host's agent."""

    name: str
    agent: HostAgent | None = None  # the one that has registered last
    here: bool = False  # it is connected, and has said who runs
    ends: bool = False  # once it is dismissed
    coming: bool = False  # it was started, outlives us, and has not called yet
    starts: list[Start] = field(default_factory=list)  # that wait for it
    starting: bool = False  # an agent is being started
    running: set[Worker] = field(default_factory=set)  # ordered or reported, and their exit was not
    doomed: set[Worker] = field(default_factory=set)  # to be killed once the agent is here
    overdue_why: str = ""  # why it is lost, if it is not here in time
    again_s: float = AGAIN_S[0]  # until the next try to start an agent here
    given_up: bool = False  # we have hung up, and do not wait for its return
    trouble: str = ""  # the last one of starting an agent, said once


class Due(enum.IntEnum):
    """What is to happen at a deadline."""

    ARRIVAL = 1  # the host's agent has to be here by then
    RETRY = 2  # an agent is started there once more
    RESIGNATION = 3  # nobody was reached for so long that all those hosts are lost
    BEAT = 4


class Timetable:
    """One deadline for each host and purpose; ``""`` stands for all hosts."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, Due], float] = {}
        self._first: float | None = None
        self._known = True  # that it is the first

    def __contains__(self, key: tuple[str, Due]) -> bool:
        return key in self._at

    def put(self, host: str, due: Due, at: float) -> None:
        self._at[host, due] = at
        self._known = False

    def drop(self, host: str, due: Due) -> None:
        if self._at.pop((host, due), None) is not None:
            self._known = False

    def clear(self) -> None:
        self._at.clear()
        self._known = False

    def first(self) -> float | None:
        if not self._known:
            self._first, self._known = min(self._at.values(), default=None), True
        return self._first

    def pop(self, now: float) -> tuple[str, Due] | None:
        """The earliest that has come, which is none any more."""
        first = self.first()
        if first is None or first > now:
            return None
        key = min(key for key, at in self._at.items() if at == first)
        self.drop(*key)
        return key


class PoolActions:
    """Actions in the order in which they are to be performed. ``now`` is the time of the event, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.decided: list[PoolAction] = []

    def begin(self, now: float) -> None:
        self.now, self.decided = now, []

    def add(self, action: PoolAction) -> None:
        self.decided.append(action)

    def log(self, level: str, text: str) -> None:
        self.add(Report(level, text))

    def tell(self, host: AgentRecord, message: AgentMessage) -> None:
        """Where its agent is here; else nobody is told."""
        if host.here and host.agent is not None:
            self.add(TellAgents([host.agent], [message]))
