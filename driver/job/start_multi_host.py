"""Entry point of jobs whose workers are started by agents, on several hosts or with driver failover.

The driver first becomes the leader. It then reads the journal, listens, announces its address, and adopts or begins
the job. A driver that loses the leadership exits without affecting the workers, because another driver controls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from elastic.driver.agents.agent_manager import AGENTS, AgentManager
from elastic.driver.agents.agent_pool import silence_s
from elastic.driver.agents.messages import Attach
from elastic.driver.agents.open_files import allow_hosts
from elastic.driver.discovery.interface import Discovery, ResourceDemand
from elastic.driver.discovery.static import GivenHosts
from elastic.driver.etcd.journal import EtcdArchive
from elastic.driver.etcd.keys import job_root, operators_key
from elastic.driver.etcd.leader_election import LeadershipLost
from elastic.driver.events import Action, Event, PublishWorld
from elastic.driver.job import driver_loop, stop_signals
from elastic.driver.job.job import Job
from elastic.driver.job.job_hosts import listed_hosts, room_for, script_discovery
from elastic.driver.job.job_io import JobIO
from elastic.driver.job.multi_host_plan import MultiHostPlan, PodSource
from elastic.driver.job.standby import LeaderLease, campaign
from elastic.driver.journal.entries import Writer, header_of, readable
from elastic.driver.journal.file_journal import FileArchive
from elastic.driver.journal.journal import Archive, Journal, SnapshotPolicy
from elastic.driver.journal.local_copy import JournalCopy, copied_to
from elastic.driver.journal.recovered_job import RecoveredJob
from elastic.driver.journal.resume import starts_over, to_go_on_with, writer_here
from elastic.driver.launch.srun import srun_starter
from elastic.driver.launch.ssh import SshStarter
from elastic.driver.launch.starter import Bootstrap, Starter
from elastic.driver.launch.starter_by_host import StarterByHost
from elastic.driver.launch.subprocess_starter import ChildStarter
from elastic.driver.membership import snapshot
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.worlds.worlds import Phase
from elastic.driver.network.control_server import ControlServer
from elastic.driver.network.host_lists import ThisHost, parse_address
from elastic.driver.network.interface_selection import is_loopback
from elastic.driver.network.local_interfaces import listen_address
from elastic.driver.preemption import slurm
from elastic.driver.reasons import GONE
from elastic.errors import Invalid
from elastic.protocol.messages import Address
from elastic.protocol.report_values import Report

ASKED = 16  # maximum number of host names to resolve in order to choose the address to listen on
DEPOSED_CODE = 75  # exit code if another driver continues the job (EX_TEMPFAIL)

Outcome = tuple[int, str, list[bytes | None], dict[int, Report]]


async def start_fleet(
    job: Job, plan: MultiHostPlan, job_io: JobIO, known: dict[str, int] | None, this_host: ThisHost
) -> Outcome:
    """Run a job with agents. Return its exit code, the reason, and the results and last reports by rank.

    Raises:
        Invalid: the options, the journal or the address of the driver can't be used. Nothing was started.
        OSError: a socket or file can't be opened. Nothing was started.
    """
    async with contextlib.AsyncExitStack() as stack:
        leading = await campaign(plan, job_io.console, stack)
        if isinstance(leading, str):
            return DEPOSED_CODE, leading, [], {}
        archive = _archive(job, plan, leading)
        if archive is not None:
            stack.callback(archive.close)
        past = await _past(job, plan, leading, archive, job_io.console)
        if past is not None and past.ended is not None and not past.membership.roster:
            code, reason = past.ended.code, str(past.ended.reason)
            again = "pass --fresh to start a new one" + (f". {GONE}" if code else "")
            job_io.console("info", f"this job ended with exit code {code}: {reason}; {again}")
            return code, reason, [], {}
        run = _Run(job, plan, job_io, past, leading, this_host)
        return await run.to_its_end(archive, known)


async def _past(
    job: Job,
    plan: MultiHostPlan,
    lead: LeaderLease | None,
    archive: Archive | None,
    log: Callable[[str, str], None],
) -> RecoveredJob | None:
    """Return the job to resume, or None. Raises Invalid if this driver may neither resume nor start a job."""
    if archive is None:
        return None
    begun_alone = isinstance(archive, FileArchive) and not archive.outlives()
    if begun_alone and not plan.outlived:
        return None
    try:
        found = await archive.past()
    except Invalid:
        if not plan.fresh:
            raise
        found = None
    unawaited = plan.standby and lead is not None and not lead.waited
    if found is None and lead is not None and lead.waited and not plan.fresh:
        raise Invalid(
            f"job {plan.name} can't be resumed: another driver was running it, but etcd does not contain its"
            " journal. Restore etcd, or pass --fresh to discard the remaining data of the job and start a new"
            " job"
        )
    if begun_alone and not plan.fresh and (warning := starts_over(found, job.begins)):
        log("warning", warning)
    if begun_alone or (found is not None and found.ended is not None and unawaited):
        # Start a new job: the workers of the earlier job exited with its driver, or the job has ended.
        return None
    name = f"job {plan.name}" if lead is not None else f"the journal {job.journal}"
    return to_go_on_with(
        found,
        readable(job.command),
        job.settings,
        resume=plan.outlived,
        fresh=plan.fresh,
        name=name,
    )


def _archive(job: Job, plan: MultiHostPlan, lead: LeaderLease | None) -> Archive | None:
    """Return the archive for the journal of a job that outlives its driver.

    Raises Invalid if another driver writes it.
    """
    if plan.provider is not None:
        return plan.provider.archive()
    if lead is not None:
        return EtcdArchive(lead.etcd, lead.leadership, job_root(plan.name))
    return None if job.journal is None else FileArchive(Path(job.journal))


def _bound(server: ControlServer[Any], interface: str, port: int, own: int) -> Address:
    """Bind the server and return its address.

    Args:
        server: the server to bind.
        interface: address to listen on.
        port: port to listen on. 0 means any.
        own: the port from --driver-port, or 0 if not set.

    Raises:
        Invalid: the port of --driver-port or of the previous driver is in use.
        OSError: the address cannot be bound.
    """
    try:
        return server.bind(interface, port)
    except OSError as error:
        if not port:
            raise
        where = f"port {port} of {interface}"
        if port == own:
            raise Invalid(
                f"--driver-port {port} can't be used: {where}: {error.strerror}. Pass another port, or omit"
                " --driver-port to use any free port"
            ) from error
        raise Invalid(
            f"{where} can't be used, although the agents of this job look for the driver there:"
            f" {error.strerror}. Free the address and rerun the command, or pass --fresh to start a new job"
        ) from error


class _Run:
    """Run of one driver of a job, from its start to its exit."""

    def __init__(
        self,
        job: Job,
        plan: MultiHostPlan,
        job_io: JobIO,
        past: RecoveredJob | None,
        lead: LeaderLease | None,
        this_host: ThisHost,
    ) -> None:
        self.job = job
        self.plan = plan
        self.job_io = job_io
        self.past = past
        self.lead = lead
        self.this_host = this_host
        self.log = job_io.console
        self.membership = Membership(job.settings) if past is None else past.membership
        job_io.place_of = self.membership.place_of
        self.term = lead.leadership.term if lead is not None else (past.term if past else 0) + 1
        self.id = past.job if past is not None else uuid.uuid4().hex
        # event that is set when another driver leads the job; None without driver failover through a leader
        self.lost: asyncio.Event | None = None
        if lead is not None:
            self.lost = lead.leadership.lost
        elif plan.provider is not None:
            self.lost = plan.provider.lost
        self.left = False  # whether SIGTERM has ended this driver while the job continues
        if plan.left_by_sigterm and self.lost is None:
            self.lost = asyncio.Event()
        self._publishing: set[asyncio.Task[None]] = set()

    async def to_its_end(self, archive: Archive | None, known: dict[str, int] | None) -> Outcome:
        job, plan, past = self.job, self.plan, self.past
        allow_hosts(None if job.hosts is None else len(job.hosts))
        server = ControlServer(
            secret=plan.secret,
            log=self.log,
            callers=AGENTS,
            lease_s=silence_s(job.settings.lease_s),
            tls=plan.server_tls(),
        )
        address = _bound(server, *await self._place(known), plan.port)
        writer = writer_here(term=self.term, address=str(address), past=past)
        if plan.tls is None and not is_loopback(address.host):
            self.log(
                "info",
                f"listening on {address}: connections are authenticated, not encrypted; see --tls-cert",
            )
        journal = await self._journal(archive, writer)
        if self.lead is not None:
            now = asyncio.get_running_loop().time
            self.lead.etcd.set_listener(
                lambda reason: journal.trouble(now() + writer.offset_s, reason)
            )
        fleet = AgentManager(
            server,
            attach=Attach(
                self.id,
                self.term,
                job.settings.lease_s,
                plan.away_s,
                job.preemption,
                {name: job.environ[name] for name in slurm.VARIABLES if name in job.environ},
                job.preload,
            ),
            sink=self.job_io.output,
            log=self.log,
            starter=self._starter(),
            reach=lambda host: self._bootstrap(host, address),
            folder=past.folder if past is not None else os.getcwd(),
            adopted=[*past.membership.roster] if past is not None else (),
            environ_of=None if plan.provider is None else plan.provider.environ_of,
            connected=None if plan.provider is None else plan.provider.connected,
            deposed=lambda: self.lost is not None and self.lost.is_set(),
        )
        discovery = self._discovery(known, lambda event: fleet.noticed(event))
        driver = driver_loop.Driver(
            driver_loop.JobRuntime(
                settings=job.settings,
                command=job.command,
                environ=plan.forwarded,
                by_agents=True,
                fixed_hosts=isinstance(discovery, GivenHosts),
                interface=address.host,
                port=address.port,
            ),
            membership=self.membership,
            server=fleet.workers,
            launcher=fleet,
            discovery=ObservedDiscovery(discovery, fleet.listed),
            journal=journal,
            log=self.log,
            noted=self._noted,
            tracing=self.job_io.tracing,
            past=self._adopted(writer.offset_s),
            listening=self._announce,
            reported=lambda report: self.job_io.forward_report(report, job.reported),
            leaves=self._leave if plan.left_by_sigterm else None,
            answered=self.job_io.desk.answered,
            gone=lambda: self.job_io.log_end(job),
            unfolding=self.job_io.unfolding,
        )
        self.job_io.desk.serves(driver, room_for(job, discovery))
        if past is not None:
            self._show_adopted()
            count = len(past.membership.roster)
            self.log(
                "info",
                f"resumed the job at generation {self.membership.generation}, term {self.term}; waiting for {count}"
                " workers to reconnect",
            )
        if job.begun is not None:
            job.begun(driver)
        code = await self._unless_leadership_lost(driver)
        if code is None:
            code = stop_signals.STOP_CODES[signal.SIGTERM] if self.left else DEPOSED_CODE
            return code, driver.outcome, [], {}
        if code:
            # Clean up if the job failed before its first checkpoint, for example because no agent could be started.
            job.refused()
        return code, driver.outcome, driver.ordered_results(), driver.last_reports()

    async def _unless_leadership_lost(self, driver: driver_loop.Driver) -> int | None:
        if self.lost is None:
            return await driver.run()
        running = asyncio.ensure_future(driver.run())
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({running, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done() and not running.done():
                running.cancel()
                await asyncio.wait({running})
            elif running.cancelled() or not isinstance(running.exception(), LeadershipLost):
                return running.result()
        finally:
            lost.cancel()
        name = self.plan.name
        why = f"received SIGTERM, and job {name} continues"
        if not self.left:
            why = f"is no longer the leader of job {name}"
        driver.outcome = f"this driver {why}: it exits, and leaves its workers to the next driver"
        self.log("warning", driver.outcome)
        return None

    def _leave(self) -> None:
        assert self.lost is not None
        self.left = True
        self.lost.set()

    # ---- addresses, agents and hosts -------------------------------------------------------------------------------

    async def _place(self, known: dict[str, int] | None) -> tuple[str, int]:
        """Return the address and port to listen on.

        If agents cannot look up a new address, both are those of the previous driver.
        """
        movable = self.plan.etcd is not None or self.plan.provider is not None
        # With pods, agents find the driver through a service, whose pod may change.
        movable = movable or self.plan.pods is not None
        if self.past is not None and not movable and self.past.address:
            return parse_address(self.past.address)
        if self.plan.pods is not None and self.plan.pods.address:
            return self.plan.pods.address, self.plan.port
        hosts = known if known is not None else (self.job.hosts or {})
        elsewhere = await asyncio.gather(
            *(asyncio.to_thread(self.this_host.elsewhere, host) for host in [*hosts][:ASKED])
        )
        towards = [host for host, why in zip(hosts, elsewhere, strict=False) if why is not None]
        if not towards and self.plan.etcd is not None:
            towards = [parse_address(endpoint)[0] for endpoint in self.plan.etcd.endpoints]
        if not towards and self.plan.service is not None:
            towards = [self.plan.service]
        if self.plan.provider is not None:
            towards = [*self.plan.provider.towards]
        grows = known is not None or self.plan.pods is not None
        return await listen_address(self.plan.interfaces, towards, grows=grows), self.plan.port

    def _bootstrap(self, host: str, address: Address) -> Bootstrap:
        plan = self.plan
        return Bootstrap(
            job=plan.name,
            host=host,
            secret=plan.secret.hex(),
            drivers=[] if plan.etcd is not None else [str(address)],
            etcd=plan.etcd,
            tls=plan.tls,
            interfaces=plan.interfaces,
            outlives=plan.outlived and plan.provider is None,
            log_level=self.job_io.level,
        )

    def _starter(self) -> Starter | None:
        if self.plan.provider is not None:
            return self.plan.provider.starter(self.log)
        if self.plan.agents_come:
            return None
        there: Starter
        if self.job.allocation is not None:
            python = self.plan.ssh.python or sys.executable
            slurm = self.job.allocation
            there = srun_starter(slurm.job, environ=slurm.environ, python=python, log=self.log)
        else:
            there = SshStarter(self.plan.ssh, environ=os.environ, log=self.log)
        here = ChildStarter(environ=self.job.environ, log=self.log)
        return StarterByHost(self.this_host.elsewhere, here=here, there=there)

    def _discovery(
        self, known: dict[str, int] | None, noticed: Callable[[Event], None]
    ) -> Discovery:
        if self.plan.provider is not None:
            return self.plan.provider.discovery(self.log, self._need, noticed)
        if known is not None:
            return script_discovery(self.job, known, self.log)
        by_name = None
        if self.plan.service is not None:
            from elastic.driver.discovery.kubernetes.headless_service import (
                HeadlessServiceDiscovery,
            )

            by_name = HeadlessServiceDiscovery(self.plan.service, self.job.slots_per_host, self.log)
        if self.plan.pods is not None:
            return self._pods(self.plan.pods, by_name, noticed)
        if by_name is not None:
            return by_name
        if self.plan.by_etcd:
            from elastic.driver.discovery.etcd import EtcdDiscovery

            assert self.lead is not None
            return EtcdDiscovery(self.lead.etcd, self.plan.name, self.log)
        return listed_hosts(self.job, self.membership.workers_max)

    def _need(self) -> ResourceDemand:
        membership = self.membership
        used: dict[str, int] = {}
        for worker in membership.roster:
            used[worker.host] = max(used.get(worker.host, 0), worker.slot + 1)
        most = membership.workers_max + self.job.settings.standbys
        return ResourceDemand(most, used, membership.drained)

    def _pods(
        self, pods: PodSource, fallback: Discovery | None, noticed: Callable[[Event], None]
    ) -> Discovery:
        from elastic.driver.discovery.kubernetes.api_client import ApiClient
        from elastic.driver.discovery.kubernetes.pod_discovery import PodDiscovery

        cluster = ApiClient(pods.selector, pods.namespace)
        self.log("info", f"hosts: pods {cluster.selector} of namespace {cluster.namespace}")
        return PodDiscovery(
            cluster,
            self.log,
            noticed=noticed,
            slots=pods.slots,
            notices=pods.notices,
            fallback=fallback,
        )

    async def _announce(self, address: Address) -> None:
        if self.plan.provider is not None:
            await self.plan.provider.listening(str(address))
        if self.lead is not None:
            await self.lead.leadership.announce(str(address))
        await self._announce_desk(address.host)

    async def _announce_desk(self, interface: str) -> None:
        """Publish the address for operators in etcd or Ray, next to the address for agents."""
        if self.lead is None and self.job.steered is None:
            return
        desk = self.job_io.desk
        address = str(await desk.listen(interface, self.plan.server_tls()))
        if self.job.steered is not None:
            self.job.steered(address, desk.job.key)
        if self.lead is not None:
            key = operators_key(self.plan.name)
            await self.lead.leadership.transact([(key, address.encode())])

    # ---- state for the next driver ---------------------------------------------------------------------------------

    async def _journal(self, archive: Archive | None, writer: Writer) -> Journal:
        if isinstance(archive, EtcdArchive) and not self.plan.outlived:
            await archive.clear()
            archive = None if self.job.journal is None else FileArchive(Path(self.job.journal))
        if archive is None:
            return Journal()
        policy = SnapshotPolicy(
            take=lambda: snapshot.take_snapshot(self.membership),
            resumable=self.plan.outlived,
            failed=lambda text: self.log("warning", text),
            suits=self._settled,
        )
        header = header_of(
            self.job.settings,
            job=self.id,
            command=readable(self.job.command),
            folder=os.getcwd() if self.past is None else self.past.folder,
            outlives=self.plan.outlived,
            writer=writer,
            begins=self.job.begins,
        )
        copy = None
        if self.job.journal is not None and not isinstance(archive, FileArchive):
            # Keep a local copy of this driver's part of the journal, which remains readable after etcd has discarded
            # the entries.
            at = writer.at if self.past is None else max(self.past.last_at, writer.at)
            state = None if self.past is None else snapshot.take_snapshot(self.membership)
            file = FileArchive(Path(self.job.journal))
            copy = await copied_to(file, header, state, at, policy)
        if self.past is not None:
            journal = await archive.go_on(self.past, writer, policy)
        else:
            journal = await archive.begin(header, policy)
        return journal if copy is None else JournalCopy(journal, copy)

    def _settled(self) -> bool:
        """Return whether all workers train and none is expected to reconnect or exit.

        Snapshots are preferably taken in this state, because a snapshot of a large job blocks the driver for a while.
        """
        membership = self.membership
        return membership.phase is Phase.TRAINING and membership.roster.first_exit_by() is None

    def _show_adopted(self) -> None:
        membership = self.membership
        found = {}
        for worker, record in membership.roster.items():
            place = membership.place_of(worker)
            found[worker] = record.pid, None if place is None else place.rank
        self.job_io.adopted(found, membership.generation, prepares=membership.prepares)

    def _adopted(self, clock_offset: float) -> driver_loop.Adopted | None:
        if self.past is None:
            return None
        membership = self.membership
        places = {worker: membership.place_of(worker) for worker in membership.members}
        return driver_loop.Adopted(
            running=[*membership.roster],
            places={worker: place for worker, place in places.items() if place is not None},
            generation=membership.generation,
            clock_offset=clock_offset,
        )

    def _noted(self, event: Event, actions: Sequence[Action], now: float) -> None:
        self.job_io.noted(event, actions, now)
        if self.lead is None:
            return
        for action in actions:
            if isinstance(action, PublishWorld):
                task = asyncio.ensure_future(self._publish_generation(action.generation))
                self._publishing.add(task)
                task.add_done_callback(self._publishing.discard)

    async def _publish_generation(self, generation: int) -> None:
        assert self.lead is not None
        value = msgspec.json.encode({"generation": generation, "term": self.term, "job": self.id})
        with contextlib.suppress(LeadershipLost):
            await self.lead.leadership.transact([(f"{job_root(self.plan.name)}generation", value)])


class ObservedDiscovery:
    """Wrapper of a discovery that also passes each list to a callback."""

    def __init__(self, source: Discovery, on_hosts: Callable[[dict[str, int]], None]) -> None:
        self._source = source
        self._on_hosts = on_hosts

    async def watch(self) -> AsyncIterator[dict[str, int]]:
        async for hosts in self._source.watch():
            self._on_hosts(hosts)
            yield hosts
