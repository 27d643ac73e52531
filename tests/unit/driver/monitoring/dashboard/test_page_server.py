"""The live page over real sockets: access, slow viewers, and an unblocked event loop."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from elastic.driver.events import AnswerRequest, ScaleRequested
from elastic.driver.monitoring.dashboard import page_server
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.dashboard.page_server import PageServer, bound
from elastic.driver.monitoring.dashboard.page_state import applied
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.page_access import RequestGuard
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.reasons import as_sentence
from elastic.errors import Invalid
from harness.golden import recorded

TOKEN = "f" * 32
STRANGE = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n"
ASK = STRANGE + f"Authorization: Bearer {TOKEN}\r\n".encode()


class Served:
    """A page on loopback."""

    def __init__(self, token: str = TOKEN) -> None:
        self.model = PageModel(
            TimeSpent(JobView()), name="bert", command=["python", "train.py"], least=2, most=4
        )
        listening = bound("127.0.0.1", 0)
        self.port: int = listening.getsockname()[1]
        self.writers: list[asyncio.StreamWriter] = []  # of the connections that stay open
        self.server = PageServer(self.model, listening, RequestGuard(token), clock=lambda: 100.0)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)

    async def get(self, head: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(head + b"\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    def say(self, text: str) -> None:
        self.model.line("info", "", text, 100.0)
        self.server.changed()


@contextlib.asynccontextmanager
async def served(token: str = TOKEN) -> AsyncIterator[Served]:
    found = Served(token)
    await found.server.open()
    try:
        yield found
    finally:
        found.server.close()
        for writer in found.writers:
            writer.close()
        await asyncio.sleep(0)  # they are handled in the next turn of the loop


async def event(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
    text = (await reader.readuntil(b"\n\n")).decode()
    name, _, data = text.partition("\ndata: ")
    return name.removeprefix("event: "), json.loads(data)


async def viewer(page: Served, more: bytes = b"") -> asyncio.StreamReader:
    reader, writer = await page.connect()
    writer.write(ASK + more + b"\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    page.writers.append(writer)
    return reader


async def test_viewer_receives_the_whole_state_and_then_changes():
    async with served() as page:
        page.say("before")
        reader = await viewer(page)
        name, state = await event(reader)
        assert name == "full" and state["add"]["log"] == [[100.0, "info", "", "before"]]
        page.say("after <script>alert(1)</script>\n\nevent: full")
        name, patch = await event(reader)
        assert name == "patch"
        state = applied(applied(None, state), patch)
        assert state["add"]["log"] == applied(None, page.model.full(100.0))["add"]["log"]
        late = await viewer(page)
        assert (await event(late))[1]["add"]["log"] == state["add"]["log"]


async def test_viewer_without_the_token_receives_no_data():
    async with served() as page:
        page.say("a secret of this job")
        for more in (
            b"",
            b"Authorization: Bearer 0\r\n",
            b"Authorization: Bearer " + TOKEN.encode() + b"\r\nOrigin: http://evil\r\n",
        ):
            answer = await page.get(STRANGE + more)
            assert answer.startswith(b"HTTP/1.1 403") and b"secret" not in answer
        shell = await page.get(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert shell.startswith(b"HTTP/1.1 200") and b"secret" not in shell
        reader = await viewer(page)
        recorded("page", (await event(reader))[1]["add"]["log"][0][3])


@pytest.mark.slow
async def test_thousand_connections_leave_room_for_authorized_viewers():
    async with served() as page:
        page.writers += [(await page.connect())[1] for _ in range(1000)]
        reader = await viewer(page)
        await event(reader)
        page.say("still told")
        recorded("page", (await event(reader))[1]["add"]["log"][-1][3])
        for _ in range(page_server.VIEWERS - 1):
            await viewer(page)
        assert (await page.get(ASK)).startswith(b"HTTP/1.1 503")


async def test_viewer_that_does_not_read_is_disconnected_without_blocking(monkeypatch):
    monkeypatch.setattr(page_server, "BACKLOG", 64 * 1024)
    monkeypatch.setattr(page_server, "FLUSH_S", 0.0)
    async with served() as page:
        slow = socket.create_connection(("127.0.0.1", page.port))
        slow.sendall(ASK + b"\r\n")
        reader = await viewer(page)
        await event(reader)
        page.model.state.values["job"]["command"] = "x" * 1_000_000
        for number in range(40):
            request = AnswerRequest(1, True, as_sentence("done"))
            page.model.view.note(ScaleRequested(1, number), [request], 100.0)
            page.server.changed()
            assert (await event(reader))[1]["set"]["job"]["most"] == number
        slow.settimeout(5.0)
        with contextlib.closing(slow), contextlib.suppress(ConnectionError):
            while slow.recv(1 << 20):
                pass


async def test_endless_head_is_rejected():
    async with served() as page:
        reader, writer = await page.connect()
        writer.write(b"GET /" + b"x" * 20_000)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_policy_allows_only_the_pages_own_script_and_server():
    async with served() as page:
        answer = await page.get(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        [script] = re.findall(rb"<script>(.*)</script>", body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in head.decode()
        assert b"default-src 'none'" in head and b"connect-src 'self'" in head
        assert not re.findall(rb"(?:src|href)\s*=\s*[\"']?(?:http|//)", body)
        assert b"innerHTML" not in body and b"insertAdjacentHTML" not in body
        assert b"document.write" not in body and b"outerHTML" not in body


def test_port_in_use_is_an_error():
    page = Served()
    with pytest.raises(Invalid, match="--dashboard"):
        bound("127.0.0.1", page.port)
    page.server.close()
