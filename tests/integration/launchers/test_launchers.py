"""Contract of every launcher, with simulated, local or agent workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic.driver.agents.agent_manager import AGENTS, AgentManager
from elastic.driver.agents.messages import Attach
from elastic.driver.events import WorkerExited, WorkerProbed
from elastic.driver.launch.local_launcher import LocalLauncher
from elastic.driver.launch.starter import Bootstrap
from elastic.driver.launch.subprocess_starter import ChildStarter
from elastic.driver.network.control_server import ControlServer
from elastic.driver.processes.orphan_reaper_program import state_of
from elastic.driver.processes.worker_output import Output
from elastic.protocol.messages import Worker
from harness.fakes.launcher import FakeLauncher

A, B = Worker("alpha", 0), Worker("alpha", 1)
SECRET = b"s" * 32
DEADLINE_S = 60.0
WAITS = "trap '' TERM; echo waits; while :; do sleep 0.05; done"


class Host:
    """A launcher under test, and its events."""

    def __init__(self, launcher: Any, printed: bytearray, *, real: bool) -> None:
        self.launcher = launcher
        self.printed = printed
        self.real = real
        self.exits: asyncio.Queue[WorkerExited] = asyncio.Queue()
        self.seen: asyncio.Queue[Any] = asyncio.Queue()

    def play(self, act: Callable[[FakeLauncher], None]) -> None:
        """Makes a played worker do what a real one does by itself."""
        if not self.real:
            act(self.launcher)

    def start(self, worker: Worker, line: str, **env: str) -> None:
        self.launcher.start(worker, ["/bin/sh", "-c", line], {"PATH": os.environ["PATH"], **env})

    async def exit(self) -> WorkerExited:
        return await asyncio.wait_for(self.exits.get(), DEADLINE_S)

    async def prints(self, text: bytes) -> None:
        if self.real:
            deadline = asyncio.get_running_loop().time() + DEADLINE_S
            while text not in self.printed:
                assert asyncio.get_running_loop().time() < deadline, bytes(self.printed)
                await asyncio.sleep(0.005)


def log(level: str, text: str) -> None: ...


@asynccontextmanager
async def opened(kind: str) -> AsyncIterator[Host]:
    printed = bytearray()
    output = Output(place_of=lambda w: None, stdout=printed.extend, stderr=printed.extend)
    launcher: Any = FakeLauncher()
    fleet = None
    if kind == "local":
        launcher = LocalLauncher(sink=output, log=log)
    if kind == "fleet":
        server = ControlServer(secret=SECRET, log=log, callers=AGENTS)
        address = server.bind("127.0.0.1")
        launcher = fleet = AgentManager(
            server,
            attach=Attach("job", 1, 2.0, 10.0),
            sink=output,
            log=log,
            starter=ChildStarter(environ=os.environ, log=log),
            reach=lambda host: Bootstrap("job", host, SECRET.hex(), [str(address)]),
        )
    host = Host(launcher, printed, real=kind != "played")
    if fleet is not None:
        await fleet.workers.open(
            "127.0.0.1",
            received=lambda worker, message: None,
            gone=lambda worker, silent: None,
            expected=lambda worker: True,
        )
    await launcher.open(host.exits.put_nowait, host.seen.put_nowait)
    try:
        yield host
    finally:
        await launcher.close()
        if fleet is not None:
            await fleet.workers.close()
        output.close()


@pytest.fixture(params=["played", "local", "fleet"])
def kind(request):
    return request.param


async def test_launcher_reports_the_output_and_exit_of_a_worker(kind):
    async with opened(kind) as host:
        host.start(A, "echo $WHO prints; echo $WHO complains >&2; exit 3", WHO="alpha")
        assert host.launcher.alive() == {A}
        host.play(lambda played: played.exit(A, 3, output="alpha complains"))
        exited = await host.exit()
        assert (exited.worker, exited.code, exited.reason) == (A, 3, "")
        assert "alpha complains" in exited.output
        assert host.launcher.alive() == frozenset()
        await host.prints(b"alpha prints")


async def test_killed_worker_is_reported_once_and_an_unknown_worker_never(kind):
    async with opened(kind) as host:
        host.start(A, WAITS)
        host.start(B, WAITS)
        await host.prints(b"[alpha:0] waits")
        await host.prints(b"[alpha:1] waits")
        host.launcher.kill(Worker("alpha", 7))
        host.launcher.kill(A)
        host.launcher.kill(A)
        assert (await host.exit()) == WorkerExited(A, -9)
        assert host.launcher.alive() == {B}
        host.launcher.kill(B)
        assert (await host.exit()) == WorkerExited(B, -9)
        assert host.exits.empty()


async def test_a_program_that_is_missing_is_an_exit_with_a_reason(kind):
    async with opened(kind) as host:
        host.play(lambda played: played.lose_program("/no/such/program"))
        host.launcher.start(A, ["/no/such/program"], {"PATH": "/bin"})
        exited = await host.exit()
        assert (exited.worker, exited.code) == (A, 127)
        assert "/no/such/program" in exited.reason


async def test_probe_returns_the_activity_of_a_worker(kind):
    async with opened(kind) as host:
        host.start(A, WAITS)
        await host.prints(b"waits")
        host.launcher.probe([A, B])
        host.play(lambda played: played.noticed(WorkerProbed(A, 0.1, 0, "S")))
        probed = await asyncio.wait_for(host.seen.get(), DEADLINE_S)
        while not isinstance(probed, WorkerProbed):
            probed = await asyncio.wait_for(host.seen.get(), DEADLINE_S)
        assert probed.worker == A and probed.cpu_s >= 0.0 and not probed.traced


async def test_closing_the_launcher_ends_all_workers_and_their_children(kind, tmp_path):
    async with opened(kind) as host:
        pids = tmp_path / "pids"
        child = f"sleep 600 & echo $! $$ >> {pids}; {WAITS}"
        host.start(A, child)
        await host.prints(b"waits")
        await host.launcher.close()
        assert host.launcher.alive() == frozenset()
        assert (await host.exit()).worker == A
        if host.real:
            for pid in pids.read_text().split():
                assert state_of(int(pid))[0] in "ZX", f"{pid} is left"


async def test_command_line_of_an_agent_contains_no_secret():
    async with opened("fleet") as host:
        host.start(A, WAITS)
        await host.prints(b"waits")
        lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
        assert any(b"elastic.driver.agents.agent_main" in line for line in lines)
        assert not any(SECRET.hex().encode() in line for line in lines)
