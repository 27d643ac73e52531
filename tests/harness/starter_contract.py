"""Contract of every starter of agents. A subclass gives the starter; the suite tells it what agents are to do.

Real starters start fake agents: a program in place of python that ignores its arguments and acts according to the
name of the job in its bootstrap. It writes its bootstrap and its process ID to a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic.driver.launch.starter import READY, RUN_MODULE, Bootstrap, Starter, StartFailed
from elastic.version import __version__
from harness.processes import lives

DEADLINE_S = 60.0
SECRET = "5ec2e7" * 10 + "5ec2"
Log = list[tuple[str, str]]

STAND_IN = """#!{python} -IS
import json, os, signal, sys
if sys.argv[1] == "-c" and len(sys.argv) == 3:  # asked where it looks for modules
    print(json.dumps(sys.path))
    sys.exit()
plain = sys.argv[1:] == ["-c", {run_module!r}, "elastic.driver.agents.agent_main"]
apart = sys.argv[1:3] == ["-I", "-c"] and "'elastic.driver.agents.agent_main'" in sys.argv[3]
assert plain or apart, sys.argv
signal.alarm(100)  # whatever the test forgets
told = json.loads(sys.stdin.readline())
job = told["job"]
if job == "silent":
    sys.stderr.write("still thinking\\n")
elif job == "wrong":
    sys.exit("hvd-elastic agent: the bootstrap message contains no driver address")
elif job == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
release = "0.0.1" if job == "old" else {release!r}
if job == "noisy":
    sys.stderr.write("Welcome to this machine! " * 20000)
if told["outlives"] and os.fork():
    os._exit(0)
if told["outlives"]:
    os.setsid()
file = os.path.join({folder!r}, told["host"])
with open(file + ".new", "w") as record:
    json.dump({{"pid": os.getpid(), "told": told, "environ": dict(os.environ)}}, record)
os.rename(file + ".new", file)
if job != "silent":
    print("{ready}", release, flush=True)
if told["outlives"]:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in 0, 1, 2:
        os.dup2(nowhere, fd)
    signal.pause()
if job == "stubborn":
    signal.pause()
if job == "chatty":
    for number in range(30):
        print("elastic | 12:00:00 | warning: line", number, file=sys.stderr, flush=True)
    print("elastic | 12:00:00 | a step", file=sys.stderr, flush=True)
if job == "broken":
    sys.exit(3)
sys.stdin.read()
"""


def stand_in(folder: Path) -> str:
    """Return the path of a program that replaces python there. It records each agent in ``folder``, by its host."""
    program = folder / ".python"
    program.write_text(
        STAND_IN.format(
            python=sys.executable,
            release=__version__,
            folder=str(folder),
            ready=READY,
            run_module=RUN_MODULE,
        )
    )
    program.chmod(0o755)
    return str(program)


def noted(folder: Path, host: str) -> dict[str, Any]:
    """Return the record of this host's agent: ``pid``, ``scripted_journal``, ``environ``."""
    record: dict[str, Any] = json.loads((folder / host).read_text())
    return record


def agents(folder: Path) -> dict[str, int]:
    """Return the process ids of started agents, by host."""
    return {
        file.name: noted(folder, file.name)["pid"]
        for file in folder.iterdir()
        if file.is_file() and "." not in file.name
    }


def end_agents(folder: Path) -> None:
    """Kill processes that a test has left running on purpose."""
    for pid in agents(folder).values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if any(".python" in word for word in process.cmdline()):
                process.kill()


