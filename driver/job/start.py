"""Entry point that runs a validated job in this process."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic.driver.discovery.interface import Discovery
from elastic.driver.discovery.static import GivenHosts
from elastic.driver.job import driver_loop, stop_signals
from elastic.driver.job.job import Job
from elastic.driver.job.job_hosts import first_hosts, listed_hosts, room_for, script_discovery
from elastic.driver.job.job_io import JobIO, open_job_io, serve_page
from elastic.driver.job.multi_host_plan import MultiHostPlan
from elastic.driver.journal.entries import header_of, readable
from elastic.driver.journal.file_journal import FileArchive, FileJournal
from elastic.driver.journal.journal import Journal, SnapshotPolicy
from elastic.driver.journal.resume import to_go_on_with, writer_here
from elastic.driver.launch.local_launcher import LocalLauncher
from elastic.driver.launch.standard_input import check_stdin
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.snapshot import take_snapshot
from elastic.driver.network.control_server import WORKERS, ControlServer
from elastic.driver.network.host_lists import ThisHost
from elastic.driver.network.interface_selection import is_loopback
from elastic.driver.network.local_interfaces import alone_address, listen_address
from elastic.errors import Invalid
from elastic.protocol import tls
from elastic.protocol.report_values import Report


@dataclass(frozen=True)
class Outcome:
    """Exit code, reason and results of a finished job.

    Args:
        code: exit code of the job.
        reason: reason why the job ended.
        results: pickled results of launched functions by rank, with None for a missing result.
        reports: last report of each rank of the last world. Ranks without a report are omitted.
        unreported: whether the page of --report could not be written.
    """

    code: int
    reason: str
    results: list[bytes | None]
    reports: dict[int, Report] = field(default_factory=dict)
    unreported: bool = False


async def start(job: Job, *, this_host: ThisHost | None = None) -> Outcome:
    """Run a job to its end, until all workers have exited.

    Raises:
        Invalid: an error was detected before any process was started.
        OSError: the driver's address cannot be bound.
    """
    this_host = this_host or ThisHost()
    try:
        with open_job_io(job) as job_io:
            await serve_page(job, job_io)
            await job_io.desk.open()
            try:
                outcome = await _started(job, job_io, this_host)
            finally:
                await job_io.desk.close()
            job_io.stopped = outcome.code in stop_signals.STOP_CODES.values()
        return replace(outcome, unreported=job_io.unreported)
    except (Invalid, OSError):
        job.refused()
        raise


async def _started(job: Job, job_io: JobIO, this_host: ThisHost) -> Outcome:
    fleet = job.fleet
    known = await first_hosts(job, job_io.console)
    if known is not None:
        elsewhere = [host for host in known if this_host.elsewhere(host) is not None]
        if fleet is not None and not fleet.needed:
            fleet = replace(fleet, needed=bool(elsewhere) or await _may_grow(fleet))
    by_agents = fleet is not None and fleet.needed
    check_stdin(job.stdin_rank, job.settings.workers_max, by_agents=by_agents)
    if fleet is not None and fleet.fresh and job.journal:
        from elastic.driver.job import orphaned_agents

        await orphaned_agents.end(job, fleet, job.journal, known or job.hosts or (), job_io.console)
    if fleet is None or not fleet.needed:
        return await _alone(job, job_io, known, this_host)
    from elastic.driver.job.start_multi_host import start_fleet

    return Outcome(*await start_fleet(job, fleet, job_io, known, this_host))


async def _may_grow(fleet: MultiHostPlan) -> bool:
    return not is_loopback(await listen_address(fleet.interfaces, (), grows=True))


async def _alone(
    job: Job, job_io: JobIO, known: dict[str, int] | None, this_host: ThisHost
) -> Outcome:
    """Run a job without agents. All workers run on this machine and are killed if this process exits."""
    membership = Membership(job.settings)
    job_io.place_of = membership.place_of
    console = job_io.console
    if known is not None:
        discovery: Discovery = script_discovery(job, known, console, only=this_host)
    else:
        assert job.hosts is not None, "discovered hosts need agents"
        discovery = listed_hosts(job, membership.workers_max)
    journal = Journal()
    if job.journal:
        policy = SnapshotPolicy(
            take=lambda: take_snapshot(membership),
            resumable=False,
            failed=lambda text: console("warning", text),
        )
        archive = FileArchive(Path(job.journal))
        fresh = job.fleet is not None and job.fleet.fresh
        past = await archive.past() if archive.outlives() and not fresh else None
        name = f"the journal {job.journal}"
        to_go_on_with(past, job.command, job.settings, resume=False, fresh=fresh, name=name)
        journal = FileJournal(
            archive,
            header_of(
                job.settings, command=readable(job.command), writer=writer_here(), begins=job.begins
            ),
            0,
            policy,
        )
    secret = secrets.token_bytes(32)
    bind = job.bind or alone_address(())
    files = None if job.fleet is None else job.fleet.tls
    driver = driver_loop.Driver(
        driver_loop.JobRuntime(
            settings=job.settings,
            command=job.command,
            environ=job.environ,
            fixed_hosts=isinstance(discovery, GivenHosts),
            secret=secret.hex(),
            tls=files,
            interface=bind,
            bind=bind,
        ),
        membership=membership,
        server=ControlServer(
            secret=secret,
            log=console,
            callers=WORKERS,
            lease_s=job.settings.lease_s,
            tls=None
            if files is None
            else tls.context(files.cert, files.key, files.ca, server=True),
        ),
        launcher=LocalLauncher(
            sink=job_io.output,
            log=console,
            lease_s=job.settings.lease_s,
            preemption=job.preemption,
            preload=job.preload,
            stdin_rank=job.stdin_rank,
        ),
        discovery=discovery,
        journal=journal,
        log=console,
        noted=job_io.noted,
        tracing=job_io.tracing,
        reported=lambda report: job_io.forward_report(report, job.reported),
        answered=job_io.desk.answered,
        gone=lambda: job_io.log_end(job),
        unfolding=job_io.unfolding,
    )
    job_io.desk.serves(driver, room_for(job, discovery))
    if job.begun is not None:
        job.begun(driver)
    code = await driver.run()
    if code:
        # Clean up if the job failed before its first checkpoint, for example because its start checkpoint does not fit
        # the workers' state.
        job.refused()
    return Outcome(code, driver.outcome, driver.ordered_results(), driver.last_reports())
