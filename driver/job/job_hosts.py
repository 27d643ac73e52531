"""Hosts of a job: their discovery, and the maximum number of workers on this machine."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from elastic.driver.discovery.interface import Discovery, Log
from elastic.driver.discovery.local import LocalDiscovery
from elastic.driver.discovery.polling import PolledDiscovery
from elastic.driver.discovery.script import ScriptDiscovery
from elastic.driver.discovery.slurm import INTERVAL_S
from elastic.driver.discovery.static import OwnSlots, StaticDiscovery
from elastic.driver.job.job import Job
from elastic.driver.network.host_lists import SLOTS_LIMIT, ThisHost
from elastic.driver.settings import UNBOUNDED
from elastic.errors import Invalid

# maximum workers per core of this machine if the user does not specify the number of slots
WORKERS_PER_CORE = 8


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
