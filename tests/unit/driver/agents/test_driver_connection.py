"""An agent's connection to a real server, in one event loop, with and without TLS."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from certificates import OPENSSL, new_authority
from elastic.driver.agents import driver_connection as uplink_module
from elastic.driver.agents.agent_manager import AGENTS
from elastic.driver.agents.driver_connection import Uplink
from elastic.driver.agents.messages import AgentId, Beat, Here
from elastic.driver.network import control_connection
from elastic.driver.network.control_server import ControlServer
from elastic.protocol.tls import context

SECRET = b"s" * 32
AGENT = AgentId("here", 1)
DEADLINE_S = 60.0
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs openssl")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return new_authority(tmp_path_factory.mktemp("tls")).sign("host")


@pytest.fixture(params=[False, pytest.param(True, marks=needs_openssl)], ids=["clear", "tls"])
def paths(request):
    return request.getfixturevalue("files") if request.param else None


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(uplink_module, "RETRY_S", (0.001, 0.01))


class Both:
    """The uplink and its server; ``seen`` has what either has reported."""

    def __init__(self, server_tls, agent_tls) -> None:
        self.seen: asyncio.Queue[Any] = asyncio.Queue()
        self.server: ControlServer[AgentId] = ControlServer(
            secret=SECRET,
            log=lambda level, text: None,
            callers=AGENTS,
            tls=server_tls and context(*server_tls, server=True),
        )
        self._agent_tls = agent_tls and context(*agent_tls, server=False)

    async def __aenter__(self) -> Both:
        put = self.seen.put_nowait
        address = await self.server.open(
            "127.0.0.1",
            received=lambda agent, message: put((agent, message)),
            gone=lambda agent, silent: put("gone"),
            expected=lambda agent: True,
        )

        async def find():
            return [(address.host, address.port)]

        self.uplink = Uplink(
            AGENT,
            SECRET,
            find,
            opened=lambda: put("opened"),
            received=self.heard,
            closed=lambda reason: put("closed"),
            missing=lambda reason: put("missing"),
            lease_s=2.0,
            tls=self._agent_tls,
        )
        self.running = asyncio.ensure_future(self.uplink.run())
        return self

    async def __aexit__(self, *_) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.server.close()

    def heard(self, message) -> None:
        self.seen.put_nowait(message)

    async def next(self):
        return await asyncio.wait_for(self.seen.get(), DEADLINE_S)


async def test_messages_are_sent_both_ways_and_a_lost_connection_is_replaced(paths):
    async with Both(paths, paths) as both:
        for _ in range(2):
            assert await both.next() == "opened"
            assert both.uplink.open and both.uplink.bound == "127.0.0.1"
            assert both.uplink.send(Here())
            assert await both.next() == (AGENT, Here())
            assert both.server.send(AGENT, Beat())
            assert await both.next() == Beat()
            both.server.disconnect(AGENT)
            assert [await both.next(), await both.next()] == ["gone", "closed"]
            assert not both.uplink.send(Here())


async def test_dropped_connection_delivers_no_further_message(paths):
    async with Both(paths, paths) as both:
        assert await both.next() == "opened"
        both.uplink.drop("another driver leads")
        assert not both.uplink.send(Here())
        both.server.send(AGENT, Beat())
        assert sorted([await both.next(), await both.next()]) == ["closed", "gone"]


@needs_openssl
@pytest.mark.parametrize("tls_at", ["driver", "agent"])
async def test_tls_at_one_end_only_opens_no_connection(files, monkeypatch, tls_at):
    monkeypatch.setattr(control_connection, "HANDSHAKE_S", 0.05)
    sides = (files, None) if tls_at == "driver" else (None, files)
    async with Both(*sides) as both:
        assert await both.next() == "missing"
        assert not both.uplink.open


async def test_error_while_a_message_is_handled_ends_the_uplink():
    class Faulty(Both):
        def heard(self, message) -> None:
            raise ZeroDivisionError

    async with Faulty(None, None) as both:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        assert await both.next() == "opened"
        both.server.send(AGENT, Beat())
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.shield(both.running), DEADLINE_S)
