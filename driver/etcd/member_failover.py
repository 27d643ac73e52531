"""Failover between the members of etcd, with log lines when no member responds. Makes no decisions.

`outage_detection` decides whether etcd is available. During an outage, requests without a deadline wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from elastic.driver.etcd.connection import (
    NOBODY_THERE,
    AccessDenied,
    EtcdConnection,
    Rejected,
    Unavailable,
    load,
)
from elastic.driver.etcd.outage_detection import Availability
from elastic.driver.network.credentials import EtcdAccess
from elastic.driver.reasons import Reason
from elastic.errors import Invalid

Log = Callable[[str, str], None]
Method = Callable[[EtcdConnection], Callable[..., Awaitable[Any]]]

CALL_S = 2.0  # timeout for one request to one member, in seconds
PULSE_S = 2.0  # seconds without a response after which a test request is sent
GRACE_S = 3.0  # seconds without a response after which etcd is reported as unavailable
GAP_S = 2.5  # seconds without a response after which leases may have expired for lack of renewal
OPEN_S = 5.0


class Endpoints:
    """Client side of the members of etcd, with at most one connection at a time.

    Args:
        root: prefix of all keys to use.
    """

    def __init__(
        self, access: EtcdAccess, log: Log, *, root: bytes, end: bytes, grace_s: float
    ) -> None:
        if not access.endpoints:
            raise Invalid("no etcd endpoint was given: pass HOST:PORT[,HOST:PORT...]")
        for endpoint in access.endpoints:
            name, _, port = endpoint.rpartition(":")
            if not name or "/" in name or not port.isdecimal() or not 0 < int(port) < 65536:
                raise Invalid(f"{endpoint!r} is not an etcd endpoint: pass HOST:PORT, as in a:2379")
        self.rpc = load()
        self.closed = False
        self._access = access
        self._log = log
        self._root = root
        self._end = end
        self._name = ", ".join(access.endpoints)
        self._connection: EtcdConnection | None = None
        self._connecting = asyncio.Lock()
        self._next = 0  # index of the endpoint to try next
        self._failures = 0  # number of failures since the last response
        # callback for when etcd becomes unavailable or available again
        self.noticed: Callable[[Reason], None] = lambda reason: None
        self._contact = Availability(self._name, self._now(), grace_s=grace_s, gap_s=GAP_S)
        self._closing: set[asyncio.Task[None]] = set()
        self._pulse_task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Check that etcd is available and permits access. Raises Invalid within 5 seconds if not."""
        deadline = self._now() + OPEN_S - 0.5
        while True:
            troubles: dict[str, str] = {}
            for left in range(len(self._access.endpoints), 0, -1):
                endpoint = self._access.endpoints[self._next]
                try:
                    async with self._connecting:
                        await self._ask_root(max(0.1, (deadline - self._now()) / left))
                except (AccessDenied, Rejected) as error:
                    await self.close()
                    raise Invalid(f"etcd at {endpoint}: {self._explain(error)}") from None
                except Unavailable as error:
                    troubles[endpoint] = str(error)
                    self._leave(self._connection)
                else:
                    self._pulse_task = asyncio.ensure_future(self._pulse())
                    return
            # Retry, because the available members may be electing a leader.
            if set(troubles.values()) == {NOBODY_THERE} or self._now() >= deadline:
                break
            await asyncio.sleep(0.1)
        await self.close()
        if len(set(troubles.values())) == 1:
            troubles = {self._name: next(iter(troubles.values()))}
        texts = [f"etcd at {where} does not answer ({why})" for where, why in troubles.items()]
        raise Invalid(f"{'; '.join(texts)}. Start etcd, or pass other addresses") from None

    async def close(self) -> None:
        """Close the connection. Pending and later requests raise Unavailable."""
        self.closed = True
        self._leave(self._connection)
        if self._pulse_task is not None:
            self._pulse_task.cancel()
            await asyncio.wait({self._pulse_task})
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=CALL_S)
            # Give gRPC's thread time to deliver cancelled calls, because it would log an error once the event loop is
            # closed.
            await asyncio.sleep(0.01)

    def unsettled_s(self, settle_s: float) -> float:
        """Return the seconds until etcd has been available for ``settle_s`` seconds. See `Availability.unsettled_s`."""
        return self._contact.unsettled_s(self._now(), settle_s)

    async def ask(self, method: Method, request: Any, within_s: float | None) -> Any:
        """Send a request to any available member and return the response.

        Args:
            within_s: time limit in seconds. With None, the call waits until etcd is available again.

        Raises:
            Unavailable: no member responded in time.
        """
        deadline = None if within_s is None else self._now() + within_s
        while True:
            left_s = CALL_S if deadline is None else min(CALL_S, deadline - self._now())
            connection = None
            try:
                connection = await self.connected()
                answer = await connection.call(method(connection), request, max(0.05, left_s))
            except Rejected:
                self.answered()
                raise
            except Unavailable as error:
                if self.closed or (deadline is not None and self._now() >= deadline):
                    self._report(error, connection)
                    raise
                await self.failed(error, connection)
            else:
                self.answered()
                return answer

    async def connected(self) -> EtcdConnection:
        async with self._connecting:
            if self.closed:
                raise Unavailable("this process closed the connection to etcd")
            if self._connection is None:
                await self._connect(CALL_S)
            assert self._connection is not None
            return self._connection

    async def _connect(self, within_s: float) -> None:
        connection: EtcdConnection | None = None
        try:
            connection = EtcdConnection(self._access.endpoints[self._next], self._access)
            await connection.log_in(within_s)
        except BaseException:
            self._next = (self._next + 1) % len(self._access.endpoints)
            if connection is not None:
                self._close(connection)
            raise
        self._connection = connection

    async def _ask_root(self, within_s: float) -> None:
        if self._connection is None:
            await self._connect(within_s)
        connection = self._connection
        assert connection is not None
        request = self.rpc.RangeRequest(key=self._root, range_end=self._end, count_only=True)
        await connection.call(connection.kv.Range, request, within_s)
        self.answered()

    def _leave(self, connection: EtcdConnection | None) -> None:
        if connection is not None and connection is self._connection:
            self._connection = None
            self._next = (self._next + 1) % len(self._access.endpoints)
            self._close(connection)

    def _report(self, error: Exception, connection: EtcdConnection | None) -> None:
        # Count one failure if several calls fail because of the same connection.
        if connection is None or connection is self._connection:
            self._failures += 1
        self._leave(connection)
        if not self.closed and (line := self._contact.failed(str(error), self._now())):
            self._log_reason(*line)

    async def failed(self, error: Exception, connection: EtcdConnection | None) -> None:
        """Handle a failed request. Wait if all members have failed; otherwise the next member can be tried at once."""
        self._report(error, connection)
        rounds, rest = divmod(self._failures, len(self._access.endpoints))
        if rest == 0:
            await asyncio.sleep(min(0.5, 0.05 * 2 ** min(rounds, 5)))

    def answered(self) -> None:
        self._failures = 0
        if line := self._contact.answered(self._now()):
            self._log_reason(*line)

    def _log_reason(self, level: str, reason: Reason) -> None:
        self._log(level, str(reason))
        self.noticed(reason)

    async def _pulse(self) -> None:
        """Send test requests when no other requests are pending.

        Without them, an unavailable etcd could not be distinguished from a watch without changes.
        """
        while not self.closed:
            await asyncio.sleep(max(0.05, PULSE_S - self._contact.silent_s(self._now())))
            if self._contact.silent_s(self._now()) >= PULSE_S and not self.closed:
                with contextlib.suppress(Unavailable, Rejected):
                    await self.ask(
                        lambda each: each.kv.Range, self.rpc.RangeRequest(key=self._root), CALL_S
                    )

    def _close(self, connection: EtcdConnection) -> None:
        task = asyncio.ensure_future(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, AccessDenied):
            return str(error)
        subject = (
            f"user {self._access.user!r}" if self._access.user else "a client without --etcd-user"
        )
        return f"{subject} may not read {self._root.decode()} ({error}): grant readwrite on this prefix"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
