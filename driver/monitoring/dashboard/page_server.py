"""Non-blocking HTTP server of a job's live page. Runs in the driver's event loop and makes no decisions.

    GET /         the page: one file, the same for every job
    GET /events   server-sent events: the whole state first, then each patch, until the viewer disconnects

A patch is encoded once for all viewers, in the next iteration of the event loop, but at least FLUSH_S after the
previous patch. A viewer with more than BACKLOG pending bytes is disconnected. Unauthenticated clients may use at most
VISITORS connections, for VISIT_S seconds each. `page_access` decides which requests are answered.
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
from typing import Any, cast

import msgspec

from elastic.driver.monitoring.dashboard.page_model import PageModel
from elastic.driver.monitoring.page_access import HEAD_LIMIT, PageRefusal, RequestGuard
from elastic.errors import Invalid

VIEWERS = 64
VISITORS = 128  # maximum number of connections that are not event streams
VISIT_S = 5.0
# minimum interval between two patches, in seconds, so that simultaneous changes are sent together
FLUSH_S = 0.05
# interval between patches if nothing changes, in seconds; they update the displayed times and detect lost viewers
IDLE_S = 1.0
# Maximum pending bytes per viewer, excluding the kernel's buffer. The whole state of a job with 8,000 workers takes 2
# MB.
BACKLOG = 4 * 1024 * 1024
PAGE = Path(__file__).with_name("page.html")
# folder of the .js and .css files embedded in the page
CHARTS = Path(__file__).parents[1] / "charts"

_encode = msgspec.json.Encoder().encode


class PageServer:
    """Server of one job's live page. All methods must be called in the event loop's thread.

    Args:
        model: the state to serve.
        listening: listening socket from `bound`. The server closes it.
        guard: object that decides which requests are answered.
        clock: function that returns the current time in seconds since 1970.
    """

    def __init__(
        self,
        model: PageModel,
        listening: socket.socket,
        guard: RequestGuard,
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
        # open connections that are not event streams, oldest first
        self._visitors: dict[PageVisit, None] = {}
        self._viewers: dict[PageVisit, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._flushed_at = 0.0

    async def open(self) -> None:
        """Start accepting connections."""
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(lambda: PageVisit(self), sock=self._listening)
        self._wake(IDLE_S)

    def changed(self) -> None:
        """Schedule sending a patch to the viewers. Must be called when the model may have changed."""
        if self._loop is not None and self._viewers and self.model.changed:
            self._wake(max(0.0, self._flushed_at + FLUSH_S - self._loop.time()))

    def close(self) -> None:
        """Send the remaining changes to the viewers, and close all connections."""
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
            # Close the oldest connection that is not an event stream.
            next(iter(self._visitors)).abort()
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
        assert self._loop is not None
        self._flushed_at = self._loop.time()
        if not self._viewers:
            self.model.patch(self._clock())
            return
        data = _event("patch", self.model.patch(self._clock()))
        for visit in [*self._viewers]:
            visit.send(data)


class PageVisit(asyncio.Protocol):
    """HTTP connection of one client, from accept to close."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._head = bytearray()
        self._over = False
        self._asked = False
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio.Transport, so the type is cast instead of checked.
        self._transport = cast(asyncio.Transport, transport)
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
        """Send a complete HTTP response, and close the connection."""
        self._transport.write(_head(status, kind, policy, f"Content-Length: {len(body)}") + body)
        self.end()

    def begin_events(self) -> None:
        """Begin a response that streams events, which has no time limit."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._transport.set_write_buffer_limits(high=BACKLOG)
        self._transport.write(_head("200 OK", "text/event-stream", "default-src 'none'"))

    def send(self, data: bytes) -> None:
        """Send data to the viewer, or disconnect it if more than BACKLOG bytes are pending."""
        if self._over or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > BACKLOG:
            self.abort()
        else:
            self._transport.write(data)

    def end(self) -> None:
        """Close the connection after all pending data has been sent."""
        if self._deadline is None or self._deadline.cancelled():
            # The client has VISIT_S seconds to read the remaining data. Otherwise it could delay the end of the job.
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(VISIT_S, self.abort)
        with contextlib.suppress(OSError):
            self._transport.close()

    def abort(self) -> None:
        """Close the connection without sending pending data."""
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
    """Return a socket that listens at the address. Connections are accepted once `PageServer.open` is called.

    Args:
        address: host name or IP address. Empty means all interfaces.
        port: port number. 0 lets the system choose one.

    Raises:
        Invalid: the address cannot be bound.
    """
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
            f"the dashboard can't be served on {address} port {port}: {why}. Pass another --dashboard"
            " [ADDRESS]:PORT"
        ) from None
    return listening


def _page() -> tuple[bytes, str]:
    """Return the page's HTML and its Content-Security-Policy.

    The policy allows only the page's own script and connections to this server.
    """
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
