"""What the parts of a simulation know of the whole, and of each other: so that each can be read, and tested, alone."""

from __future__ import annotations

from typing import Any, Protocol

from elastic.chaos.simulator.simulated_network import SimulatedNetwork
from elastic.chaos.simulator.virtual_clock import Clock
from elastic.driver.events import Action, DumpStacks, Event, KillWorker, StartWorker
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker


class Agent(Protocol):
    """An agent, as its workers see it."""

    host: str
    frozen: bool

    def reaped(self, process: Any, code: int) -> None:
        """A process has ended."""

    def watch(self) -> None:
        """A process may be frozen: take samples."""


class SimulatedJob(Protocol):
    """One job. What is `Any` here is a class of the file of that name."""

    clock: Clock
    network: SimulatedNetwork
    settings: Settings
    weather: Any  # simulated_faults
    training: Any  # simulated_training
    driver: Any  # simulated_driver
    agents: dict[str, Any]  # simulated_agent, by host
    workers: int
    processes: dict[Worker, Any]  # simulated_worker: those that live
    hosts: dict[str, int]  # and their slots
    listed: dict[str, int]  # as discovery has them now
    steps: int
    step_s: float  # more than 0: all members make a step in one event, that far apart
    mild: bool  # faults never take the last holder of the state
    aimed: int  # kills that wait for a commit
    going_on: bool
    keep_journal: bool
    reports_samples: bool

    def note(self, fault: str) -> None:
        """A fault was injected."""

    def list_hosts(self, hosts: dict[str, int]) -> None:
        """Discovery has found these, with their slots."""

    def heal(self, host: str) -> None: ...

    def lose_host(self, host: str) -> None: ...

    def born(self, process: Any) -> None: ...

    def struck(self, process: Any) -> None: ...

    def labelled(self, process: Any) -> None: ...

    def commits(self, process: Any) -> None: ...

    def ordered(self, action: StartWorker | KillWorker | DumpStacks) -> None:
        """The driver has told an agent. Raises AssertionError where it should not have."""

    def decided(self, event: Event, actions: list[Action]) -> None:
        """The driver has decided; nothing was done about it yet. Raises AssertionError where it is wrong."""
