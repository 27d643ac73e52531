"""Simulation of large jobs on a virtual clock, to measure how the cost of a regroup grows with the number of workers.

The simulation runs the real state machines. A step of a world is one event, and a heartbeat is one event per host.
The simulated fault is the most common one in large jobs: whole hosts die during training and return later. After the
given time no more hosts fail, and a regroup in progress may finish before the job is checked.
`python -m elastic.chaos.simulator.regroup_cost` prints the results as a table.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from elastic.chaos.simulator.simulated_faults import FaultConditions
from elastic.chaos.simulator.simulator import LIVENESS_S, Outcome, Simulation, Violation
from elastic.driver.membership.membership import Phase
from elastic.driver.reasons import as_sentence

SLOTS = 8
STEP_S = 2.0
SIZES = (10, 100, 1_000, 10_000)


class Scale:
    """Simulation of a large job.

    The job trains for a given virtual time while hosts fail. It then continues until all workers are back.
    """

    def __init__(
        self, seed: int, *, workers: int, virtual_s: float = 300.0, host_failures: int = 4
    ) -> None:
        self.virtual_s = virtual_s
        self.simulation = sim = Simulation(
            seed,
            workers=workers,
            steps=10**9,
            faults=0,
            weather=FaultConditions(),
            slots=SLOTS,
            step_s=STEP_S,
            faults_s=virtual_s + 1,
            keep_journal=False,
        )
        for number in range(host_failures):
            at = virtual_s * (number + 1) / (host_failures + 2)
            sim.clock.at(at, self._lose_a_host)

    def run(self) -> Outcome:
        """Run the simulation.

        Raises Violation if an invariant is broken, or if a worker does not train LIVENESS_S seconds after the last
        fault.
        """
        sim = self.simulation
        membership = sim.driver.membership
        try:
            sim.clock.run(self.virtual_s)
            sim.clock.run(self.virtual_s + LIVENESS_S, over=self._settled)
            assert sim.driver.end is None, f"the job has ended: {sim.driver.end}"
            since = f"{LIVENESS_S:g} s after the last fault"
            assert membership.phase is Phase.TRAINING, f"it is {membership.phase.value} {since}"
            missing = sim.workers - len(membership.members)
            assert not missing, f"{missing} workers are not in the world {since}"
        except AssertionError as error:
            raise Violation(f"seed {sim.seed}: {error}") from error
        return Outcome(
            0,
            as_sentence("it trains on"),
            membership.generation,
            sim.clock.now,
            sim.faults,
            sim.clock.happened,
            sim.network.messages,
        )

    def _settled(self) -> bool:
        sim, membership = self.simulation, self.simulation.driver.membership
        if sim.driver.end is not None:
            return True
        together = membership.phase is Phase.TRAINING and len(membership.members) == sim.workers
        alive = len(sim.processes) == sim.workers
        return together and alive and not any(agent.lost for agent in sim.agents.values())

    def _lose_a_host(self) -> None:
        sim = self.simulation
        host = sim.clock.random.choice(sorted(sim.agents))
        sim.note(f"host {host} lost for 20 s")
        sim.lose_host(host)
        sim.clock.after(20.0, self._back, host)

    def _back(self, host: str) -> None:
        agent = self.simulation.agents[host]
        self.simulation.heal(host)
        agent.lost = False
        agent.restart()


@dataclass
class Cost:
    """Cost of the regroup after the loss of one worker: CPU time and messages."""

    workers: int
    decide_ms: float  # CPU time of the driver for all its events
    events: int  # number of events that the driver received
    messages: int  # number of messages in both directions
    virtual_s: float  # virtual seconds until the new world was published

    @property
    def per_worker_us(self) -> float:
        return self.decide_ms * 1e3 / self.workers


def regroup(workers: int) -> Cost:
    """Kill one worker of a training world, and measure the cost until all others train again."""
    sim = Scale(1, workers=workers, virtual_s=1e6, host_failures=0).simulation
    driver = sim.driver
    sim.clock.run(1e6, over=lambda: _trains(sim, workers))
    generation = driver.membership.generation
    spent = 0.0
    handled = 0
    handle = driver.membership.handle
    deadline = driver.membership.next_deadline

    def timed_handle(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal spent, handled
        began = time.process_time()
        try:
            return handle(*args, **kwargs)
        finally:
            spent += time.process_time() - began
            handled += 1

    def timed_deadline() -> float | None:
        nonlocal spent
        began = time.process_time()
        try:
            return deadline()
        finally:
            spent += time.process_time() - began

    driver.membership.handle = timed_handle  # type: ignore[method-assign]
    driver.membership.next_deadline = timed_deadline  # type: ignore[method-assign]
    before, at = sim.network.messages, sim.clock.now
    victim = sorted(sim.processes)[len(sim.processes) // 2]
    sim.processes[victim].die(-9)
    sim.clock.run(1e6, over=lambda: driver.membership.generation > generation)
    published_at = sim.clock.now
    sim.clock.run(published_at + 0.5)
    return Cost(workers, spent * 1e3, handled, sim.network.messages - before, published_at - at)


def _trains(sim: Simulation, workers: int) -> bool:
    membership = sim.driver.membership
    first = next(iter(sim.processes.values()), None)
    return (
        membership.phase is Phase.TRAINING
        and len(membership.members) == workers
        and first is not None
        and first.state.steps > 10
    )


def main() -> int:
    print(
        "Cost of a regroup after the loss of one worker: all survivors are notified, report ready, and are placed."
    )
    print(
        f"{'workers':>8} {'driver ms':>10} {'us/worker':>10} {'events':>8} {'messages':>9} {'virtual s':>10}"
    )
    for cost in map(regroup, SIZES):
        print(
            f"{cost.workers:8} {cost.decide_ms:10.1f} {cost.per_worker_us:10.1f} {cost.events:8}"
            f" {cost.messages:9} {cost.virtual_s:10.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
