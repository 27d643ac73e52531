"""Event loop of one job: passes events to `JobDecisions` and performs the returned actions.

    mailbox -> decisions.answer(event, now) -> journal, until it is written -> perform each action

Queued events are processed and written in batches. All inputs arrive in the mailbox as events: a failed start as an
exit, a worker's message as the event of the same name, and a signal as StopRequested.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.checkpoints.options import RUN
from elastic.driver import events
from elastic.driver.discovery.interface import Discovery
from elastic.driver.job import checkpoint_shares
from elastic.driver.job.checkpoint_log_lines import CheckpointLines
from elastic.driver.job.checkpoint_shares import CheckpointShares
from elastic.driver.job.job_decisions import Decider, JobDecisions
from elastic.driver.job.operator_api.pending_requests import PendingRequests
from elastic.driver.job.stop_signals import STOP_CODES, is_repeated, last_checkpoint_s, stop_reason
from elastic.driver.journal.journal import Journal
from elastic.driver.launch.interface import Launcher
from elastic.driver.launch.worker_environment import (
    job_environment,
    threads_per_worker,
    without_secrets,
    worker_environment,
)
from elastic.driver.membership.membership import may_defer
from elastic.driver.membership.records.garbage_collection import uncollected
from elastic.driver.membership.scheduling.rank_order import copy_groups
from elastic.driver.membership.torch_versions import Versions
from elastic.driver.membership.worker_messages import event_of
from elastic.driver.membership.worlds import layout_diff
from elastic.driver.monitoring.exit_log_lines import ExitLines
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.report_delivery import Reports
from elastic.driver.monitoring.timeline_collection import Tracing
from elastic.driver.monitoring.world_log_lines import (
    JobStart,
    phases_line,
    recovery_line,
    start_line,
    world_line,
)
from elastic.driver.network.credentials import TlsFiles
from elastic.driver.output_interfaces import Log
from elastic.driver.processes import health_check_run
from elastic.driver.processes.exit_ordering import ExitBarrier
from elastic.driver.reasons import Reason, ReasonKind, because, brief, in_one_line
from elastic.driver.settings import Settings
from elastic.protocol import messages as protocol
from elastic.protocol.messages import Address, Place, Worker
from elastic.protocol.report_values import Report as WorkerReport

AT_ONCE = 1000  # maximum number of events per batch
LINE = 79  # columns for a log text after the prefix of 21 columns
# seconds by which workers wait longer for a world than the driver's timeout
WAIT_SLACK_S = 60.0
Line = tuple[str, str]  # level and text of a log line


class WorkerConnections(Protocol):
    """Interface of the connections to all workers, implemented by `ControlServer` and `RelayedWorkers`."""

    async def open(
        self,
        interface: str,
        port: int = 0,
        *,
        received: Callable[[Worker, Any], None],
        gone: Callable[[Worker, bool], None],
        expected: Callable[[Worker], bool],
    ) -> Address: ...

    def send(self, worker: Worker, message: protocol.Message) -> bool: ...
    def send_each(self, messages: Iterable[tuple[Worker, protocol.Message]]) -> None: ...
    def send_world(self, world: protocol.World, places: Iterable[tuple[Worker, Place]]) -> None: ...
    def broadcast(self, workers: Iterable[Worker], message: protocol.Message) -> None: ...
    def connected(self, worker: Worker) -> bool: ...
    def drain(self, worker: Worker) -> None: ...
    def disconnect(self, worker: Worker) -> None: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class JobRuntime:
    """Job with its runtime configuration: environment, secret, and the addresses of driver and workers.

    Args:
        by_agents: whether agents start the workers, with the environment of their hosts. If so, ``environ`` contains
            only variables to add, and ``advertised``, ``bind`` and ``secret`` are unused.
    """

    settings: Settings
    command: Sequence[str]
    environ: Mapping[str, str]  # environment variables that workers inherit
    by_agents: bool = False
    fixed_hosts: bool = False  # whether discovery will never list additional hosts or slots
    secret: str = ""  # the job's secret, hexadecimal
    tls: TlsFiles | None = None
    interface: str = "127.0.0.1"  # address on which the control server listens
    advertised: str = ""  # address to which workers connect, if it differs from ``bind``
    bind: str = "127.0.0.1"  # address on which workers listen for connections from other workers
    port: int = 0


@dataclass(frozen=True)
class Adopted:
    """State adopted from an earlier driver of the job.

    Args:
        clock_offset: seconds to add to this machine's monotonic clock to obtain the journal's clock.
    """

    running: Collection[Worker]
    places: Mapping[Worker, Place]  # places of the members of the last world
    generation: int
    clock_offset: float


class Driver:
    """Driver of one job, from its first worker to its exit code.

    After ``run``, ``places`` contains the members of the last world, and ``results`` the values that workers sent.

    Args:
        job: the job and its addresses.
        membership: makes the decisions about the job.
        server: connections of the workers.
        launcher: starts and kills processes.
        discovery: source of the host list.
        journal: record of all events and decisions.
        log: called with the level and the text of each log line.
        noted: called with each event, its actions and its time.
        tracing: collector of timelines.
        past: state of the previous driver, if membership was restored from its journal.
        listening: coroutine function, awaited with the driver's address before the job begins.
        reported: called with each report of a worker, in the event loop's thread.
        leaves: called on SIGTERM. If set, SIGTERM ends only this driver and not the job.
        answered: called with each answer to an operator's request.
        gone: called after the last worker has exited, before the last log line of a failed job.
    """

    def __init__(
        self,
        job: JobRuntime,
        *,
        membership: Decider,
        server: WorkerConnections,
        launcher: Launcher,
        discovery: Discovery,
        journal: Journal,
        log: Log,
        noted: Callable[[events.Event, Sequence[events.Action], float], None] | None = None,
        tracing: Tracing | None = None,
        past: Adopted | None = None,
        listening: Callable[[Address], Awaitable[None]] | None = None,
        reported: Callable[[WorkerReport], object] | None = None,
        leaves: Callable[[], None] | None = None,
        answered: Callable[[events.AnswerRequest], None] = lambda answer: None,
        gone: Callable[[], None] = lambda: None,
        unfolding: Callable[[], bool] = lambda: False,
    ) -> None:
        self.job = job
        self.results: dict[Worker, bytes] = {}
        self._versions = Versions()
        # places assigned at the start of workers, used until the first world is published
        self._promised: dict[Worker, Place] = {}
        self.generation = past.generation if past else 0
        self.outcome = ""  # reason for the end of the job
        self._adopts = past is not None
        self._offset = past.clock_offset if past else 0.0
        self._listening = listening
        self._leaves = leaves
        self._answered = answered
        self._gone = gone
        # reason for the failure, logged after the last worker has exited
        self._last_line: Line | None = None
        self._decisions = JobDecisions(
            membership,
            leave_s=job.settings.leave_s,
            idle_s=job.settings.idle_s if job.settings.elastic else 0.0,
            running=past.running if past else (),
            members=past.places if past else None,
        )
        self._server = server
        self._launcher = launcher
        self._discovery = discovery
        self._journal = journal
        self._log = log
        self._noted = noted
        self._checkpoint_run = int(job.settings.env.get(RUN, 0))
        self._tracing = tracing or Tracing(log, JobView())
        self._reports = Reports(reported, log)
        self._checkpoints = CheckpointShares()
        self._slots = 0  # number of slots in the current list of hosts
        # measurements of the job's start; None once training has begun, or if an earlier driver began the job
        self._starts: JobStart | None = None
        self._held: bool | None = None  # whether a member of the newest world held a commit
        # whether a world began from a commit of the script rather than the initial state; assumed after a failover
        self._committed = self.generation > 0
        self._about_checkpoints = CheckpointLines(self._now, self._log)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailbox: asyncio.Queue[tuple[float, events.Event]] = asyncio.Queue()
        self._alarm: asyncio.TimerHandle | None = None
        self._address = Address("", 0)
        self._layouts: dict[str, str] = {}  # text of each layout of the state, by digest
        self._step_input = b""  # newest description of the step's input, for joining workers
        self._exit_barrier = ExitBarrier(server, self._post)
        self._stop_code: int | None = None  # exit code of the first stop request
        # whether a second stop request was received, after which the loop does not wait for the journal
        self._hurried = False
        # pending write of the journal for which the loop waits, or None
        self._settling: asyncio.Future[None] | None = None
        self._signalled: int | None = None  # exit code for the last received signal
        self._signalled_at: dict[signal.Signals, float] = {}
        # text and exit code of a stop request received before run()
        self._early_stop: tuple[str, int] | None = None
        self._logged_last = ""  # last log line about the world
        self._exits = ExitLines(log, unfolding)
        self._pending_requests = PendingRequests()

    @property
    def places(self) -> dict[Worker, Place]:
        """Return the place of each member of the last world."""
        return self._decisions.members

    def ordered_results(self) -> list[bytes | None]:
        """Return the results of the last world's members by rank, with None for a member that sent no result.

        If no worker called ``init()``, no world was formed. The results are then ordered by the ranks assigned at the
        start of the job.
        """
        places = self.places or self._promised
        by_rank = sorted(places, key=lambda worker: places[worker].rank)
        return [self.results.get(worker) for worker in by_rank]

    def last_reports(self) -> dict[int, WorkerReport]:
        """Return the last report of each rank of the last world. Ranks that have not reported are omitted."""
        return self._reports.by_rank(self.places)

    def stop(self, reason: str, code: int = 1) -> None:
        """End the job with exit code ``code``. On the second call, kill all workers immediately. Thread-safe."""
        if self._loop is None:
            self._early_stop = (reason, code)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop, reason, code)

    def handle_request(self, event: events.Event) -> None:
        """Handle an operator's request. Must be called in the event loop's thread while the job runs."""
        self._post(event)

    def dump(self, worker: Worker, *, all_threads: bool) -> None:
        """Request a stack dump of a worker on behalf of an operator."""
        self._launcher.dump(worker, all_threads=all_threads)

    async def run(self) -> int:
        """Run the whole job. Return its exit code after the last worker has exited.

        Raises:
            OSError: the driver's address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        if not self._adopts:
            self._starts = JobStart(self._now())
        if self._early_stop is not None:
            self._stop(*self._early_stop)
        with self._signals():
            await self._run()
        assert self._decisions.ending is not None
        stop_code = self._signalled if self._stop_code is None else self._stop_code
        if self._decisions.stop_code is None and stop_code is not None:
            return stop_code  # the signal arrived after the last iteration of the loop
        return self._decisions.ending.code

    async def _run(self) -> None:
        watching: asyncio.Task[None] | None = None
        try:
            bound = await self._server.open(
                self.job.interface,
                self.job.port,
                received=self._on_message,
                gone=self._connection_closed,
                expected=self._decisions.running.__contains__,
            )
            self._address = Address(self.job.advertised or bound.host, bound.port)
            self._tracing.serve(self._server.send)
            self._reports.serve(self._server.send_each)
            self._log("debug", f"listening on {bound}")
            if self._adopts:
                self._post(events.DriverRestarted())
            await self._launcher.open(self._worker_disconnected, self._post)
            if self._listening is not None:
                await self._listening(self._address)
            watching = asyncio.create_task(self._watch_hosts())
            while not self._decisions.over:
                await self._handle(await self._mailbox.get())
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if self._alarm is not None:
                self._alarm.cancel()
            await self._launcher.close()
            self._exits.flush()
            self._gone()
            if self._last_line is not None:
                self._log(*self._last_line)
            self._reports.close()
            await self._server.close()
            await self._tracing.close()
            self._journal.close()

    # ---- event sources ---------------------------------------------------------------------------------------------

    async def _watch_hosts(self) -> None:
        listed = False
        trouble = "discovery returned no list"
        try:
            async for hosts in self._discovery.watch():
                self._post(events.HostsChanged(dict(hosts), self.job.fixed_hosts))
                if listed:
                    # Notify scripts that wait for hosts. No worker has to stop for this.
                    self._server.broadcast(self.places, protocol.HostsListed())
                listed = True
        except Exception as error:
            # This is a bug in the discovery, which handles errors of its source itself. Keep the last list of hosts.
            trouble = repr(error)
            self._log(
                "error", f"host discovery ended: {trouble}; the current list of hosts is kept"
            )
        if not listed:
            self._post(
                events.StopRequested(f"host discovery ended before it found a host: {trouble}")
            )

    def _on_message(self, worker: Worker, message: Any) -> None:
        if self._tracing.handle(worker, message) or self._reports.handle(worker, message):
            return
        checkpoint_actions = self._checkpoints.handle(worker, message)
        if checkpoint_actions is not None:
            self._perform_checkpoint_actions(checkpoint_actions)
            return
        match message:
            case protocol.Layout(digest, text):
                self._layouts[digest] = text
            case protocol.StepInput(kind):
                self._step_input = kind
            case protocol.SendResult(blob):
                self.results[worker] = blob
            case _:
                self._post(event_of(worker, message))

    def _perform_checkpoint_actions(self, actions: Sequence[checkpoint_shares.Action]) -> None:
        for action in actions:
            match action:
                case checkpoint_shares.SendToRanks(workers, message):
                    self._server.broadcast(workers, message)
                case checkpoint_shares.CheckpointCompleted():
                    self._about_checkpoints.made(action)
                    self._post(events.CheckpointMade(action.commit, action.step))
                case checkpoint_shares.CheckpointFailed():
                    self._about_checkpoints.failed(action)
                case checkpoint_shares.ReplicasDiffer():
                    self._about_checkpoints.not_equal(action)
                case checkpoint_shares.ReplicaCorrupted(worker, generation, commit, parts, equal):
                    self._post(events.WorkerDiffers(worker, generation, commit, parts, equal))
                case checkpoint_shares.ReplicasCorrupted(generation, commit, damaged, equal):
                    self._post(events.ReplicasSpoilt(generation, commit, damaged, equal))

    def _connection_closed(self, worker: Worker, silent: bool) -> None:
        self._tracing.gone(worker)
        self._post(events.WorkerDisconnected(worker, silent))
        self._exit_barrier.disconnected(worker)

    def _worker_disconnected(self, event: events.WorkerExited) -> None:
        self._exit_barrier.gone(event)

    def _stop(self, reason: str, code: int) -> None:
        if self._stop_code is None:
            self._stop_code = code
            self._log("info", f"stopping: {reason}")
        else:
            self._hurried = True
            if self._settling is not None:
                self._settling.cancel()
        self._post(
            events.StopRequested(reason, code, last_checkpoint_s(code, hurried=self._hurried))
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Context manager that handles SIGHUP, SIGINT and SIGTERM as requests to stop the job.

        If ``leaves`` is set, signals other than SIGINT stop only this driver. If SIGHUP was ignored, for example under
        nohup, it stays ignored. Signals are handled only in the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = self._loop
        assert loop is not None

        def forward(number: int, _: object) -> None:
            # Only forward the signal to the loop, because another signal may interrupt this handler.
            if number == signal.SIGINT or self._leaves is None:
                self._signalled = STOP_CODES[signal.Signals(number)]
            loop.call_soon_threadsafe(self._on_signal, signal.Signals(number), self._now())

        before = {number: signal.getsignal(number) for number in STOP_CODES}
        if before[signal.SIGHUP] == signal.SIG_IGN:
            del before[signal.SIGHUP]
        for number in before:
            signal.signal(number, forward)
        try:
            yield
        finally:
            for number, handler in before.items():
                # None: the handler was not installed from Python, so it cannot be restored
                if handler is not None:
                    signal.signal(number, handler)

    def _on_signal(self, number: signal.Signals, at: float) -> None:
        last, self._signalled_at[number] = self._signalled_at.get(number), at
        if is_repeated(number, at, last):
            return
        if number != signal.SIGINT and self._leaves is not None:
            self._leaves()
            return
        self._stop(stop_reason(number), STOP_CODES[number])

    def _post(self, event: events.Event) -> None:
        self._mailbox.put_nowait((self._now(), event))

    # ---- one event -------------------------------------------------------------------------------------------------

    async def _handle(self, first: tuple[float, events.Event]) -> None:
        decided: list[tuple[events.Event, list[events.Action]]] = []
        arrived: tuple[float, events.Event] | None = first
        with uncollected():
            while arrived is not None:
                at, event = arrived
                more = not self._mailbox.empty() and len(decided) + 1 < AT_ONCE
                decided.append((event, self._decide(event, at, more=more and may_defer(event))))
                arrived = self._mailbox.get_nowait() if more else None
        await self._written(self._journal.settle())
        for event, actions in decided:
            self._carry_out(event, actions)
        if self._mailbox.empty():
            self._set_alarm()
            await self._written(self._journal.rest())

    async def _written(self, writing: Coroutine[Any, Any, None]) -> None:
        """Wait until all recorded entries are written to the journal.

        A second stop request ends the wait, in case the journal's storage does not respond.
        """
        self._settling = asyncio.ensure_future(writing)
        if self._hurried:
            self._settling.cancel()
        try:
            await self._settling
        except asyncio.CancelledError:
            if not self._hurried:
                raise
        finally:
            self._settling = None

    def _carry_out(self, event: events.Event, actions: list[events.Action]) -> None:
        self._perform(actions)
        match event:
            case events.ScaleRequested() | events.DrainRequested() | events.RemoveRequested():
                if any(isinstance(each, events.AnswerRequest) and each.done for each in actions):
                    self._pending_requests.accept(event, self.places, self._now())
        if any(isinstance(action, events.ReportRecovery) for action in actions):
            for text in self._pending_requests.met(self.places, self._now()):
                self._log("info", text)
        if isinstance(event, events.WorkerConnected):
            differing = self._versions.record(event.worker.host, event.torch_version)
            if differing:
                self._log("warning", differing)
        if (
            isinstance(event, events.WorkerExited)
            and event.code
            and event.worker not in self.results
        ):
            self._promised.pop(event.worker, None)  # its place may be assigned to another worker

    def _decide(self, event: events.Event, now: float, *, more: bool) -> list[events.Action]:
        """Return the actions for an event, after writing them to the journal."""
        try:
            answer = self._decisions.answer(event, now, more=more)
        except Exception as error:
            self._journal.record(now, event, error=f"{type(error).__name__}: {error}")
            reason = because(ReasonKind.DRIVER_BUG, error=repr(error))
            self._log("error", f"{reason}; the latest events:\n{self._journal.story(last=30)}")
            return self._decisions.follow(event, [events.EndJob(1, reason)], now)
        if isinstance(event, events.HostsChanged):
            self._slots = sum(event.hosts.values())
        if not self._decisions.raised:
            self._journal.record(now, event, answer, more=more)
            if self._noted is not None:
                self._noted(event, answer, now)
        return self._decisions.follow(event, answer, now)

    def _set_alarm(self) -> None:
        """Schedule TimePassed for the next deadline."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        deadline = self._decisions.next_deadline()
        if deadline is not None:
            assert self._loop is not None
            self._alarm = self._loop.call_at(
                deadline - self._offset, self._post, events.TimePassed()
            )

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time() + self._offset

    # ---- actions ---------------------------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[events.Action]) -> None:
        # Send messages about worlds before starting processes, which takes milliseconds. Write log lines last.
        if not actions:
            return
        lines: dict[int, Line | None] = {}
        for urgent in (True, False):
            for index, action in enumerate(actions):
                if isinstance(action, (events.BreakWorld, events.PublishWorld)) is urgent:
                    lines[index] = self._do(action)
        given = [action.about for action in actions if isinstance(action, events.Report)]
        self._log_workers(
            "starting", [a for a in actions if isinstance(a, events.StartWorker)], given
        )
        for index in range(len(actions)):
            if (line := lines[index]) is not None:
                self._log(*line)
        self._log_workers(
            "killing", [a for a in actions if isinstance(a, events.KillWorker)], given
        )
        self._log_workers("releasing", [a for a in actions if isinstance(a, events.LetGo)], given)

    def _do(self, action: events.Action) -> Line | None:
        """Perform one action. Return the line to log for it, or None."""
        send, broadcast = self._server.send, self._server.broadcast
        match action:
            case events.StartWorker():
                self._start(action)
            case events.KillWorker():
                self._launcher.kill(action.worker)
            case events.ProbeWorkers(workers):
                self._launcher.probe(workers)
                broadcast(workers, protocol.Locate())
                return ("debug", f"probing {_some(workers)}")
            case events.MeasureBandwidth(host, peer):
                self._launcher.measure(host, peer)
                return ("debug", f"measuring the bandwidth of {host} to {peer}")
            case events.TellAwaited(generation, members, rank, line):
                broadcast(members, protocol.Awaited(generation, rank, line))
            case events.GiveUpHost(host, reason):
                self._launcher.give_up(host, str(reason))
            case events.DumpStacks(worker, reason):
                self._launcher.dump(worker, all_threads=False)
                return ("info", f"requesting the stacks of {worker}: {brief(reason)}")
            case events.BreakWorld(generation, members, reason):
                broadcast(members, protocol.Broken(generation, str(reason)))
                return self._news(f"generation {generation} was interrupted: {reason}")
            case events.PublishWorld():
                return self._publish(action)
            case events.TellWorld(member=member):
                message = protocol.World(
                    action.generation,
                    member.place,
                    action.store,
                    action.holders,
                    action.commit,
                    str(action.reason),
                    self._checkpoint_run,
                    action.checkpoint,
                    action.copies,
                    action.metadata,
                    action.source,
                )
                send(member.worker, message)
            case events.WelcomeWorker(worker, place, newcomer, elastic):
                send(worker, protocol.Welcome(place, newcomer, elastic, self._step_input))
            case events.PrepareChange(generation, change, members, reason):
                broadcast(members, protocol.Prepare(generation, change))
                return self._news(f"planned change of generation {generation}: {reason}")
            case events.StopMembersAt(generation, change, check, members):
                broadcast(members, protocol.StopAt(generation, change, check))
                return ("debug", f"generation {generation} stops at safepoint {check}")
            case events.CallOffChange(generation, change, members, reason):
                broadcast(members, protocol.Proceed(generation, change))
                return self._news(f"generation {generation} continues unchanged: {reason}")
            case events.LetGo(worker, reason, fenced):
                send(worker, protocol.Leave(str(reason), fenced))
            case events.RejectWorker(worker, layout, expected):
                texts = (self._layouts.get(layout, ""), self._layouts.get(expected, ""))
                diff = layout_diff.difference(*texts)
                send(worker, protocol.Rejected(diff))
                return ("error", f"the state of {worker} differs from that of the world:\n{diff}")
            case events.TellStandby(worker):
                send(worker, protocol.StandBy())
                return ("info", f"standby {worker} is ready")
            case events.FinishWorld(generation, members):
                broadcast(members, protocol.Finish(generation))
                return ("debug", f"generation {generation} finished")
            case events.HastenCheckpoint(generation):
                broadcast(self.places, protocol.CheckpointSoon(generation))
            case events.EndJob():
                return self._end(action)
            case events.Report(level, text, about):
                if about is not None and about.kind is ReasonKind.SLOT_GIVEN_UP:
                    # Shorten the text, because the console already shows the worker's output.
                    text = in_one_line(about) or text
                starting = self.generation == 0
                if self._exits.shares(level, about, starting=starting):
                    return None
                return (level, text)
            case events.AnswerRequest(_, done, reason):
                self._answered(action)
                return ("info", f"{'accepted' if done else 'refused'}: {reason}")
            case events.ReportRecovery():
                self._log("debug", phases_line(action))
                line = recovery_line(action, held=self._held, committed=self._committed)
                if self._starts is not None:
                    if action.kind != "start":  # a worker was lost before training began
                        self._log("info", line)
                    line = start_line(action, self._starts, self._now())
                    self._starts = None
                return ("info", line)
            case _:
                raise AssertionError(
                    f"no handler exists for the action {type(action).__name__}: add one to this"
                    " method"
                )
        return None

    def _news(self, text: str) -> Line:
        level = "debug" if text == self._logged_last else "info"
        self._logged_last = text
        return (level, text)

    def _start(self, action: events.StartWorker) -> None:
        settings, job, worker, place = self.job.settings, self.job, action.worker, action.place
        # Include the time of health checks, because a world may wait for the checks of other workers.
        wait_timeout_s = settings.health_check_s if settings.health_check else 0.0
        wait_timeout_s += 2 * settings.elastic_timeout_s + settings.start_timeout_s + WAIT_SLACK_S
        extra = dict(settings.env)
        if settings.health_check:
            extra[health_check_run.COMMAND] = settings.health_check
            extra[health_check_run.TIMEOUT] = f"{settings.health_check_s:g}"
        if job.by_agents:
            job_env = job_environment(worker, place, settings.elastic, wait_timeout_s)
            env = {**without_secrets(job.environ), **extra, **job_env}
        else:
            env = worker_environment(
                job.environ,
                worker=worker,
                place=place,
                driver=self._address,
                secret=job.secret,
                bind=job.bind,
                elastic=settings.elastic,
                wait_timeout_s=wait_timeout_s,
                threads=threads_per_worker(len(os.sched_getaffinity(0)), place.local_size),
                tls=job.tls,
                extra=extra,
            )
        if not self.generation:
            self._promised[action.worker] = action.place
        self._launcher.start(action.worker, self.job.command, env)

    def _log_workers(
        self,
        verb: str,
        actions: Sequence[events.StartWorker | events.KillWorker | events.LetGo],
        given: Sequence[Reason | None],
    ) -> None:
        """Log actions of one kind on several workers, in one line for each reason.

        Reasons that were already logged are not repeated.
        """
        by_reason: dict[str, list[Worker]] = {}
        for action in actions:
            if action.reason not in given:
                by_reason.setdefault(str(action.reason), []).append(action.worker)
        for reason, workers in by_reason.items():
            number = f"{len(workers)} workers, " if len(workers) > 1 else ""
            now = f" (generation {self.generation})" if self.generation else ""
            level = "debug" if self._decisions.ending is not None else "info"
            self._log(level, f"{verb} {number}{_some(workers)}: {reason}{now}")

    def _publish(self, world: events.PublishWorld) -> Line:
        message = protocol.World(
            world.generation,
            world.members[0].place,
            world.store,
            world.holders,
            world.commit,
            str(world.reason),
            self._checkpoint_run,
            world.checkpoint,
            copy_groups([each.worker for each in world.members], world.holders),
            world.metadata,
            world.source,
        )
        self._server.send_world(message, ((each.worker, each.place) for each in world.members))
        self.generation = world.generation
        if self._starts is not None:
            self._starts.published(self._now())
        self._held = world.holders > 0
        self._committed |= world.commit is not None and world.commit.number > 0
        self._checkpoints.world(world.generation, [member.worker for member in world.members])
        self._reports.keep({*self.places, *self._decisions.running})
        self._promised.clear()
        text = world_line(
            world, before=self._logged_last, wanted=self.job.settings.np, slots=self._slots
        )
        return ("info", text)

    def _end(self, outcome: events.EndJob) -> Line | None:
        reason = str(outcome.reason)
        if outcome.code != 0:
            self._server.broadcast(self._decisions.running, protocol.End(reason))
        if self.outcome:
            return None  # the outcome was decided before the stop request
        self.outcome = reason
        self._about_checkpoints.ended()
        if outcome.code == 0:
            level = "warning" if outcome.reason.facts.get("failed") else "info"
            return (level, f"training ended: {reason}")
        self._exits.job_failed()
        # Shorten the text, because the console already shows the worker's output.
        text = (
            f"the job ended with exit code {outcome.code}: {in_one_line(outcome.reason) or reason}"
        )
        text = text.replace("; ", ";\n") if len(text) > LINE else text
        if self._decisions.stop_code is not None:
            return ("info", text)
        self._last_line = ("error", text)
        return None


def _some(workers: Sequence[Worker]) -> str:
    return ", ".join(map(str, workers[:8])) + (", ..." if len(workers) > 8 else "")
