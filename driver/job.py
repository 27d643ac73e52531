"""One job, complete and checked: what to run, where, and what to say about it. Made by `cli`, run by the driver."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from elastic.driver.discovery.interface import Discovery, Log
from elastic.driver.discovery.local import NOT_AVAILABLE, LocalDiscovery
from elastic.driver.discovery.script import ScriptDiscovery
from elastic.driver.discovery.static import StaticDiscovery
from elastic.driver.hosts import ThisHost
from elastic.driver.settings import Settings
from elastic.errors import Invalid


@dataclass(frozen=True, kw_only=True)
class Job:
    """Exactly one of ``hosts`` and ``script`` is set. All hosts of ``hosts`` are this machine.

    ``settings.env`` is what the job adds to every worker's environment; ``environ`` is the driver's own.
    """

    command: list[str]  # the program and its arguments
    settings: Settings
    hosts: dict[str, int] | None  # host -> slots, in order of preference
    script: list[str] | None  # the discovery script, with an absolute path, and its arguments
    slots_per_host: int = 1  # of a host that the script prints without a number
    environ: dict[str, str] = field(default_factory=dict, repr=False)
    bind: str = "127.0.0.1"  # the address on which driver and workers listen
    collective_timeout_s: float = 660.0  # when a collective gives up by itself
    output_dir: str | None = None  # exists, and can be written to
    prefix_timestamps: bool = False
    journal: str | None = None  # can be written to
    metrics: tuple[str, int] | None = None  # address and port to serve them on
    log_level: str = "INFO"  # one of flags.LOG_LEVELS
    log_timestamps: bool = True  # in the driver's own lines
    notes: list[tuple[str, str]] = field(default_factory=list)  # level and line, to be said once


async def open_discovery(job: Job, log: Log, *, this_host: ThisHost | None = None) -> Discovery:
    """The job's hosts as they change. A discovery script is run once, and must work this first time.

    Raises Invalid if it fails, prints what is no list of hosts, or lists one that is not this machine. Later on such
    troubles are only reported. An empty first list is none: the hosts may be on their way.
    """
    if job.script is None:
        assert job.hosts is not None, "a job has hosts or a script"
        return StaticDiscovery(job.hosts)
    this_host = this_host or ThisHost()
    script = ScriptDiscovery(job.script, log, default_slots=job.slots_per_host)
    hosts = await script.ask()
    for host in hosts:
        reason = await asyncio.to_thread(this_host.elsewhere, host)
        if reason is not None:
            raise Invalid(
                f"discovery script {job.script[0]} lists {host}: {reason}, {NOT_AVAILABLE}"
            )
    if not hosts:
        log("info", f"discovery script {job.script[0]} lists no host yet; waiting for one")
    script = ScriptDiscovery(job.script, log, default_slots=job.slots_per_host, known=hosts)
    return LocalDiscovery(script, this_host.elsewhere, log)