def gone(pid: int) -> None:
    """Wait for the end of a process that may be no child of ours."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], DEADLINE_S)[0], f"{pid} still lives"
        finally:
            os.close(fd)


def bootstrap(host: str, job: str = "trains", *, outlives: bool = False) -> Bootstrap:
    return Bootstrap(job, host, SECRET, drivers=["driver:4000"], outlives=outlives)


async def failure(starter: Starter, told: Bootstrap) -> str:
    """Return the message of this failed start."""
    with pytest.raises(StartFailed) as caught:
        await starter.start(told)
    text = str(caught.value)
    assert "\n" not in text and "\r" not in text
    assert SECRET not in text
    assert told.host in text
    return text


class Bench:
    """One starter under test, and the folder of its agents' records. ``hosts`` are three reachable hosts."""

    def __init__(self, starter: Starter, folder: Path, log: Log) -> None:
        self.starter = starter
        self.folder = folder
        self.log = log

    def told(self, host: str) -> dict[str, Any]:
        told: dict[str, Any] = noted(self.folder, host)["told"]
        return told

    def runs(self, host: str) -> bool:
        return lives(noted(self.folder, host)["pid"])

    def end(self, host: str) -> None:
        os.kill(noted(self.folder, host)["pid"], signal.SIGKILL)

    async def ended(self, host: str) -> None:
        """Wait for it."""
        await asyncio.to_thread(gone, noted(self.folder, host)["pid"])


def descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors of this process: number and target, with the inode for sockets and pipes."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


class StarterContract:
    """Tests of a starter. Subclasses define ``open``, an async context manager of a Bench. Agents of jobs named
    ``wrong`` fail.
    """

    def open(self, folder: Path) -> contextlib.AbstractAsyncContextManager[Bench]:
        raise NotImplementedError

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[contextlib.AbstractAsyncContextManager[Bench]]:
        """Yield a Bench; afterwards no child and no descriptor of ours is left."""
        before = {child.pid for child in psutil.Process().children()}
        fds = descriptors()
        try:
            yield self.open(tmp_path)
        finally:
            end_agents(tmp_path)
        assert not [c for c in psutil.Process().children() if c.pid not in before]
        # The garbage collector may close descriptors of earlier tests meanwhile.
        assert descriptors() <= fds

    async def test_agent_has_read_its_bootstrap_when_start_returns(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            assert bench.told("alpha")["secret"] == SECRET
            assert bench.told("alpha")["drivers"] == ["driver:4000"]
            assert bench.runs("alpha")

    async def test_failed_agent_start_has_a_reason_and_affects_no_other_agent(self, opened):
        async with opened as bench:
            text = await failure(bench.starter, bootstrap("alpha", "wrong"))
            assert text.endswith("the bootstrap message contains no driver address")
            await bench.starter.start(bootstrap("beta"))
            await bench.starter.start(bootstrap("alpha"))
            assert bench.runs("alpha") and bench.runs("beta")

    async def test_closing_ends_only_agents_that_do_not_outlive_the_starter(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            await bench.starter.start(bootstrap("beta", outlives=True))
            await bench.starter.close()
            assert not bench.runs("alpha")
            assert bench.runs("beta")
            await bench.starter.close()

    async def test_start_after_closing_fails(self, opened):
        async with opened as bench:
            await bench.starter.close()
            assert "ending" in await failure(bench.starter, bootstrap("alpha"))

    async def test_an_agent_that_has_ended_can_be_started_again(self, opened):
        async with opened as bench:
            for outlives in (False, True):
                await bench.starter.start(bootstrap("alpha", outlives=outlives))
                bench.end("alpha")
                await bench.ended("alpha")
            await bench.starter.start(bootstrap("alpha"))
            assert bench.runs("alpha")

    async def test_several_agents_start_concurrently(self, opened):
        async with opened as bench:
            hosts = ["alpha", "beta", "gamma"]
            await asyncio.gather(*(bench.starter.start(bootstrap(host)) for host in hosts))
            assert all(bench.runs(host) for host in hosts)

    async def test_cancelled_start_can_be_repeated(self, opened):
        async with opened as bench:
            starting = asyncio.create_task(bench.starter.start(bootstrap("alpha", "silent")))
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            await bench.starter.start(bootstrap("alpha"))
            assert bench.runs("alpha")


@contextlib.asynccontextmanager
async def closing(bench: Bench) -> AsyncIterator[Bench]:
    try:
        yield bench
    finally:
        await bench.starter.close()
