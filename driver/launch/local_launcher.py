"""Launcher of workers on this machine, through an agent in the driver's process."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

from elastic.driver.events import (
    BandwidthMeasured,
    Event,
    HostLeaving,
    HostStaying,
    Notice,
    WorkerExited,
)
from elastic.driver.launch.standard_input import StandardInput, rank_of
from elastic.driver.launch.worker_environment import without_secrets
from elastic.driver.output_interfaces import Log, Sink
from elastic.driver.preemption.watch import OFF, Watch
from elastic.driver.processes.supervisor import ProcessSupervisor
from elastic.driver.settings import Settings
from elastic.protocol.messages import Worker


class LocalLauncher:
    """Launcher that runs all workers on this machine, regardless of their host names.

    Tests can therefore simulate several hosts on one machine.
    """

    def __init__(
        self,
        *,
        sink: Sink,
        log: Log,
        lease_s: float = Settings.lease_s,
        preemption: str = OFF,
        preload: str = "",
        stdin_rank: int | None = None,
    ) -> None:
        self._sink = sink
        self._log = log
        self._lease_s = lease_s
        self._preemption = preemption  # source of preemption notices
        # modules that a process imports in advance, before a worker is started in it
        self._preload = preload
        # selects the worker that receives this process's standard input
        self._stdin = StandardInput(stdin_rank)
        self._agent: ProcessSupervisor | None = None
        self._watch: Watch | None = None
        self._hosts: set[str] = set()  # names of the simulated hosts on which workers were started
        self._noticed: Callable[[Event], None] = lambda event: None

    @property
    def agent(self) -> ProcessSupervisor:
        assert self._agent is not None, "call open() first"
        return self._agent

    async def open(
        self, exited: Callable[[WorkerExited], None], noticed: Callable[[Event], None]
    ) -> None:
        assert self._agent is None, "open() was already called"
        self._agent = ProcessSupervisor(
            exited=exited, noticed=noticed, sink=self._sink, log=self._log, lease_s=self._lease_s
        )
        self._agent.prepared.modules = self._preload
        self._noticed = noticed
        self._watch = Watch(
            self._preemption,
            changed=self._announce,
            log=self._log,
            environ=without_secrets(os.environ),
        )
        self._watch.begin()

    def _announce(self, notice: Notice | None) -> None:
        for host in sorted(self._hosts):
            self._noticed(
                HostStaying(host) if notice is None else HostLeaving(host, notice, alone=True)
            )

    def start(self, worker: Worker, command: Sequence[str], env: Mapping[str, str]) -> None:
        if worker.host not in self._hosts:
            self._hosts.add(worker.host)
            notice = None if self._watch is None else self._watch.notice
            if notice is not None:
                self._noticed(HostLeaving(worker.host, notice, alone=True))
        has_stdin = self._stdin.receives(worker, rank_of(env), self.alive())
        self.agent.start(worker, command, env, stdin=0 if has_stdin else subprocess.DEVNULL)

    def kill(self, worker: Worker) -> None:
        self.agent.kill(worker)

    def probe(self, workers: Sequence[Worker]) -> None:
        self.agent.probe(workers)

    def dump(self, worker: Worker, *, all_threads: bool) -> None:
        self.agent.dump(worker, all_threads=all_threads)

    def measure(self, host: str, peer: str) -> None:
        """Report a BandwidthMeasured event without a result, because all workers run on this machine."""
        trouble = "both hosts are this machine"
        loop = asyncio.get_running_loop()
        loop.call_soon(self._noticed, BandwidthMeasured(host, peer, trouble=trouble))

    def give_up(self, host: str, why: str) -> None:
        """Do nothing, because this machine always responds."""

    def alive(self) -> frozenset[Worker]:
        return self.agent.alive()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._agent is not None:
            await self._agent.close()
