"""RayStarter without Ray: the contract of starters, a slow or dead Ray, and cleanup after agents.

Actors, folders and sockets of agents are real, but the actors run in this process, in one event loop with the starter,
and a dictionary plays Ray's part.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from elastic.driver.launch.agent_folder import make_folder, sweep
from elastic.driver.ray.actors import Taken
from elastic.driver.ray.node.agent_actor import AgentActor, RayEngine, RayProcess
from elastic.driver.ray.node.worker_calls import CallFailed
from elastic.driver.ray.starter import RayStarter, name_of
from harness.golden import raises, recorded
from harness.processes import lives
from harness.starter_contract import (
    SECRET,
    Bench,
    Log,
    StarterContract,
    bootstrap,
    closing,
    failure,
    noted,
    stand_in,
)
from harness.waiting import until

CALL = b"a pickled call"
RAYLET = [0]  # process ID of the latest one; 0: none is watched


class Died(Exception):
    """Like Ray's ActorDiedError."""


class Engine(RayEngine):
    def __init__(self) -> None:
        self.left = threading.Event()
        self.leaves: Any = lambda: None

    def ray_process(self) -> RayProcess:
        return RayProcess("head:6379", "mine", {"COLOUR": "green"}, {}, "/ray", RAYLET[-1])

    def die(self, code: int = 1) -> None:
        self.left.set()
        self.leaves()

    def leave(self) -> None:
        self.leaves()


