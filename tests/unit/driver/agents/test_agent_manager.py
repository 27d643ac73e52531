"""Execution of the decisions of an `AgentPool`, over real sockets on loopback with fake starters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar
from unittest.mock import create_autospec

from elastic.driver.agents import agent_manager as fleet_module
from elastic.driver.agents import agent_pool
from elastic.driver.agents import driver_connection as uplink_module
from elastic.driver.agents.agent_manager import AGENTS, AgentManager
from elastic.driver.agents.driver_connection import Uplink
from elastic.driver.agents.host_agent import HostAgent
from elastic.driver.agents.messages import (
    AgentId,
    Attach,
    Beat,
    Detach,
    Heard,
    Kill,
    Printed,
    Registered,
    Reject,
    Seen,
    Start,
    Tell,
    TellPlaces,
)
from elastic.driver.agents.pool_events import DisconnectAgent
from elastic.driver.events import ExitCause, HostLost, HostReported, WorkerExited
from elastic.driver.launch.starter import Bootstrap, StartFailed
from elastic.driver.launch.subprocess_starter import ChildStarter
from elastic.driver.network import control_connection
from elastic.driver.network.control_server import ControlServer
from elastic.protocol import messages as protocol
from elastic.protocol.messages import Address, Place, Worker
from harness.golden import recorded

SECRET = b"s" * 32
A, B = Worker("here", 0), Worker("there", 0)
STORE = Address("10.0.0.1", 29500)
PLACES = [Place(0, 3, 0, 2, 0, 2), Place(1, 3, 1, 2, 0, 1), Place(2, 3, 0, 1, 1, 2)]
DEADLINE_S = 60.0


class Screen:
    """Destination of output."""

    def __init__(self, told: Callable[..., None]) -> None:
        self.told = told

    def feed(self, worker, stream, data) -> None:
        self.told(worker, stream, data)

    def finish(self, worker, stream) -> None:
        self.told(worker, stream, "end")

    def tail(self, worker) -> str:
        return ""

    def cause(self, worker) -> ExitCause:
        return ExitCause.UNKNOWN

    def training_thread(self, worker) -> None: ...

    def drop(self, worker) -> None: ...


class Agent:
    """The agent of one host, as seen by the pool. ``heard`` contains the messages it received."""

    alive: ClassVar[list[Agent]] = []

    def __init__(self, driver: Driver, host: str, incarnation: int = 1, secret=SECRET) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.identity = AgentId(host, incarnation)

        async def find():
            return [(driver.address.host, driver.address.port)]

        self.uplink = Uplink(
            self.identity,
            secret,
            find,
            opened=lambda: None,
            received=self.heard.put_nowait,
            closed=lambda reason: self.heard.put_nowait(("closed", reason)),
            missing=lambda reason: self.heard.put_nowait(("missing", reason)),
            lease_s=2.0,
        )
        self.run = asyncio.ensure_future(self.uplink.run())
        self.alive.append(self)

    async def next(self) -> Any:
        """Return the next message except heartbeats."""
        while True:
            heard = await asyncio.wait_for(self.heard.get(), DEADLINE_S)
            if heard != Beat():
                return heard

    async def register(self, *running: Worker, exits=(), ends=False) -> Agent:
        assert isinstance(await self.next(), Attach)
        addresses = ["127.0.0.1/8"]
        self.say(Registered(2, "127.0.0.1", addresses, [*running], [*exits], "one", ends=ends))
        return self

    def say(self, *messages) -> None:
        for message in messages:
            assert self.uplink.send(message)

    async def die(self) -> None:
        self.run.cancel()
        await asyncio.gather(self.run, return_exceptions=True)


class Driver:
    """Records the events that the event loop would receive from the agents."""

    def __init__(
        self, starter=None, adopted=(), deposed=lambda: False, outlives: bool = False
    ) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.log: list[str] = []
        self.printed: asyncio.Queue[Any] = asyncio.Queue()
        server = ControlServer(
            secret=SECRET, log=lambda level, text: self.log.append(text), callers=AGENTS
        )
        self.fleet = AgentManager(
            server,
            attach=Attach("one", 1, 2.0, 60.0),
            sink=Screen(lambda *printed: self.printed.put_nowait(printed)),
            log=lambda level, text: self.log.append(text),
            starter=starter,
            reach=lambda host: Bootstrap(
                "j", host, SECRET.hex(), ["127.0.0.1:1"], outlives=outlives
            ),
            folder="/",
            adopted=adopted,
            deposed=deposed,
        )

    async def open(self) -> Driver:
        put = self.events.put_nowait
        self.address = await self.fleet.workers.open(
            "127.0.0.1",
            received=lambda worker, message: put((worker, message)),
            gone=lambda worker, silent: put((worker, "gone")),
            expected=lambda worker: True,
        )
        await self.fleet.open(put, put)
        return self

    async def next(self) -> Any:
        return await asyncio.wait_for(self.events.get(), DEADLINE_S)

    def start(self, worker: Worker) -> None:
        self.fleet.start(worker, ["train"], {"X": "1"})


def conversation(**given):
    """Run the test in an event loop with a driver that listens."""

    def decorate(test):
        async def run(monkeypatch) -> None:
            monkeypatch.setattr(fleet_module, "CLOSE_S", 0.05)
            monkeypatch.setattr(uplink_module, "RETRY_S", (0.001, 0.01))
            driver = await Driver(**given).open()
            try:
                await asyncio.wait_for(test(driver, monkeypatch), 2 * DEADLINE_S)
            finally:
                for agent in Agent.alive:
                    await agent.die()
                Agent.alive.clear()
                await driver.fleet.close()
                await driver.fleet.workers.close()

        run.__name__ = test.__name__
        return run

    return decorate


@conversation()
async def test_orders_wait_for_the_agent_and_messages_of_its_workers_arrive(driver, patch):
    driver.start(A)
    agent = await Agent(driver, "here").register()
    assert await driver.next() == HostReported("here", [], []), "it has not been told yet"
    assert await agent.next() == Start(A, ["train"], {"X": "1"}, "/")
    agent.say(Heard(A, protocol.Hello(A, 7)), Printed(A, "stdout", b"x"), Printed(A, "stdout", b""))
    assert await driver.next() == (A, protocol.Hello(A, 7))
    assert await driver.printed.get() == (A, "stdout", b"x")
    assert await driver.printed.get() == (A, "stdout", "end")
    driver.fleet.workers.broadcast([A, B], protocol.Finish(1))
    assert await agent.next() == Tell([A], protocol.Finish(1))
    world = protocol.World(2, PLACES[0], STORE, 0, None, "all are ready")
    members = [(B, PLACES[2]), (A, PLACES[0]), (Worker("here", 1), PLACES[1])]
    driver.fleet.workers.send_world(world, members)
    assert await agent.next() == TellPlaces([members[1], members[2]], world)
    driver.fleet.kill(A)
    assert await agent.next() == Kill(A)
    agent.say(Seen(WorkerExited(A, -9)), Seen(WorkerExited(A, -9)))
    assert await driver.next() == WorkerExited(A, -9)
    agent.say(Heard(A, protocol.Returned(1)))
    assert await driver.next() == (A, protocol.Returned(1)), "and the exit was told once"


@conversation()
async def test_returning_agent_reports_the_fate_of_its_workers(driver, patch):
    driver.start(A)
    driver.start(A2 := Worker("here", 1))
    agent = await Agent(driver, "here").register()
    await driver.next()
    assert (await agent.next(), await agent.next()) == (
        Start(A, ["train"], {"X": "1"}, "/"),
        Start(A2, ["train"], {"X": "1"}, "/"),
    )
    agent.uplink.drop("a wire was pulled")
    assert (await agent.next())[0] == "closed"
    await agent.register(A, exits=[WorkerExited(A2, 0), WorkerExited(B, 3)])
    assert await driver.next() == WorkerExited(A2, 0), "and nothing of a worker that it never had"
    assert await driver.next() == HostReported("here", [A], [A])


@conversation()
async def test_agent_that_does_not_return_is_a_lost_host(driver, patch):
    patch.setattr(agent_pool, "RETURN_S", 0.02)
    driver.start(A)
    agent = await Agent(driver, "here").register()
    await driver.next()
    await agent.die()
    lost = await driver.next()
    assert isinstance(lost, HostLost) and lost.host == "here"
    assert driver.fleet.alive() == {A}, "nobody knows that it is dead"
    await Agent(driver, "here", incarnation=2).register()
    assert await driver.next() == HostReported("here", [], [A])
    recorded("log", driver.log[-1])


@conversation()
async def test_host_has_one_agent_at_a_time(driver, patch):
    patch.setattr(agent_pool, "RETURN_S", 0.02)
    first = await Agent(driver, "here", incarnation=5).register()
    await driver.next()
    earlier = Agent(driver, "here", incarnation=4)
    assert await earlier.next() == Reject("another agent already serves this host")
    await earlier.die()
    later = Agent(driver, "here", incarnation=6)
    assert (await later.next())[0] == "closed", "it has to wait"
    await first.die()
    while not isinstance(await later.next(), Attach):
        pass
    later.say(Registered(2, "127.0.0.1", ["127.0.0.1/8"], [], [], "one"))
    assert await driver.next() == HostReported("here", [], [])


@conversation()
async def test_agent_given_up_is_disconnected(driver, patch):
    driver.start(A)
    agent = await Agent(driver, "here").register()
    await driver.next()
    with patch.context() as decided:
        decided.setattr(
            driver.fleet.pool, "handle", lambda event, now: [DisconnectAgent(agent.identity)]
        )
        driver.fleet.listed({})
    while (await agent.next()) != ("closed", "the driver closed the connection"):
        pass


@conversation()
async def test_peer_without_the_secret_is_rejected(driver, patch):
    stranger = Agent(driver, "here", secret=b"?" * 32)
    kind, reason = await stranger.next()
    assert kind == "missing"
    recorded("messages", reason)
    recorded("log", driver.log[-1])
    assert driver.events.empty()


@conversation()
async def test_agent_reports_only_its_own_workers(driver, patch):
    agent = await Agent(driver, "here").register()
    await driver.next()
    for lie in (
        Heard(B, protocol.Returned(1)),
        Seen(WorkerExited(B, 0)),
        Printed(B, "stdout", b"x"),
    ):
        agent.say(lie)
        assert (await agent.next())[0] == "closed"
        await agent.register()
        assert await driver.next() == HostReported("here", [], [])
    recorded("log", driver.log)
    assert driver.printed.empty()


class Broken:
    """Starts nothing."""

    async def start(self, bootstrap) -> None:
        raise StartFailed(f"no way to {bootstrap.host}")

    async def close(self) -> None: ...


@conversation(starter=Broken())
async def test_workers_of_an_agent_that_cannot_start_exit_with_the_reason(driver, patch):
    driver.start(A)
    exited = await driver.next()
    assert (exited.worker, exited.code) == (A, 126)
    recorded("messages", exited.reason)
    assert not driver.fleet.alive()


@conversation(adopted=[A, B])
async def test_workers_of_the_previous_driver_are_found_again_or_given_up(driver, patch):
    patch.setattr(agent_pool, "CALL_S", 0.05)
    await driver.fleet.open(driver.events.put_nowait, driver.events.put_nowait)
    await Agent(driver, "here").register(A)
    assert await driver.next() == HostReported("here", [A], [A])
    lost = await driver.next()
    assert isinstance(lost, HostLost) and lost.host == "there"


@conversation()
async def test_every_agent_is_dismissed_at_the_end(driver, patch):
    agent = await Agent(driver, "here").register()
    await driver.next()
    await driver.fleet.close()
    assert await agent.next() == Detach("the job has ended")


@conversation()
async def test_agent_that_ends_with_the_job_disconnects_before_the_driver(driver, patch):
    patch.setattr(fleet_module, "CLOSE_S", DEADLINE_S)
    agent = await Agent(driver, "here").register(ends=True)
    await driver.next()
    closing = asyncio.ensure_future(driver.fleet.close())
    assert await agent.next() == Detach("the job has ended")
    agent.say(Printed(A, "stdout", b"my last words"))
    assert await driver.printed.get() == (A, "stdout", b"my last words")
    assert not closing.done()
    await agent.die()
    await closing


starter = create_autospec(ChildStarter, instance=True)


@conversation(starter=starter, outlives=True)
async def test_just_started_agent_is_awaited_and_dismissed(driver, patch):
    patch.setattr(fleet_module, "CLOSE_S", DEADLINE_S)
    patch.setattr(agent_pool, "CALL_S", DEADLINE_S)
    driver.start(A)
    while not driver.fleet.pool.awaits_agents():
        await asyncio.sleep(0)
    driver.fleet.kill(A)
    closing = asyncio.ensure_future(driver.fleet.close())
    agent = await Agent(driver, "here").register(ends=True)
    assert await agent.next() == Detach("the job has ended")
    starter.close.assert_not_awaited()
    await agent.die()
    await closing
    starter.close.assert_awaited_once()


@conversation()
async def test_agent_of_a_driver_disconnects_and_exits_when_the_driver_closes(driver, patch):
    patch.setattr(fleet_module, "CLOSE_S", DEADLINE_S)

    async def find():
        return [(driver.address.host, driver.address.port)]

    bootstrap = Bootstrap("j", "here", SECRET.hex(), [str(driver.address)])
    agent = HostAgent(bootstrap, find, slots=1, bound=True, log=lambda level, text: None)
    running = asyncio.ensure_future(agent.run())
    assert await driver.next() == HostReported("here", [], [])
    await driver.fleet.close()
    assert driver.fleet.pool.agent_of("here") is None, "it has hung up"
    assert await running == 0


replaced: list[bool] = []


@conversation(deposed=lambda: bool(replaced))
async def test_replaced_driver_sends_no_message_to_agents(driver, patch):
    patch.setattr(fleet_module, "CLOSE_S", DEADLINE_S)  # it waits for no agent either
    driver.start(A)
    agent = await Agent(driver, "here").register()
    await agent.next()
    replaced.append(True)
    driver.fleet.kill(A)
    await driver.fleet.close()
    await driver.fleet.workers.close()
    assert (await agent.next())[0] == "closed"


class Slow:
    """Takes long to start an agent, as a login may."""

    def __init__(self) -> None:
        self.starts: list[str] = []
        self.go = asyncio.Event()

    async def start(self, bootstrap) -> None:
        self.starts.append(bootstrap.host)
        await self.go.wait()

    async def close(self) -> None: ...


async def test_slow_start_is_only_given_up_by_the_starter(monkeypatch):
    monkeypatch.setattr(agent_pool, "ARRIVE_S", 0.01)
    slow = Slow()
    driver = await Driver(starter=slow).open()
    driver.start(A)
    driver.start(Worker("here", 1))
    await asyncio.sleep(0)
    assert slow.starts == ["here"], "one for the whole host"
    slow.go.set()
    exited = await driver.next()
    recorded("messages", exited.reason)
    await driver.fleet.close()
    await driver.fleet.workers.close()


@conversation()
async def test_large_return_values_of_all_workers_arrive_at_once(driver, patch):
    """More than may otherwise be queued for a driver that does not read, before its turn."""
    patch.setattr(control_connection, "BACKLOG_LIMIT", 1 << 20)
    workers = [Worker("here", slot) for slot in range(3)]
    for worker in workers:
        driver.start(worker)
    agent = await Agent(driver, "here").register(*workers)
    await driver.next()
    results = [Heard(worker, protocol.SendResult(b"x" * (8 << 20))) for worker in workers]
    agent.say(*results, Seen(WorkerExited(workers[0], 0)))
    assert [await driver.next() for _ in results] == [(r.worker, r.message) for r in results]
    assert await driver.next() == WorkerExited(workers[0], 0)
