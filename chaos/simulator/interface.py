"""Interfaces between the parts of a simulation, so that each can be read and tested on its own."""

from __future__ import annotations

from typing import Any, Protocol

from elastic.chaos.simulator.simulated_network import SimulatedNetwork
from elastic.chaos.simulator.virtual_clock import Clock
from elastic.driver.events import Action, DumpStacks, Event, KillWorker, StartWorker
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker


class Agent(Protocol):
    """Interface of an agent for its workers."""

    host: str
    frozen: bool

    def reaped(self, process: Any, code: int) -> None:
        """Handle the end of a process."""

    def watch(self) -> None:
        """Start sampling, because a process may be frozen."""


class SimulatedJob(Protocol):
    """One job. `Any` stands for a class of the module named in the comment."""

    clock: Clock
    network: SimulatedNetwork
    settings: Settings
    weather: Any  # simulated_faults
    training: Any  # simulated_training
    driver: Any  # simulated_driver
    agents: dict[str, Any]  # simulated_agent, by host
    workers: int
    processes: dict[Worker, Any]  # simulated_worker: live ones
    hosts: dict[str, int]  # hosts with their slots
    listed: dict[str, int]  # hosts in the current host list
    fixed_hosts: bool  # the list does not grow; see `HostsChanged`
    steps: int
    step_s: float  # If positive, all members make a step in one event at this interval.
    mild: bool  # faults spare the last holder of the state
    calmed: bool  # the faults have ended
    aimed: int  # kills to carry out at the next commits
    going_on: bool
    keep_journal: bool
    reports_samples: bool
    sharded: Any  # simulated_shards, or None
    seed: int
    verify: float  # share of the shards of a step that two workers compute
    named: set[Worker]  # workers that the driver found to compute wrongly
    excused: set[Worker]  # ... whose first steps no worker had a copy of
    throttled: set[Worker]  # workers that a fault has made slow

    def note(self, fault: str) -> None:
        """Record an injected fault."""

    def list_hosts(self, hosts: dict[str, int]) -> None:
        """Set the host list found by discovery, with slots."""

    def heal(self, host: str) -> None: ...

    def lose_host(self, host: str) -> None: ...

    def process(self, agent: Agent, worker: Worker) -> Any:
        """A new process, not started yet."""

    def born(self, process: Any) -> None: ...

    def struck(self, process: Any) -> None: ...

    def labelled(self, process: Any) -> None: ...

    def commits(self, process: Any) -> None: ...

    def ordered(self, action: StartWorker | KillWorker | DumpStacks) -> None:
        """Check an order of the driver to an agent. Raises AssertionError if it is wrong."""

    def decided(self, event: Event, actions: list[Action]) -> None:
        """Check a decision of the driver before it is carried out. Raises AssertionError if it is wrong."""