class Fake:
    """Named actors in this event loop. Its attributes simulate the behavior of Ray."""

    def __init__(self, python: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.python = python
        self.living: dict[str, AgentActor] = {}
        self.made: list[tuple[str, str, bool]] = []
        self.silent: set[str] = set()  # nodes that do not answer
        self.release = ""
        self.head = threading.Event()  # set while the head answers
        self.head.set()
        self.making = threading.Lock()
        self.sending_s = 0.0  # an answer is lost if the process of its actor exits meanwhile

    def make(self, name: str, node: str, *, detached: bool) -> AgentActor:
        assert threading.current_thread() is not threading.main_thread()
        self.head.wait(20.0)
        with self.making:
            if name in self.living:
                raise Taken(name)
            self.made.append((name, node, detached))
            engine = Engine()
            actor = AgentActor(python=self.python, engine=engine, unused_s=3600.0)
            engine.leaves = lambda: self.drop(actor)
            self.living[name] = actor
            actor.silent = node in self.silent  # type: ignore[attr-defined]
            return actor

    def find(self, name: str) -> AgentActor | None:
        self.head.wait(20.0)
        return self.living.get(name)

    def names(self) -> list[str]:
        self.head.wait(20.0)
        return [*self.living, "somebody-else"]

    def ask(self, actor: AgentActor, method: str, *args: Any) -> Future[Any]:
        call = self._ask(actor, method, *args)
        try:
            return asyncio.run_coroutine_threadsafe(call, self.loop)
        except RuntimeError:  # the test has ended, and this thread is no longer awaited
            call.close()
            raise

    async def _ask(self, actor: AgentActor, method: str, *args: Any) -> Any:
        if actor.silent:  # type: ignore[attr-defined]
            await asyncio.sleep(3600)
        if actor not in self.living.values():
            raise Died("The actor is dead because it was killed by `ray.kill`.")
        if method == "hello" and self.release:
            return self.release
        asking = asyncio.ensure_future(self._answer(actor, method, *args))
        ended = asyncio.ensure_future(self._death_of(actor))
        await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not asking.done():
            asking.cancel()
            raise Died("The actor is dead because it was killed by `ray.kill`.")
        return asking.result()

    async def _answer(self, actor: AgentActor, method: str, *args: Any) -> Any:
        answer = await getattr(actor, method)(*args)
        if self.sending_s:
            await asyncio.sleep(self.sending_s)
        return answer

    async def _death_of(self, actor: AgentActor) -> None:
        while actor in self.living.values():
            await asyncio.sleep(0.002)

    def kill(self, actor: AgentActor) -> None:
        self.head.wait(20.0)
        self.loop.call_soon_threadsafe(self.drop, actor)

    def drop(self, actor: AgentActor) -> None:
        """The actor's process and its kernel resources are gone."""
        for name in [name for name, each in self.living.items() if each is actor]:
            del self.living[name]
        actor._unused.cancel()
        if actor._watch is not None:
            actor._watch.cancel()
        if actor._process is not None:
            actor._process.kill()
        self.sweeping = asyncio.ensure_future(actor._clear())

    async def settled(self) -> None:
        if hasattr(self, "sweeping"):
            await self.sweeping


class RayBench(Bench):
    starter: RayStarter
    fake: Fake


@contextlib.asynccontextmanager
async def bench_in(folder: Path, **rest: Any) -> AsyncIterator[RayBench]:
    log: Log = []
    fake = Fake(stand_in(folder))
    starter = RayStarter(
        lambda host: f"node-of-{host}",
        CALL,
        lambda level, text: log.append((level, text)),
        job="trains",
        actors=fake,
        **rest,
    )
    bench = RayBench(starter, folder, log)
    bench.fake = fake
    try:
        async with closing(bench):
            yield bench
    finally:
        for actor in [*fake.living.values()]:
            fake.drop(actor)
            await fake.settled()
        await fake.settled()


@pytest.fixture(autouse=True)
def short_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("COLOUR", "green")
        yield Path(folder)


@pytest.mark.slow
class TestRay(StarterContract):
    @contextlib.asynccontextmanager
    async def open(self, folder: Path) -> AsyncIterator[Bench]:
        async with bench_in(folder) as bench:
            yield bench

    async def test_actor_is_on_the_hosts_node_with_a_unique_name(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            await bench.starter.start(bootstrap("beta", outlives=True))
            assert bench.fake.made == [
                ("hvd-elastic-agent:trains:alpha", "node-of-alpha", False),
                ("hvd-elastic-agent:trains:beta", "node-of-beta", True),
            ]

    async def test_agent_knows_its_files_and_its_workers_have_the_users_environment(
        self, opened, short_folder
    ):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            received, environ = bench.told("alpha"), noted(bench.folder, "alpha")["environ"]
            call = Path(environ["ELASTIC_CALL"])
            assert call.read_bytes() == CALL
            assert stat.S_IMODE(call.stat().st_mode) == 0o600
            assert stat.S_IMODE(call.parent.stat().st_mode) == 0o700
            assert call.parent.parent == short_folder
            assert Path(received["drivers_file"]).read_text() == "driver:4000\n"
            assert received["folder"] == os.getcwd()
            assert environ["RAY_ADDRESS"] == "head:6379"
            assert environ["RAY_NAMESPACE"] == "mine"
            assert environ["COLOUR"] == "green"
            assert "OMP_NUM_THREADS" not in environ
            assert SECRET not in str(environ)
            await bench.starter.close()
            assert not call.parent.exists()

    async def test_first_python_in_the_workers_path_is_the_actors(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            first = noted(bench.folder, "alpha")["environ"]["PATH"].split(":")[0]
            process = await asyncio.create_subprocess_exec(
                f"{first}/python", "-c", "", stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
            assert json.loads(output)  # it is the stand-in, which prints its path

    async def test_end_of_an_agent_ends_its_actor_and_is_logged_once(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            bench.end("alpha")
            await until(lambda: not bench.fake.living, "the end of the actor")
            await until(lambda: bool(bench.log), "a line")
            assert bench.log == [("warning", "the agent on alpha was killed by signal 9")]

    async def test_death_of_an_actor_ends_its_agent_and_is_logged_once(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            bench.fake.drop(bench.fake.living[name_of("trains", "alpha")])
            await bench.ended("alpha")
            await until(lambda: bool(bench.log), "a line")
            assert bench.log == [
                ("warning", "the actor of the agent on alpha exited: it was killed by `ray.kill`")
            ]

    async def test_agent_and_actor_end_with_the_raylet(self, opened, short_folder):
        async with opened as bench:
            raylet = await asyncio.create_subprocess_exec("sleep", "100")
            RAYLET.append(raylet.pid)
            await bench.starter.start(bootstrap("alpha"))
            RAYLET.pop()
            raylet.kill()
            await bench.ended("alpha")
            await until(lambda: not bench.fake.living, "the end of the actor")
            await until(lambda: not [*short_folder.iterdir()], "the removal of its folder")
            why = "Ray's raylet on alpha is gone, and the agent exited with it"
            await until(lambda: bench.log == [("warning", why)], "a line")
            await raylet.wait()

    async def test_warnings_of_an_agent_are_logged(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha", "chatty"))
            await until(lambda: len(bench.log) >= 20, "its lines")
            recorded("log", bench.log[0])
            recorded("log", bench.log[19][1])

    async def test_new_agent_replaces_a_running_one(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            earlier = noted(bench.folder, "alpha")["pid"]
            await bench.starter.start(bootstrap("alpha"))
            assert not lives(earlier) and bench.runs("alpha")
            assert len(bench.fake.living) == 1

    async def test_actor_that_ends_its_agent_exits_after_its_answer(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            (actor,) = bench.fake.living.values()
            bench.fake.sending_s = 0.05
            await asyncio.wrap_future(bench.fake.ask(actor, "end"))
            assert not bench.runs("alpha")
            await until(lambda: not bench.fake.living, "the end of the actor")

    async def test_failed_start_leaves_no_actor(self, opened):
        async with opened as bench:
            for job in ("wrong", "killed", "old"):
                await failure(bench.starter, bootstrap("alpha", job))
                await until(lambda: not bench.fake.living, "the end of the actor")


async def test_unresponsive_node_fails_the_start_in_time_without_blocking(tmp_path):
    async with bench_in(tmp_path, start_s=0.5) as bench:
        bench.fake.silent = {"node-of-alpha"}
        silent = asyncio.create_task(failure(bench.starter, bootstrap("alpha")))
        text = await silent
        assert "within 0.5 s" in text and "node-of-" in text
        await until(lambda: not bench.fake.living, "the end of the actor that never ran")


async def test_unresponsive_head_fails_the_start_in_time_and_late_actors_are_killed(tmp_path):
    async with bench_in(tmp_path, start_s=0.5) as bench:
        bench.fake.head.clear()
        assert "within 0.5 s" in await failure(bench.starter, bootstrap("alpha"))
        bench.fake.head.set()
        await until(lambda: bool(bench.fake.made) and not bench.fake.living, "making and killing")


async def test_other_release_is_rejected_before_an_agent_is_created(tmp_path):
    async with bench_in(tmp_path) as bench:
        bench.fake.release = "0.0.1"
        text = await failure(bench.starter, bootstrap("alpha"))
        recorded("messages", text)
        assert not (bench.folder / "alpha").exists()


async def test_host_not_listed_by_ray_is_rejected(tmp_path):
    nodes: dict[str, str] = {}
    starter = RayStarter(nodes.__getitem__, b"", print, job="j", actors=Fake("python"))
    recorded("messages", await failure(starter, bootstrap("alpha")))


async def test_successor_driver_redirects_existing_agents(tmp_path):
    async with bench_in(tmp_path, detached=True) as bench:
        await bench.starter.start(bootstrap("alpha"))
        await bench.starter.close()
        assert bench.runs("alpha")
        log: Log = []
        later = RayStarter(
            lambda host: "n",
            CALL,
            lambda level, text: log.append((level, text)),
            job="trains",
            detached=True,
            actors=bench.fake,
        )
        await later.redirect(["10.0.0.1:5000", "10.0.0.2:5000"])
        drivers = Path(bench.told("alpha")["drivers_file"])
        assert drivers.read_text() == "10.0.0.1:5000\n10.0.0.2:5000\n"
        bench.end("alpha")
        await until(lambda: bool(log), "a line")
        assert log == [("warning", "the agent on alpha was killed by signal 9")]
        assert bench.log == []
        await later.close()


async def test_unavailable_head_is_logged_if_agents_must_be_redirected(tmp_path):
    async with bench_in(tmp_path, start_s=0.2) as bench:
        bench.fake.head.clear()
        await bench.starter.redirect(["a:1"])
        assert bench.log == [("warning", "the agents of this job can't be found: TimeoutError")]
        bench.fake.head.set()


class Worker:
    """A worker that serves calls as the test requires."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, folder: Path, rank: int) -> Worker:
        self = cls(*await asyncio.open_unix_connection(str(folder / "calls")))
        self.writer.write(json.dumps({"rank": rank, "slot": 0}).encode() + b"\n")
        return self

    async def hear(self) -> bytes:
        length = int.from_bytes(await self.reader.readexactly(4), "big")
        return await self.reader.readexactly(length)

    def say(self, answer: bytes) -> None:
        self.writer.write(len(answer).to_bytes(4, "big") + answer)


async def served(bench: RayBench, ranks: list[int]) -> list[Worker]:
    await bench.starter.start(bootstrap("alpha"))
    folder = Path(noted(bench.folder, "alpha")["environ"]["ELASTIC_CALL"]).parent
    workers = [await Worker.connect(folder, rank) for rank in ranks]
    actor = bench.fake.living[name_of("trains", "alpha")]
    assert await actor.present(len(ranks), 10.0) == sorted(ranks)
    return workers


async def test_calls_reach_the_worker_of_their_rank_in_order(tmp_path):
    async with bench_in(tmp_path) as bench:
        one, zero = await served(bench, [1, 0])
        assert await bench.starter.present() == 2
        first = asyncio.create_task(bench.starter.call(1, b"f" * 300_000))
        assert await one.hear() == b"f" * 300_000
        second = asyncio.create_task(bench.starter.call(1, b""))
        other = asyncio.create_task(bench.starter.call(0, b"h"))
        assert await zero.hear() == b"h"
        zero.say(b"")
        assert await other == b""
        one.say(b"1" * 300_000)
        assert await one.hear() == b""
        one.say(b"2")
        assert await first == b"1" * 300_000
        assert await second == b"2"
        for worker in (one, zero):
            worker.writer.close()


async def test_exited_worker_fails_its_calls_and_names_its_rank(tmp_path):
    async with bench_in(tmp_path) as bench:
        (worker,) = await served(bench, [3])
        with pytest.raises(CallFailed, match="rank 2"):
            await bench.starter.call(2, b"")
        calling = asyncio.create_task(bench.starter.call(3, b"f"))
        await worker.hear()
        worker.writer.transport.abort()
        with raises(RuntimeError):
            await calling
        assert await bench.starter.present() == 0
        with pytest.raises(CallFailed, match="rank 3"):
            await bench.starter.call(3, b"f")


async def test_answer_to_a_timed_out_call_is_not_used_for_the_next(tmp_path):
    async with bench_in(tmp_path) as bench:
        (worker,) = await served(bench, [0])
        with raises(CallFailed):
            await bench.starter.call(0, b"slow", 0.1)
        assert await worker.hear() == b"slow"
        nxt = asyncio.create_task(bench.starter.call(0, b"next"))
        assert await worker.hear() == b"next"
        worker.say(b"late")
        worker.say(b"mine")
        assert await nxt == b"mine"
        worker.writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"\n", b"{}\n", b'{"rank": -1}\n', b"[]\n", b"x" * 70_000, b""])
async def test_peer_without_a_rank_is_disconnected(tmp_path, data):
    async with bench_in(tmp_path) as bench:
        await served(bench, [])
        folder = Path(noted(bench.folder, "alpha")["environ"]["ELASTIC_CALL"]).parent
        reader, writer = await asyncio.open_unix_connection(str(folder / "calls"))
        writer.write(data)
        with contextlib.suppress(OSError):
            writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10.0) == b""
        writer.close()


def test_only_folders_of_killed_actors_are_removed(short_folder):
    kept, lock = make_folder()
    left, other = make_folder()
    os.close(other)
    (left / "call").write_text("x")
    (short_folder / "hvd-elastic-unlocked").mkdir()
    sweep()
    assert {each.name for each in short_folder.iterdir()} == {kept.name, "hvd-elastic-unlocked"}
    os.close(lock)


def test_actor_without_a_configuration_exits_through_its_engine():
    """The actor runs in pytest's process, which a forgotten actor must not end."""
    engine = Engine()
    AgentActor(engine=engine, unused_s=0.0)
    assert engine.left.wait(10.0)


async def test_actor_without_a_configuration_exits():
    program = (
        "from elastic.driver.ray.node.agent_actor import AgentActor\n"
        "import time; AgentActor(unused_s=0.05); time.sleep(60)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await asyncio.wait_for(process.wait(), 30.0) == 0
