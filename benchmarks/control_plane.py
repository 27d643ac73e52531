"""Cost of driving very many workers: a real driver, and lightweight agents that use its protocol, on loopback.

    python benchmarks/control_plane.py [--workers 8000] [--slots 8] [--losses 3] [--together 1] [--idle-s 40]
                                       [--lease 2] [--json FILE]

The driver is a separate process: elasticrun with a journal, snapshots and --resume. All agents and workers are tasks of
a second process (`stress.load.agents`): real connections, real messages, no training. It measures the time to
the first world, the losses of hosts one after the other (from when the driver notices until the last survivor has its
new place), the loss of several percent of the hosts at once, the load during training, the growth of the journal, the
driver's memory, and a driver that is killed with SIGKILL and restarted. Small worlds for comparison show that the bytes
per worker do not grow.

All hosts share the cores of this machine. Pass a longer --lease for worlds that the machine cannot serve within 2 s.

Limits for 8,000 workers on 1,000 hosts, on two cores: a lost host within 1 s, 300 MB, 10 % of a core during training.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

import results_output
import tests_on_path  # noqa: F401
from measurements import Mark
from stress.load.agents import Adopted, Count, Counted, Lose, Together
from stress.load.job import LightJob

SMALL = (10, 80, 800)  # workers of the small worlds
TOLD_S, MEMORY_MB, IDLE = 1.0, 300.0, 0.10  # limits


@dataclass(frozen=True)
class Loss:
    """Loss of one host. Times are seconds since the driver noticed it."""

    survivors: int
    broken_s: float  # last worker knows that the world is broken
    told_s: float  # last worker has its place in the new world
    driver_cpu_s: float  # CPU time of the driver, from the loss until all trained again
    driver_waited_s: float  # driver's time without a core
    bytes_per_worker: float
    journal_bytes: int  # growth of the journal, per survivor


@dataclass
class Figures:
    """Results of one size."""

    workers: int
    hosts: int
    formed_s: float = 0.0  # time from the driver's start until all train
    formed_cpu_s: float = 0.0
    losses: list[Loss] = field(default_factory=list)
    together: Loss | None = None  # loss of several hosts at once
    idle: float = 0.0  # share of one core
    idle_messages_per_s: float = 0.0  # messages per second without signs of life
    # Time from the start of another driver until all agents are connected to it.
    resumed_s: float = 0.0
    resumed_cpu_s: float = 0.0
    peak_mb: float = 0.0  # maximum of both drivers


def measure(
    workers: int, slots: int, losses: int, idle_s: float, *, together: float, lease_s: float
) -> Figures:
    """Measure one size; with ``idle_s`` 0, neither the load nor a second driver is measured.

    Args:
        together: percentage of the hosts that are lost at once.
    """
    with (
        tempfile.TemporaryDirectory(prefix="control-plane-") as folder,
        LightJob(workers, slots, Path(folder), lease_s) as job,
    ):
        figures = Figures(workers, len(job.hosts))
        formed = job.wait(Together, lambda it: it.size == workers)
        figures.formed_s = formed.last_at - job.began_at
        figures.formed_cpu_s = job.cpu_s()
        hosts = [*job.hosts]
        for _ in range(losses):
            figures.losses.append(lose(job, [hosts.pop()]))
        if count := int(len(hosts) * together / 100):
            figures.together = lose(job, [hosts.pop() for _ in range(count)])
        if idle_s:
            figures.idle, figures.idle_messages_per_s = idle(job, idle_s)
            figures.peak_mb = job.peak_mb()
            job.kill_driver()
            job.start_driver()
            adopted = job.wait(Adopted, lambda it: it.term == 2)
            figures.resumed_s = adopted.at - job.began_at
            figures.resumed_cpu_s = job.cpu_s()
            # The new driver works: it notices a loss and forms a world.
            figures.losses.append(lose(job, [hosts.pop()]))
        figures.peak_mb = max(figures.peak_mb, job.peak_mb())
        return figures


def lose(job: LightJob, hosts: list[str]) -> Loss:
    """Lose these hosts at once, and wait for the world without them."""
    time.sleep(1.0)  # wait until earlier events are over
    spent, waited, size = job.cpu_s(), job.waited_s(), job.journal.stat().st_size
    for host in hosts:
        del job.hosts[host]
        job.order(Lose(host))
    survivors = sum(job.hosts.values())
    together = job.wait(Together, lambda it: it.size == survivors)
    waited = job.waited_s() - waited
    time.sleep(1.0)  # wait until all have reported that they train
    spent = job.cpu_s() - spent
    at = job.lost_at(hosts[0])
    return Loss(
        survivors=together.size,
        broken_s=together.broken_at - at,
        told_s=together.last_at - at,
        driver_cpu_s=spent,
        driver_waited_s=waited,
        bytes_per_worker=together.bytes_told / together.size,
        journal_bytes=(job.journal.stat().st_size - size) // together.size,
    )


def idle(job: LightJob, idle_s: float) -> tuple[float, float]:
    """Return the driver's share of a core, and the messages per second that it receives."""
    time.sleep(2.0)
    job.order(Count())
    before, spent, began = job.wait(Counted), job.cpu_s(), time.monotonic()
    time.sleep(idle_s)
    job.order(Count())
    after, spent, over = job.wait(Counted), job.cpu_s() - spent, time.monotonic() - began
    return spent / over, (after.said - before.said) / over


