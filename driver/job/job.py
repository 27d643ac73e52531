"""One job, complete and checked: what to run, where, and what to say about it. Made by `cli`, run by the driver."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from elastic.driver.discovery.interface import Discovery, Log
from elastic.driver.discovery.local import LocalDiscovery
from elastic.driver.discovery.script import ScriptDiscovery
from elastic.driver.discovery.static import OwnSlots, StaticDiscovery
from elastic.driver.job.multi_host_plan import FleetPlan
from elastic.driver.network.hosts import SLOTS_LIMIT, ThisHost
from elastic.driver.processes.console import Write
from elastic.driver.settings import UNBOUNDED, Settings
from elastic.protocol.report_values import Report

WORKERS_PER_CORE = 8  # at most, on one machine whose slots nobody has counted


class Stoppable(Protocol):
    """A driver, for whoever may want its job to end."""

    def stop(self, reason: str, code: int = 1) -> None:
        """From any thread: end the job with this exit code; a second time at once."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """At most one of ``hosts`` and ``script`` is set; without either, hosts come as ``fleet`` says.

    ``settings.env`` is what the job adds to every worker's environment; ``environ`` is the driver's own.
    """

    command: list[str]  # the program and its arguments
    settings: Settings
    hosts: dict[str, int] | None  # host -> slots, in order of preference
    script: list[str] | None  # the discovery script, with an absolute path, and its arguments
    fleet: FleetPlan | None = None  # what is needed beyond this machine; None: nothing ever is
    own_slots: bool = False  # nobody has said how many slots this machine has
    slots_per_host: int = 1  # of a host that the script prints without a number
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    streams: tuple[Write, Write] | None = None  # in place of the driver's stdout and stderr
    # Each report of a worker, in the loop's thread.
    reported: Callable[[Report], object] | None = None
    preemption: str = "off"  # who may announce the end of a machine; see `preemption.watch`
    # Modules that a process for the next worker has imported; see `processes.prepared`.
    preload: str = ""
    stdin_rank: int | None = None  # whose worker has this process's standard input
    begun: Callable[[Stoppable], object] | None = None  # is given the driver, once there is one
    # Called with the address where operators call, and their key.
    steered: Callable[[str, bytes], object] | None = None
    bind: str = "127.0.0.1"  # the address on which driver and workers listen
    gloo_timeout_s: float = 30.0  # for a group to form
    collective_timeout_s: float = 660.0  # when a collective gives up by itself
    output_dir: str | None = None  # exists, and can be written to
    prefix_timestamps: bool = False
    journal: str | None = None  # can be written to
    summary: bool = False  # say at the end how the time went
    report: str | None = None  # the file of a page about the job; can be written to
    metrics: tuple[str, int] | None = None  # address and port to serve them on
    dashboard: tuple[str, int] | None = None  # the same, of the live page
    opentelemetry: bool = False  # send traces of recoveries, as its variables in ``environ`` say
    tensorboard: str | None = None  # the folder for scalars; can be written to
    log_level: str = "INFO"  # one of flags.LOG_LEVELS
    log_timestamps: bool = True  # in the driver's own lines
    notes: list[tuple[str, str]] = field(default_factory=list)  # level and line, to be said once
    # Called where the start is refused: removes what the checks have written, unless the job has made use of it.
    refused: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """By which commands find it."""
        return f"job-{os.getpid()}" if self.fleet is None else self.fleet.name


async def first_hosts(job: Job, log: Log) -> dict[str, int]:
    """The hosts that the discovery script lists now. The first run must succeed; later failures are only logged.

    Raises Invalid if it fails, or prints what is not a list of hosts. An empty list is none: hosts may be on their way.
    """
    assert job.script is not None
    hosts = await ScriptDiscovery(job.script, log, default_slots=job.slots_per_host).ask()
    if not hosts:
        log("info", f"discovery script {job.script[0]} lists no host yet; waiting for one")
    return hosts


def script_discovery(
    job: Job, known: dict[str, int], log: Log, *, only: ThisHost | None = None
) -> Discovery:
    """The script's hosts as they change, from its first list on. ``only``: others than this machine are left out."""
    assert job.script is not None
    script = ScriptDiscovery(job.script, log, default_slots=job.slots_per_host, known=known)
    return script if only is None else LocalDiscovery(script, only.elsewhere, log)


def most_workers(cores: int) -> int:
    """The default limit of workers on this machine, which protects it from a mistyped number."""
    return min(SLOTS_LIMIT, WORKERS_PER_CORE * cores)


def listed_hosts(job: Job, workers_max: int) -> Discovery:
    """Hosts that were given, or this machine, with room for all workers that an operator has wanted before."""
    assert job.hosts is not None
    if not job.own_slots:
        return StaticDiscovery(job.hosts)
    [(host, slots)] = job.hosts.items()
    asked = 0 if workers_max == UNBOUNDED else workers_max + job.settings.standbys
    return OwnSlots({host: max(slots, asked)})


def room_for(
    job: Job, discovery: Discovery, cores: int | None = None
) -> Callable[[int], Awaitable[str]] | None:
    """How this machine gets more slots for so many workers, if nobody has said how many it has; returns why not, or
    nothing. No more than `most_workers`, unless the job had more before. ``cores``: None: as many as this process may
    use.
    """
    if not isinstance(discovery, OwnSlots):
        return None
    own, cores = discovery, cores or len(os.sched_getaffinity(0))
    most = max(most_workers(cores), own.slots)

    async def grow(workers: int) -> str:
        if workers > most:
            return (
                f"{workers} workers are too many for this machine, which has {cores} cores: at most {most}. For"
                " more, start the job with -H localhost:N or on more hosts"
            )
        await own.make_room(min(SLOTS_LIMIT, workers + job.settings.standbys))
        return ""

    return grow
