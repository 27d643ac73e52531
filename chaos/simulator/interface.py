"""Interfaces between the parts of a simulation, so that each part can be tested separately."""

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
        """Start sampling the workers, because one of them may be frozen."""


class SimulatedJob(Protocol):
    """Interface of one simulated job. For attributes of type `Any`, a comment names the class."""

    clock: Clock
    network: SimulatedNetwork
    settings: Settings
    weather: Any  # `simulated_faults.FaultConditions`
    training: Any  # `simulated_training.Training`
    driver: Any  # `simulated_driver.SimulatedDriver`
    agents: dict[str, Any]  # `simulated_agent.SimulatedAgent` of each host
    workers: int
    processes: dict[Worker, Any]  # `simulated_worker.SimulatedWorker` of each live process
    hosts: dict[str, int]  # number of slots of each host
    listed: dict[str, int]  # number of slots of each host in the current host list
    fixed_hosts: bool  # whether the list of hosts is fixed; see `HostsChanged`
    steps: int
    # if positive, one event advances all members by one step every ``step_s`` simulated seconds
    step_s: float
    mild: bool  # whether the faults spare the last worker that holds the state
    calmed: bool  # whether the phase with faults has ended
    aimed: int  # number of kills to schedule at the next commits
    going_on: bool
    keep_journal: bool
    merges: bool  # whether agents merge the reports of their workers, as those of a job on several hosts do
    has_metadata: bool  # whether workers send metadata when they are ready
    reports_samples: bool
    sharded: Any  # `simulated_shards.ShardedJob`; None without shards
    seed: int
    verify: float  # fraction of a step's shards that are verified by a second worker
    named: set[Worker]  # workers that the driver reported as computing wrong results
    # workers in `named` whose wrong gradients may remain in the state, because no older copy of a commit existed
    excused: set[Worker]
    throttled: set[Worker]  # workers that a fault has slowed down

    def note(self, fault: str) -> None:
        """Add a description of an injected fault to the list of events."""

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
        """Check the driver's order to an agent. Raises AssertionError if the order violates an invariant."""

    def decided(self, event: Event, actions: list[Action], *, more: bool = False) -> None:
        """Check a decision of the driver before it is performed.

        Raises AssertionError if the decision violates an invariant.
        """