def marks_of(figures: Figures) -> list[Mark]:
    slowest = max((loss.told_s for loss in figures.losses), default=0.0)
    return [
        Mark("a lost host, s", TOLD_S, slowest),
        Mark("the driver's memory, MB", MEMORY_MB, figures.peak_mb),
        Mark("while all train, of a core", IDLE, figures.idle),
    ]


ROWS: dict[str, Callable[[Figures], str]] = {
    "hosts": lambda it: str(it.hosts),
    "first world, s": lambda it: f"{it.formed_s:.2f}",
    "host lost: all notified, s": lambda it: f"{_median(it, 'broken_s'):.3f}",
    "... all have a new place, s": lambda it: f"{_median(it, 'told_s'):.3f}",
    "... the slowest time, s": lambda it: f"{max(loss.told_s for loss in it.losses):.3f}",
    "... driver's processor time, s": lambda it: f"{_median(it, 'driver_cpu_s'):.2f}",
    "... it waited for a core, s": lambda it: f"{_median(it, 'driver_waited_s'):.2f}",
    "... bytes sent to each worker": lambda it: f"{_median(it, 'bytes_per_worker'):.0f}",
    "... bytes of the journal for each": lambda it: f"{_median(it, 'journal_bytes'):.0f}",
    "many lost at once: a new place, s": lambda it: (
        f"{it.together.told_s:.3f}" if it.together else ""
    ),
    "... the driver's processor time then, s": lambda it: (
        f"{it.together.driver_cpu_s:.2f}" if it.together else ""
    ),
    "while all train, of a core": lambda it: f"{it.idle:.1%}" if it.idle else "",
    "killed and resumed, s": lambda it: f"{it.resumed_s:.2f}" if it.resumed_s else "",
    "driver's memory, MB": lambda it: f"{it.peak_mb:.0f}",
}


def _median(figures: Figures, name: str) -> float:
    return float(statistics.median(getattr(loss, name) for loss in figures.losses))


def table(found: list[Figures]) -> Table:
    sizes = (f"{each.workers:,} workers" for each in found)
    made = results_output.table("one driver; its agents and workers on loopback", "", *sizes)
    for name, cell in ROWS.items():
        made.add_row(name, *(cell(each) for each in found))
    return made


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--workers", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=8, help="workers of a host")
    parser.add_argument("--losses", type=int, default=3, help="hosts that are lost")
    parser.add_argument(
        "--together", type=float, default=1.0, help="percentage of hosts lost at once"
    )
    parser.add_argument("--lease", type=float, default=2.0, help="liveness timeout in seconds")
    parser.add_argument("--idle-s", type=float, default=40.0, help="how long the load is looked at")
    options = parser.parse_args()
    sizes = [size for size in SMALL if size < options.workers]
    given = {"together": options.together, "lease_s": options.lease}
    found = [measure(size, options.slots, 1, 0.0, **given) for size in sizes]
    found.append(measure(options.workers, options.slots, options.losses, options.idle_s, **given))
    console, marks = results_output.console(), marks_of(found[-1])
    console.print(table(found))
    results_output.conclude(console, options.json, {"sizes": found}, marks)


if __name__ == "__main__":
    main()
