"""What can go wrong in a simulation. Each fault is one call that chooses its victims by the run's own random numbers.

``MILD`` ones always leave somebody who holds the newest commit, so that the job has to succeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic import protocol
from elastic.chaos.simulated_worker import SimulatedWorker, newest
from elastic.driver.events import HostsChanged

if TYPE_CHECKING:
    from elastic.chaos.simulator import Simulation


def _victims(sim: Simulation) -> list[SimulatedWorker]:
    return [p for p in sim.processes.values() if not p.frozen]


def kill_one(sim: Simulation) -> None:
    """SIGKILL, but not of the last member that holds the state."""
    holders = [p for p in sim.processes.values() if newest(p) is not None]
    spare = [p for p in sim.processes.values() if newest(p) is None]
    victims = [*(holders if len(holders) > 2 else []), *spare]
    for process in sim.random.sample(victims, min(1, len(victims))):
        sim.faults.append(f"{sim.now:.2f} kill {process.worker}")
        process.die(-9)


def kill_at_a_commit(sim: Simulation) -> None:
    """When the next worker has committed."""
    sim.aimed += 1


def leave(sim: Simulation) -> None:
    """SIGTERM."""
    for process in sim.random.sample(_victims(sim), min(1, len(_victims(sim)))):
        sim.faults.append(f"{sim.now:.2f} leave {process.worker}")
        sim.from_worker(process, protocol.Leaving("SIGTERM"))


def change_hosts(sim: Simulation) -> None:
    """Any part of the list, none of it too; often back again at once."""
    hosts = {h: n for h, n in sim.hosts.items() if sim.random.random() < 0.7}
    sim.faults.append(f"{sim.now:.2f} hosts {hosts}")
    sim.hear(HostsChanged(hosts))
    back = sim.between(0.0, 3.0)
    sim.at(sim.now + back, lambda: sim.hear(HostsChanged(sim.hosts)))


def freeze(sim: Simulation) -> None:
    """SIGSTOP, and SIGCONT after a while."""
    for process in sim.random.sample(_victims(sim), min(1, len(_victims(sim)))):
        sim.faults.append(f"{sim.now:.2f} freeze {process.worker}")
        process.frozen = True
        sim.at(sim.now + sim.random.choice((0.5, 8.0, 90.0)), process.thaw)


def kill_many(sim: Simulation) -> None:
    """Any number at once, all of them too."""
    victims = list(sim.processes.values())
    for process in sim.random.sample(victims, sim.random.randint(0, len(victims))):
        sim.faults.append(f"{sim.now:.2f} kill {process.worker}")
        process.die(-9)


def raise_in_user_code(sim: Simulation) -> None:
    """In one worker, or the same in several."""
    number = sim.random.choice((1, 1, 2))
    text = f"ValueError: {sim.random.choice('abcdefghij')}"
    for process in sim.random.sample(_victims(sim), min(number, len(_victims(sim)))):
        sim.faults.append(f"{sim.now:.2f} raise {process.worker} {text}")
        process.will_raise = text


MILD = [kill_one, kill_at_a_commit, leave, change_hosts, freeze]
EVERY = [*MILD, kill_many, raise_in_user_code]
