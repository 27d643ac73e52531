"""Serves the live page of a job to browsers, from the driver's event loop, which it never holds up. Decides nothing.

    GET /         the page: one file, the same for every job
    GET /events   server-sent events: the whole state first, then each patch, as long as the viewer reads

A patch is encoded once for all viewers, in the loop's next turn, or FLUSH_S after the one before. Who does not read is
dropped when BACKLOG bytes wait for them, and strangers in any number cost no more than VISITORS connections of VISIT_S
seconds. What may be asked, and by whom, `http_requests` says.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from elastic.driver.monitoring.dashboard.http_requests import HEAD_LIMIT, Guard, PageRefusal
from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.errors import Invalid

VIEWERS = 64
VISITORS = 128  # connections that have not asked for events
VISIT_S = 5.0
FLUSH_S = 0.05  # between two patches, at least: what changes together travels together
IDLE_S = 1.0  # between two patches while nothing happens: times go on, and a lost viewer shows
# Bytes, and what the kernel keeps; the whole state of 8,000 workers is 2 MB.
BACKLOG = 4 * 1024 * 1024
PAGE = Path(__file__).with_name("page.html")
CHARTS = Path(__file__).parents[1] / "charts"  # .js and .css, which stand in the page

_encode = msgspec.json.Encoder().encode


class PageServer:
    """Of one job. All methods belong to the event loop's thread.

    ``listening`` is `bound` and closed with this. ``clock`` gives seconds since 1970. ``guard``: whom it answers.
    """

    def __init__(
        self,
        model: PageModel,
        listening: socket.socket,
        guard: Guard,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model = model
        self.guard = guard
        self._clock = clock
        self._page = _page()
        self._listening = listening
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._visitors: dict[PageVisit, None] = {}  # the oldest first
        self._viewers: dict[PageVisit, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._flushed_at = 0.0

    async def open(self) -> None:
        """Serve from here on."""
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(lambda: PageVisit(self), sock=self._listening)
        self._wake(IDLE_S)

    def changed(self) -> None:
        """The model may have changed."""
        if self._loop is not None and self._viewers and self.model.changed:
            self._wake(max(0.0, self._flushed_at + FLUSH_S - self._loop.time()))

    def close(self) -> None:
        """Viewers get what is left."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._server is None:
            self._listening.close()
            return
        self._flush()
        self._server.close()
        for visit in [*self._visitors, *self._viewers]:
            visit.end()

    # ---- visits ----------------------------------------------------------------------------------------------------

    def came(self, visit: PageVisit) -> None:
        if len(self._visitors) >= VISITORS:
            next(iter(self._visitors)).abort()  # it has had the longest to say what it wants
        self._visitors[visit] = None

    def gone(self, visit: PageVisit) -> None:
        self._visitors.pop(visit, None)
        self._viewers.pop(visit, None)

    def asked(self, visit: PageVisit, head: bytes) -> None:
        answer = self.guard.answer(head)
        if isinstance(answer, PageRefusal):
            visit.answer(answer.status, "text/plain; charset=utf-8", f"{answer.why}\n".encode())
        elif answer == "page":
            body, policy = self._page
            visit.answer("200 OK", "text/html; charset=utf-8", body, policy)
        elif len(self._viewers) >= VIEWERS:
            why = f"this page already has {VIEWERS} viewers; close one of them\n"
            visit.answer("503 Service Unavailable", "text/plain; charset=utf-8", why.encode())
        else:
            self._flush()
            self._visitors.pop(visit, None)
            self._viewers[visit] = None
            visit.begin_events()
            visit.send(_event("full", self.model.full(self._clock())))

    # ---- patches ---------------------------------------------------------------------------------------------------

    def _wake(self, in_s: float) -> None:
        assert self._loop is not None
        at = self._loop.time() + in_s
        if self._alarm is not None:
            if self._due <= at:
                return
            self._alarm.cancel()
        self._due = at
        self._alarm = self._loop.call_at(at, self._flush_again)

    def _flush_again(self) -> None:
        self._alarm = None
        self._flush()
        self._wake(IDLE_S)

    def _flush(self) -> None:
        """To all viewers, as one piece of bytes. Without any the model keeps what it can."""
        assert self._loop is not None
        self._flushed_at = self._loop.time()
        if not self._viewers:
            self.model.patch(self._clock())
            return
        data = _event("patch", self.model.patch(self._clock()))
        for visit in [*self._viewers]:
            visit.send(data)


class PageVisit(asyncio.Protocol):
    """One connection, from accept to close."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._head = bytearray()
        self._over = False
        self._asked = False
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._deadline = asyncio.get_running_loop().call_later(VISIT_S, self.abort)
        self._server.came(self)

    def data_received(self, data: bytes) -> None:
        if self._asked or self._over:
            return
        self._head += data
        head, empty, _ = self._head.partition(b"\r\n\r\n")
        if empty:
            self._asked = True
            self._server.asked(self, bytes(head))
        elif len(self._head) > HEAD_LIMIT:
            self.abort()

    def answer(
        self, status: str, kind: str, body: bytes, policy: str = "default-src 'none'"
    ) -> None:
        """All of it, and the end."""
        self._transport.write(_head(status, kind, policy, f"Content-Length: {len(body)}") + body)
        self.end()

    def begin_events(self) -> None:
        """From here on it is sent whatever changes, until it goes."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._transport.set_write_buffer_limits(high=BACKLOG)
        self._transport.write(_head("200 OK", "text/event-stream", "default-src 'none'"))

    def send(self, data: bytes) -> None:
        """Who has not read what was sent before is dropped."""
        if self._over or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > BACKLOG:
            self.abort()
        else:
            self._transport.write(data)

    def end(self) -> None:
        """After what was written."""
        if self._deadline is None or self._deadline.cancelled():
            # A viewer, or the last word of a job: it gets as long as a visit to read it.
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(VISIT_S, self.abort)
        with contextlib.suppress(OSError):
            self._transport.close()

    def abort(self) -> None:
        """At once."""
        with contextlib.suppress(OSError):
            self._transport.abort()
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._over:
            return
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._server.gone(self)


def bound(address: str, port: int) -> socket.socket:
    """Has its port; nobody is answered before `PageServer.open`. Raises Invalid."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, number)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(VISITORS)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Invalid(
            f"the page can't be served on {address} port {port}: {why}: pass another --dashboard [ADDRESS]:PORT"
        ) from None
    return listening


def _page() -> tuple[bytes, str]:
    """The page, and what a browser may do with it: run this script, ask this server."""
    body = PAGE.read_bytes()
    for mark, kind in ((b"// charts.js\n", ".js"), (b"/* charts.css */\n", ".css")):
        body = body.replace(mark, CHARTS.with_suffix(kind).read_bytes())
    _, _, rest = body.partition(b"<script>")
    script, _, _ = rest.partition(b"</script>")
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return body, policy


def _head(status: str, kind: str, policy: str, *more: str) -> bytes:
    lines: Sequence[str] = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        "Connection: close",
        "Cache-Control: no-store",
        f"Content-Security-Policy: {policy}",
        "X-Content-Type-Options: nosniff",
        "X-Frame-Options: DENY",
        "Referrer-Policy: no-referrer",
        "Cross-Origin-Resource-Policy: same-origin",
        *more,
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _event(name: str, patch: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(patch) + b"\n\n"
