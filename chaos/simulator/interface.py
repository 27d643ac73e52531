"""Interfaces between the parts of a simulation, so that each part can be read and tested separately."""

from __future__ import annotations

from typing import Any, Protocol

from elastic.chaos.simulator.simulated_network import SimulatedNetwork
from elastic.chaos.simulator.virtual_clock import Clock
from elastic.driver.events import Action, DumpStacks, Event, KillWorker, StartWorker
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker


class Agent(Protocol):
    """Interface of a host's agent, as used by the workers of the host."""

    host: str
    frozen: bool

    def reaped(self, process: Any, code: int) -> None:
        """Handle the exit of a worker process with the given exit code."""

    def watch(self) -> None:
        """Start to sample whether the workers are running, because one may be frozen."""


class SimulatedJob(Protocol):
    """Interface of one simulated job. `Any` stands for a class of the module that the comment names."""

    clock: Clock
    network: SimulatedNetwork
    settings: Settings
    weather: Any  # class of `simulated_faults`
    training: Any  # class of `simulated_training`
    driver: Any  # class of `simulated_driver`
    agents: dict[str, Any]  # objects of `simulated_agent`, by host
    workers: int
    processes: dict[Worker, Any]  # live objects of `simulated_worker`
    hosts: dict[str, int]  # hosts with their slots
    listed: dict[str, int]  # hosts in the current host list
    fixed_hosts: bool  # the list does not grow; see `HostsChanged`
    steps: int
    # If positive, one event every ``step_s`` simulated seconds advances all members by one step.
    step_s: float
    mild: bool  # the faults spare the last worker that holds the state
    calmed: bool  # the faults have ended
    aimed: int  # number of workers to kill at the next commits
    going_on: bool
    keep_journal: bool
    reports_samples: bool
    sharded: Any  # object that `simulated_shards` returns, or None if no shards are simulated
    seed: int
    verify: float  # share of the shards of a step that two workers compute
    named: set[Worker]  # workers that the driver found to compute wrongly
    # of `named`, workers whose wrong gradients may remain, since no copy of an older commit existed
    excused: set[Worker]
    throttled: set[Worker]  # workers that a fault has made slow

    def note(self, fault: str) -> None:
        """Add a description of an injected fault to the story."""

    def list_hosts(self, hosts: dict[str, int]) -> None:
        """Set the list of hosts found by discovery, with their numbers of slots."""

    def heal(self, host: str) -> None: ...

    def lose_host(self, host: str) -> None: ...

    def process(self, agent: Agent, worker: Worker) -> Any:
        """Return a new worker process that has not been started yet."""

    def born(self, process: Any) -> None: ...

    def struck(self, process: Any) -> None: ...

    def labelled(self, process: Any) -> None: ...

    def commits(self, process: Any) -> None: ...

    def ordered(self, action: StartWorker | KillWorker | DumpStacks) -> None:
        """Check an order of the driver to an agent. Raises AssertionError if the order violates an invariant."""

    def decided(self, event: Event, actions: list[Action]) -> None:
        """Check a decision of the driver before it is carried out.

        Raises AssertionError if the decision violates an invariant.
        """
