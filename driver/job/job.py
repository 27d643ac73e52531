"""Complete and validated definition of a job: its program, its hosts, and its reports. `cli` creates it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from elastic.driver.discovery.interface import Discovery, Log
from elastic.driver.discovery.local import LocalDiscovery
from elastic.driver.discovery.polling import PolledDiscovery
from elastic.driver.discovery.script import ScriptDiscovery
from elastic.driver.discovery.slurm import INTERVAL_S, Allocation
from elastic.driver.discovery.static import OwnSlots, StaticDiscovery
from elastic.driver.job.multi_host_plan import MultiHostPlan
from elastic.driver.network.host_lists import SLOTS_LIMIT, ThisHost
from elastic.driver.processes.console import Write
from elastic.driver.settings import UNBOUNDED, Settings, StartCheckpoint
from elastic.errors import Invalid
from elastic.protocol.report_values import Report

# maximum workers per core of this machine if the user does not specify the number of slots
WORKERS_PER_CORE = 8


class Stoppable(Protocol):
    """Interface of a driver whose job can be stopped."""

    def stop(self, reason: str, code: int = 1) -> None:
        """End the job with exit code ``code``. On the second call, kill its workers immediately. Thread-safe."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Complete and validated definition of a job.

    At most one of ``hosts``, ``script`` and ``allocation`` is set. If none of them is set, ``fleet`` supplies the
    hosts.

    The variables in ``settings.env`` are added to every worker's environment. ``environ`` is the driver's environment.
    """

    command: list[str]  # program and its arguments
    settings: Settings
    hosts: dict[str, int] | None  # number of slots of each host, in order of preference
    script: list[str] | None  # absolute path of the discovery script, and its arguments
    allocation: Allocation | None = None  # Slurm allocation that supplies the hosts
    # settings for agents and driver failover; None if all workers run on this machine without failover
    fleet: MultiHostPlan | None = None
    own_slots: bool = False  # whether the user did not specify the number of slots of this machine
    slots_per_host: int = (
        1  # number of slots of a host that the discovery script lists without a number
    )
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    # functions that write output instead of the driver's stdout and stderr
    streams: tuple[Write, Write] | None = None
    # called with each report of a worker, in the event loop's thread
    reported: Callable[[Report], object] | None = None
    preemption: str = "off"  # source of preemption notices; see `preemption.watch`
    # modules that the preloaded process for the next worker imports; see `processes.prepared`
    preload: str = ""
    stdin_rank: int | None = None  # rank of the worker that inherits standard input
    # called with the driver once it has been created
    begun: Callable[[Stoppable], object] | None = None
    # called with the address and the key for operators
    steered: Callable[[str, bytes], object] | None = None
    bind: str = "127.0.0.1"  # address on which the driver and the workers listen
    output_dir: str | None = None  # existing, writable folder for output files
    prefix_timestamps: bool = False
    begins: StartCheckpoint | None = None
    journal: str | None = None  # writable path of the journal
    summary: bool = False  # whether to log a summary of how the time was spent when the job ends
    report: str | None = None  # writable path of the report page
    metrics: tuple[str, int] | None = None  # address and port on which to serve metrics
    dashboard: tuple[str, int] | None = None  # address and port on which to serve the live page
    # whether to send traces of recoveries, configured by the variables in ``environ``
    opentelemetry: bool = False
    tensorboard: str | None = None  # writable folder for TensorBoard events
    log_level: str = "INFO"  # one of `flags.LOG_LEVELS`
    log_timestamps: bool = True  # whether to prefix the driver's log lines with the time
    # log lines about the start of the job: level and text
    notes: list[tuple[str, str]] = field(default_factory=list)
    # called if the start fails; removes the files that the checks created, unless the job has used them
    refused: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """Return the name by which commands such as ``elasticrun status`` find the job."""
        return f"job-{os.getpid()}" if self.fleet is None else self.fleet.name


async def first_hosts(job: Job, log: Log) -> dict[str, int] | None:
    """Return the hosts currently listed by the discovery script or Slurm, or None if the job uses neither.

    A script's list may be empty, because hosts may appear later.

    Raises:
        Invalid: the list cannot be obtained or is invalid, or a job of a fixed size needs more slots than its
            allocation has.
    """
    if job.allocation is not None:
        nodes = await job.allocation.hosts()
        slots, np = sum(nodes.values()), job.settings.np
        if slots < np and not job.settings.elastic:
            raise Invalid(
                f"{np} workers need {np} slots, but the usable nodes of Slurm job {job.allocation.job} have {slots}:"
                " lower -np, request more nodes, or pass --slots-per-host"
            )
        return nodes
    if job.script is None:
        return None
    hosts = await ScriptDiscovery(job.script, log, default_slots=job.slots_per_host).ask()
    if not hosts:
        log("info", f"discovery script {job.script[0]} listed no host; waiting for a host")
    return hosts


def script_discovery(
    job: Job, known: dict[str, int], log: Log, *, only: ThisHost | None = None
) -> Discovery:
    """Return the discovery for the job's script or Slurm allocation. The discovery yields ``known`` first.

    Args:
        job: the job.
        known: result of an earlier query.
        log: called with the level and the text of each log line.
        only: if not None, restricts the discovery to hosts that are this machine.
    """
    if job.allocation is not None:
        return PolledDiscovery(
            job.allocation.hosts, log, name="Slurm", known=known, interval_s=INTERVAL_S
        )
    assert job.script is not None
    script = ScriptDiscovery(job.script, log, default_slots=job.slots_per_host, known=known)
    return script if only is None else LocalDiscovery(script, only.elsewhere, log)


def most_workers(cores: int) -> int:
    """Return the maximum number of workers on this machine. The limit rejects numbers that are probably mistyped."""
    return min(SLOTS_LIMIT, WORKERS_PER_CORE * cores)


def listed_hosts(job: Job, workers_max: int) -> Discovery:
    """Return a discovery that lists the job's hosts.

    Without specified hosts, it lists this machine with one slot for each of the ``workers_max`` workers.
    """
    assert job.hosts is not None
    if not job.own_slots:
        return StaticDiscovery(job.hosts)
    [(host, slots)] = job.hosts.items()
    asked = 0 if workers_max == UNBOUNDED else workers_max + job.settings.standbys
    return OwnSlots({host: max(slots, asked)})


def room_for(
    job: Job, discovery: Discovery, cores: int | None = None
) -> Callable[[int], Awaitable[str]] | None:
    """Return a function that adds slots to this machine for a given number of workers.

    The function returns "" on success, otherwise the reason for refusing. The limit is `most_workers`, or the number of
    workers that the job already has if that is higher. If the user has specified the slots, return None.

    Args:
        job: the job.
        discovery: discovery whose slots are increased.
        cores: number of cores for the limit (default: the number that this process may use).
    """
    if not isinstance(discovery, OwnSlots):
        return None
    own, cores = discovery, cores or len(os.sched_getaffinity(0))
    most = max(most_workers(cores), own.slots)

    async def grow(workers: int) -> str:
        if workers > most:
            return (
                f"{workers} workers are too many for this machine, which has {cores} cores: request at most"
                f" {most}. For more, start the job with -H localhost:N or on more hosts"
            )
        await own.make_room(min(SLOTS_LIMIT, workers + job.settings.standbys))
        return ""

    return grow
