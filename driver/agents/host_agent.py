"""Agent of one host: connects to the driver, and manages the workers of its host.

`AgentState` decides which driver the agent serves. `ProcessSupervisor` starts, monitors and kills workers. Workers
connect to the agent over loopback and use the worker protocol. Their messages are forwarded while a driver is
connected, and dropped otherwise: each new driver receives the list of running workers and past exits, and the workers
repeat their state. Training therefore continues when a connection or a driver is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from elastic.driver.agents.bandwidth_transfer import BandwidthMeter
from elastic.driver.agents.driver_choice import AgentState
from elastic.driver.agents.driver_connection import Uplink
from elastic.driver.agents.host_preemption import HostPreemption
from elastic.driver.agents.merged_reports import Relayed, ReportMerger
from elastic.driver.agents.messages import (
    AgentId,
    Announced,
    Attach,
    Beat,
    CallForBandwidth,
    Detach,
    Drop,
    Dump,
    Heard,
    Here,
    Kill,
    Logged,
    Probe,
    Registered,
    Reject,
    Seen,
    ServeBandwidth,
    Start,
    Tell,
    TellPlaces,
)
from elastic.driver.agents.output_forwarding import ForwardingSink
from elastic.driver.events import Event, WorkerDisconnected, WorkerExited, WorkerHealthChecked
from elastic.driver.launch.starter import Bootstrap
from elastic.driver.launch.worker_environment import (
    defaults,
    host_environment,
    threads_per_worker,
    without_secrets,
)
from elastic.driver.network import interface_selection, local_interfaces
from elastic.driver.network.control_server import WORKERS, ControlServer
from elastic.driver.network.secret import derived
from elastic.driver.output_interfaces import Log
from elastic.driver.processes.exit_ordering import ExitBarrier
from elastic.driver.processes.supervisor import ProcessSupervisor
from elastic.driver.reasons import counted
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol import messages
from elastic.protocol.messages import Address, Worker
from elastic.rendezvous import nccl_settings
from elastic.version import __version__

LOOPBACK = "127.0.0.1"
# Exit code after SIGTERM. Must not be 0, because a Kubernetes Job would then count the pod as completed and not replace
# it.
TERMINATED = 143
# seconds within which killed workers must exit; the agent then reports those still running
CLEARED_S = 12.0
MISSING_LOG_S = 600.0  # minimum number of seconds between log lines about a missing driver
HERE_S = 2.0  # minimum number of seconds between answers to heartbeats
# minimum number of seconds between log lines about a missing driver if the reason has changed
ANOTHER_REASON_S = 3.0
FIND_S = 120.0  # seconds within which an agent that a driver has started must find this driver

Find = Callable[[], Awaitable[list[tuple[str, int]]]]


class HostAgent:
    """Agent of one host. `run` returns the agent's exit code after the last worker has exited.

    Args:
        bootstrap: configuration of the agent.
        find: coroutine function that returns addresses at which the driver may listen.
        slots: number of slots of this host.
        bound: whether a driver started the agent, which then serves only this job.
        log: called with the level and the text of each log line.
    """

    def __init__(
        self, bootstrap: Bootstrap, find: Find, *, slots: int, bound: bool, log: Log
    ) -> None:
        self.bootstrap = bootstrap
        self.identity = AgentId(bootstrap.host, time.time_ns())
        self.slots = slots
        self._find = find
        self._bound = bound
        self._log_here = log
        self._secret = bytes.fromhex(bootstrap.secret)
        self._workers_secret = derived(self._secret, "worker")
        self._state = AgentState()
        self._lease_s = Settings.lease_s
        self._address = Address("", 0)  # address of the server to which workers connect
        self._bind = ""
        self._addresses: list[str] = []
        self._network: dict[str, str] = {}
        # results of launched functions, stored because workers send them only once
        self._results: dict[Worker, Heard] = {}
        # Health check results of running workers. They are sent to each new driver, because messages may have been
        # lost.
        self._checked: dict[Worker, WorkerHealthChecked] = {}
        self._connected: set[Worker] = set()
        self._workers_of = ""  # job to which the workers on this host belong
        # workers of an ended job; ignored, because a new job may reuse their names
        self._stale: set[Worker] = set()
        self._missing_logged_at = float("-inf")
        self._missing_logged = ""
        self._here_sent_at = float("-inf")
        self._seated = 0  # the leader's term according to etcd
        self._served = False
        self._over: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._machine = HostPreemption(
            bootstrap.host,
            grace_s=bootstrap.grace_s,
            changed=self._announce,
            end=self._terminated,
            log=self._log,
        )
        self._away_alarm: asyncio.TimerHandle | None = None
        self._merger = ReportMerger()
        self._merge_alarm: asyncio.TimerHandle | None = None

    # ---- lifetime --------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        contexts = _contexts(self.bootstrap)
        self._uplink = Uplink(
            self.identity,
            self._secret,
            self._find,
            # nothing to send: the driver sends the first message on a connection
            opened=lambda: None,
            received=self._on_driver_message,
            closed=self._driver_lost,
            missing=self._missing,
            lease_s=self._lease_s,
            tls=contexts[0],
        )
        self._bandwidth = BandwidthMeter(
            self.identity, self._secret, contexts, send=self._uplink.send, log=self._log
        )
        self._sink = ForwardingSink(self._uplink.send, lambda: self._uplink.backlog)
        self._server: ControlServer[Worker] = ControlServer(
            secret=self._workers_secret,
            log=self._log,
            callers=WORKERS,
            lease_s=self._lease_s,
            tls=contexts[1],
        )
        self._exit_barrier = ExitBarrier(self._server, self._exited)
        self._agent = ProcessSupervisor(
            exited=self._exit_barrier.gone,
            noticed=self._noticed,
            sink=self._sink,
            log=self._log,
            lease_s=self._lease_s,
        )
        self._address = await self._server.open(
            LOOPBACK,
            received=self._on_worker_message,
            gone=self._worker_hung_up,
            expected=lambda worker: worker in self._agent.alive(),
        )
        end_signals = [signal.SIGTERM, signal.SIGINT]
        # do not handle SIGHUP if it is ignored, as under nohup
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            end_signals.append(signal.SIGHUP)
        for number in end_signals:
            loop.add_signal_handler(number, self._asked_to_end, number)
        if self._bound:
            loop.call_later(FIND_S, self._never_found)
        linking = asyncio.create_task(self._uplink.run())
        linking.add_done_callback(self._link_ended)
        try:
            return await self._over
        finally:
            for alarm in (self._away_alarm, self._merge_alarm):
                if alarm is not None:
                    alarm.cancel()
            self._machine.close()
            self._ready(False)
            await self._agent.close()
            self._sink.catch_up()
            await self._uplink.finish()
            linking.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(linking, *self._tasks, return_exceptions=True)
            await self._bandwidth.close()
            await self._server.close()

    def end(self, code: int, why: str) -> None:
        """Kill the workers, and make `run` return this exit code."""
        if self._over is not None and not self._over.done():
            failed = code not in (0, TERMINATED)
            level = "error" if failed else "debug" if self._bound else "info"
            self._log(level, f"agent exiting: {why}")
            self._over.set_result(code)

    def _terminated(self, why: str) -> None:
        self.end(0 if self._bound else TERMINATED, why)

    def driver_leads(self, term: int) -> None:
        """Disconnect from a driver with a lower term than the leader's term in etcd."""
        self._seated = term
        if self._state.superseded(term):
            self._uplink.drop(f"a driver of term {term} is now the leader")

    def fence(self, generation: int, job: str) -> None:
        """Kill the workers if the newest generation in etcd shows that the job continued without them.

        See `AgentState.fenced`.
        """
        if self._state.job == job and self._state.fenced(generation, self._now()):
            self._give_up(
                f"the job continued without this host (generation {generation}), because no driver"
                " reached it for one liveness timeout"
            )

    # ---- the driver ------------------------------------------------------------------------------------------------

    def _on_driver_message(self, message: Any) -> None:
        match message:
            case Attach():
                self._attached(message)
            case Start():
                self._start(message)
            case Kill(worker):
                self._agent.kill(worker)
            case Probe(workers):
                self._agent.probe(workers)
            case Dump(worker, all_threads):
                self._agent.dump(worker, all_threads=all_threads)
            case Drop(worker):
                self._server.disconnect(worker)
            case Tell(workers, forwarded):
                if isinstance(forwarded, messages.World):
                    self._state.record_world(forwarded.generation)
                self._relay(self._merger.sent(workers, forwarded))
                self._server.broadcast(workers, forwarded)
            case TellPlaces(members, world):
                self._state.record_world(world.generation)
                self._relay(self._merger.sent([worker for worker, _ in members], world))
                self._server.send_world(world, members)
            case Detach(reason):
                self._dismissed(reason)
            case ServeBandwidth(caller):
                self._in_background(self._bandwidth.serve(self._bind, caller))
            case CallForBandwidth(peer, address):
                self._in_background(self._bandwidth.call(peer, address))
            case Beat():
                self._beaten()
            case Reject(reason):
                self._refused(reason)

    def _attached(self, attach: Attach) -> None:
        outcome = self._state.attached(attach, seated=self._seated)
        if outcome.refused:
            self._missing(f"rejected a driver: {outcome.refused}")
            self._uplink.drop(f"refused: {outcome.refused}")
            return
        try:
            own = local_interfaces.own_addresses()
            wanted, local = self.bootstrap.interfaces, self._uplink.bound
            # Keep the address while workers run, because they listen on it.
            if not self._bind or not self._agent.alive():
                self._bind = interface_selection.choose_bind(wanted, own, local=local)
            self._network = interface_selection.worker_variables(self._bind, own, os.environ)
            self._addresses = [f"{each.address}/{each.prefix_length}" for each in own if each.up]
        except Invalid as error:
            self.end(1, str(error))
            return
        if self._away_alarm is not None:
            self._away_alarm.cancel()
            self._away_alarm = None
        self._machine.watch(attach)
        self._agent.prepared.modules = attach.preload
        others = self._agent.alive() if self._workers_of != attach.job else frozenset()
        self._stale |= others
        self._workers_of = attach.job
        self._merger.serves(attach.job)
        self._in_background(self._register(attach, clear=bool(others)))

    async def _register(self, attach: Attach, *, clear: bool) -> None:
        if clear:
            await self._clear("a new job has started")
        if not self._uplink.open or self._state.job != attach.job:
            return
        again = self._served
        self._served = True
        self._uplink.send(
            Registered(
                self.slots,
                self._bind,
                self._addresses,
                sorted(self._agent.alive()),
                [*self._state.exits.values()],
                attach.job,
                __version__,
                self._machine.notice,
                ends=self._bound,
            )
        )
        for result in self._results.values():
            self._uplink.send(result)
        for checked in self._checked.values():
            self._uplink.send(Seen(checked))
        self._server.broadcast(self._connected, messages.Restate())
        self._sink.catch_up()
        self._ready(True)
        count = len(self._agent.alive())
        workers = f", {counted(count, 'worker')} here" if count else ""
        verb = "reconnected to" if again else "serves"
        self._log_here(
            "info", f"{verb} job {self.bootstrap.job}, driver of term {attach.term}{workers}"
        )

    def _ready(self, ready: bool) -> None:
        if self.bootstrap.ready_file:
            with contextlib.suppress(OSError):
                file = Path(self.bootstrap.ready_file)
                file.touch() if ready else file.unlink(missing_ok=True)

    def _driver_lost(self, reason: str) -> None:
        self._ready(False)
        self._merger.reset()
        self._state.lost(self._now())
        by = self._state.away_by
        if by is None:
            return
        if self._away_alarm is None:
            self._away_alarm = asyncio.get_running_loop().call_at(by + 0.01, self._away_too_long)
            wait_s = by - self._now()
            workers = counted(len(self._agent.alive()), "worker")
            self._log_here(
                "warning",
                f"lost the driver ({reason}); {workers} may keep training without one for {wait_s:.0f} s",
            )

    def _away_too_long(self) -> None:
        self._away_alarm = None
        if self._state.given_up(self._now()):
            self._give_up("no driver has returned")

    def _give_up(self, why: str) -> None:
        self._workers_of = ""
        if self._bound:
            self.end(1, why)
        else:
            self._log("error", f"killed the workers of this host: {why}")
            self._in_background(self._clear(why))

    def _missing(self, reason: str) -> None:
        """Log that no driver was found. For the same reason, log at most one line per MISSING_LOG_S seconds."""
        now = self._now()
        least_s = MISSING_LOG_S if reason == self._missing_logged else ANOTHER_REASON_S
        if now - self._missing_logged_at >= least_s:
            level = "info" if not self._state.job else "warning"
            self._missing_logged_at, self._missing_logged = now, reason
            self._log_here(level, f"no driver found: {reason}; retrying")

    def _never_found(self) -> None:
        if not self._served:
            self.end(1, f"the driver that started it was not found within {FIND_S:g} s")

    def _beaten(self) -> None:
        if (now := self._now()) - self._here_sent_at >= HERE_S:
            self._here_sent_at = now
            self._uplink.send(Here())

    def _refused(self, reason: str) -> None:
        """Kill the workers, because the driver has rejected this agent.

        An agent that a driver has started also exits. Any other agent tries to connect again, because the agent that
        the driver has accepted for this host may exit.
        """
        if self._bound:
            self.end(1, f"the driver rejects it: {reason}")
            return
        self._missing(f"the driver rejects this agent: {reason}")
        self._state.release()
        self._workers_of = ""
        self._in_background(self._clear(reason))
        self._uplink.drop(reason)

    def _dismissed(self, reason: str) -> None:
        self._state.detached()
        if self._bound:
            self.end(0, reason)
        else:
            self._log_here("info", f"the job ended ({reason}); waiting for the next")
            self._in_background(self._clear(reason))

    def _link_ended(self, linking: asyncio.Task[None]) -> None:
        if not linking.cancelled() and linking.exception() is not None:
            self.end(1, f"a bug in the agent, please report it: {linking.exception()!r}")

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _start(self, start: Start) -> None:
        worker = start.worker
        if not self._state.may_start(worker) or worker in self._agent.alive():
            return
        sharing = int(start.env.get("HOROVOD_LOCAL_SIZE", "1"))
        env = {
            **defaults(threads_per_worker(len(os.sched_getaffinity(0)), sharing)),
            **self._network,
            **_with_own_programs(without_secrets(os.environ)),
            **start.env,
            **nccl_settings.needed(float(start.env.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or 30)),
            **host_environment(
                self._address, self._workers_secret.hex(), self._bind, self.bootstrap.tls
            ),
        }
        folder: str | None = self.bootstrap.folder or start.folder
        if folder and not os.path.isdir(folder):
            home = os.path.expanduser("~")
            self._log(
                "warning", f"folder {folder} does not exist on this host; workers start in {home}"
            )
            folder = home
        self._agent.start(worker, start.command, env, folder=folder or None)

    def _on_worker_message(self, worker: Worker, message: Any) -> None:
        self._connected.add(worker)
        if worker in self._stale:
            return
        if isinstance(message, messages.SendResult):
            self._results[worker] = Heard(worker, message)
        self._relay(self._merger.received(worker, message, self._now()))

    def _relay(self, relayed: Sequence[Relayed]) -> None:
        """Send messages of workers to the driver, and set the timer for the reports that are held."""
        for message in relayed:
            self._uplink.send(message)
        at = self._merger.flush_at
        if self._merge_alarm is not None and self._merge_alarm.when() != at:
            self._merge_alarm.cancel()
            self._merge_alarm = None
        if self._merge_alarm is None and at is not None:
            self._merge_alarm = asyncio.get_running_loop().call_at(at, self._flush_merged)

    def _flush_merged(self) -> None:
        self._merge_alarm = None
        self._relay(self._merger.flush())

    def _worker_hung_up(self, worker: Worker, silent: bool) -> None:
        self._connected.discard(worker)
        if worker not in self._stale:
            self._relay(self._merger.gone(worker))
            self._uplink.send(Seen(WorkerDisconnected(worker, silent)))
        self._exit_barrier.disconnected(worker)

    def _exited(self, event: WorkerExited) -> None:
        if event.worker in self._stale:
            self._stale.discard(event.worker)
            return
        self._checked.pop(event.worker, None)
        self._state.exited(event)
        self._relay(self._merger.gone(event.worker))
        self._uplink.send(Seen(event))
        if not self._agent.alive():
            self._machine.all_workers_exited()

    def _noticed(self, event: Event) -> None:
        if isinstance(event, WorkerHealthChecked):
            self._checked[event.worker] = event
        seen = Seen(cast(Any, event))
        self._relay(self._merger.observed(seen.event.worker))
        self._uplink.send(seen)

    async def _clear(self, why: str) -> None:
        to_kill = self._agent.alive()
        if to_kill:
            self._log_here("info", f"killing {counted(len(to_kill), 'worker')}: {why}")
        for worker in to_kill:
            self._agent.kill(worker)
        deadline = self._now() + CLEARED_S
        while self._agent.alive() & to_kill and self._now() < deadline:
            await asyncio.sleep(0.005)
        self._results.clear()

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _announce(self) -> None:
        self._uplink.send(Announced(self._machine.notice))

    def _asked_to_end(self, number: int) -> None:
        """Handle a signal that ends the agent. Only after the first SIGTERM do workers get time to leave."""
        name, in_use = signal.Signals(number).name, bool(self._agent.alive()) and self._uplink.open
        if number != signal.SIGTERM:
            self.end(0, name)
        elif not in_use or not self._machine.handle_signal(name):
            self._terminated(name)

    def _log(self, level: str, text: str) -> None:
        """Log to the driver and to this agent's own output.

        If a driver started the agent and is connected, log only to the driver, because it also shows the agent's
        output.
        """
        delivered = level != "debug" and self._uplink.send(Logged(cast(Any, level), text))
        if not (delivered and self._bound):
            self._log_here(level, text)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _with_own_programs(environ: Mapping[str, str]) -> dict[str, str]:
    """Put the folder of this agent's Python first in PATH, since an ssh session may find another Python."""
    own = os.path.dirname(sys.executable)
    path = environ.get("PATH", os.defpath)
    return {
        **environ,
        "PATH": path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}",
    }


def _contexts(bootstrap: Bootstrap) -> tuple[Any, Any]:
    """Return the TLS contexts for connecting and for listening, or (None, None) without TLS."""
    if bootstrap.tls is None:
        return None, None
    from elastic.protocol import tls

    files = bootstrap.tls
    return tuple(tls.context(files.cert, files.key, files.ca, server=s) for s in (False, True))  # type: ignore[return-value]
