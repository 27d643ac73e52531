"""etcd client with failover between members, for the operations that this package needs. Makes no decisions.

Every request has a deadline. If a member does not respond, the next one is tried immediately. An outage of all members
is logged once (see `outage_detection`). Requests with ``within_s=None`` wait until etcd is available again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from elastic.driver.etcd.connection import EtcdConnection, LeaseExpired, Rejected, Unavailable
from elastic.driver.etcd.keys import ROOT
from elastic.driver.etcd.member_failover import CALL_S, GRACE_S, Endpoints, Log
from elastic.driver.network.credentials import EtcdAccess
from elastic.driver.reasons import Reason


class Item(NamedTuple):
    """Value of a key in etcd. ``created`` and ``changed`` are revisions of etcd, which increase with every change."""

    value: bytes
    created: int
    changed: int
    lease: int


class Listing(NamedTuple):
    """Snapshot of all keys with a prefix, sorted, at one revision of etcd."""

    items: dict[str, Item]
    revision: int


class Unchanged(NamedTuple):
    """Condition of a transaction: the last change of ``key`` has this revision (0 if the key does not exist)."""

    key: str
    changed: int


class Put(NamedTuple):
    key: str
    value: bytes
    lease: int = 0  # ID of the lease that the key is attached to; 0 means none


class EtcdClient:
    """Client of etcd, which must be created in an event loop.

    Methods raise Rejected if etcd rejects the request, and Unavailable if etcd does not respond in time. In the second
    case, etcd may have performed the request.

    Args:
        access: endpoints and credentials.
        log: called with the level and the text of each log line.
        root: prefix of all keys to use. The user must have permission to read it.
        grace_s: seconds without a response after which etcd is reported as unavailable.
    """

    def __init__(
        self, access: EtcdAccess, log: Log, *, root: str = ROOT, grace_s: float = GRACE_S
    ) -> None:
        self.access = access
        self._log = log
        self._members = Endpoints(
            access, log, root=root.encode(), end=_end_of(root), grace_s=grace_s
        )
        self._rpc = self._members.rpc

    async def open(self) -> None:
        """Check that etcd is available and permits access. Raises Invalid within 5 seconds if not."""
        await self._members.open()

    async def close(self) -> None:
        """Close the connection, within a time limit. Pending requests raise Unavailable, and watches end."""
        await self._members.close()

    def set_listener(self, noticed: Callable[[Reason], None]) -> None:
        """Set the callback that receives a reason whenever etcd becomes unavailable or available again."""
        self._members.noticed = noticed

    def unsettled_s(self, settle_s: float) -> float:
        """Return the seconds until etcd has been available for ``settle_s`` seconds. See `Availability.unsettled_s`."""
        return self._members.unsettled_s(settle_s)

    # ---- keys

    async def get(self, key: str, *, within_s: float | None = 5.0) -> Item | None:
        listing = await self._range(key, b"", within_s)
        return listing.items.get(key)

    async def get_prefix(self, prefix: str, *, within_s: float | None = 5.0) -> Listing:
        return await self._range(prefix, _end_of(prefix), within_s)

    async def put(
        self, key: str, value: bytes, lease: int = 0, *, within_s: float | None = 5.0
    ) -> int:
        """Write a value and return the revision of the change."""
        revision = await self.transact([], [Put(key, value, lease)], within_s=within_s)
        assert revision is not None
        return revision

    async def transact(
        self,
        conditions: Sequence[Unchanged],
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        *,
        within_s: float | None = 5.0,
    ) -> int | None:
        """Perform all operations atomically if all conditions hold, and return the revision. Otherwise return None.

        If a response is lost, the client repeats the request. None can then also mean that the first attempt succeeded
        and thereby invalidated the conditions. etcd accepts at most 128 operations and 1.5 MB.
        """
        rpc = self._rpc
        request = rpc.TxnRequest(
            compare=[
                rpc.Compare(
                    key=each.key.encode(),
                    target=rpc.Compare.MOD,
                    result=rpc.Compare.EQUAL,
                    mod_revision=each.changed,
                )
                for each in conditions
            ],
            success=[
                rpc.RequestOp(
                    request_put=rpc.PutRequest(
                        key=each.key.encode(), value=each.value, lease=each.lease
                    )
                )
                for each in puts
            ]
            + [
                rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))
                for key in deletes
            ],
        )
        answer = await self._members.ask(lambda each: each.kv.Txn, request, within_s)
        return answer.header.revision if answer.succeeded else None

    async def _range(self, key: str, end: bytes, within_s: float | None) -> Listing:
        request = self._rpc.RangeRequest(key=key.encode(), range_end=end)
        answer = await self._members.ask(lambda each: each.kv.Range, request, within_s)
        return Listing(dict(map(_item, answer.kvs)), answer.header.revision)

    # ---- leases

    async def grant(self, ttl_s: float, *, within_s: float | None = 5.0) -> int:
        """Create a lease and return its ID. etcd rounds the time to live to whole seconds, at least 2."""
        request = self._rpc.LeaseGrantRequest(TTL=max(1, round(ttl_s)))
        return int(
            (await self._members.ask(lambda each: each.lease.LeaseGrant, request, within_s)).ID
        )

    async def keep_alive(self, lease: int, *, within_s: float | None = 5.0) -> float:
        """Renew a lease. Return its time to live in seconds, or 0 if it has expired."""
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)
        return float((await self._members.ask(_renewal, request, within_s)).TTL)

    async def time_left(self, lease: int, *, within_s: float | None = 5.0) -> tuple[float, float]:
        """Return the remaining time of a lease, and the time to live after a renewal, in seconds.

        Both are 0 if the lease has expired.
        """
        request = self._rpc.LeaseTimeToLiveRequest(ID=lease)
        answer = await self._members.ask(lambda each: each.lease.LeaseTimeToLive, request, within_s)
        return (float(answer.TTL), float(answer.grantedTTL)) if answer.TTL >= 0 else (0.0, 0.0)

    async def revoke(self, lease: int, *, within_s: float | None = 5.0) -> None:
        """Revoke a lease, which deletes its keys. No effect if the lease has expired."""
        request = self._rpc.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(LeaseExpired):
            await self._members.ask(lambda each: each.lease.LeaseRevoke, request, within_s)

    # ---- changes

    async def watch(self, key: str) -> AsyncGenerator[Item | None, None]:
        """Yield the value of a key, now and after each change.

        Values may be repeated, and intermediate values may be omitted.
        """
        async for items in self._watch(key, b""):
            yield items.get(key)

    async def watch_prefix(self, prefix: str) -> AsyncGenerator[dict[str, Item], None]:
        """Yield all keys with a prefix and their values, now and after each change.

        States may be repeated, and intermediate changes may be omitted.
        """
        async for items in self._watch(prefix, _end_of(prefix)):
            yield items

    async def _watch(self, key: str, end: bytes) -> AsyncGenerator[dict[str, Item], None]:
        # After a watch has ended, read all keys again, because changes may have been missed, or etcd may have been
        # restored from a backup.
        refused = False
        while not self._members.closed:
            connection = None
            try:
                items, revision = await self._range(key, end, None)
                yield dict(items)
                connection = await self._members.connected()
                async with contextlib.aclosing(
                    self._changes(connection, key, end, revision + 1)
                ) as changes:
                    async for events in changes:
                        for event in events:
                            name, item = _item(event.kv)
                            items.pop(name, None)
                            if event.type == event.PUT:
                                items[name] = item
                        yield dict(items)
            except Rejected as error:
                if not refused:
                    self._log("warning", f"etcd denied a read of {key}: {error}; retrying")
                refused = True
                await self._members.failed(error, connection)
            except Unavailable as error:
                await self._members.failed(error, connection)

    async def _changes(
        self, connection: EtcdConnection, key: str, end: bytes, revision: int
    ) -> AsyncGenerator[Any, None]:
        rpc = self._rpc
        create = rpc.WatchCreateRequest(key=key.encode(), range_end=end, start_revision=revision)
        # With this metadata, a member that has lost its leader ends the watch instead of sending no changes.
        stream = connection.watches.Watch(metadata=(*connection.metadata, ("hasleader", "true")))
        try:
            await connection.outcome(stream.write(rpc.WatchRequest(create_request=create)), CALL_S)
            within_s: float | None = CALL_S
            while True:
                answer = await connection.outcome(stream.read(), within_s)
                if not hasattr(answer, "events"):
                    raise Unavailable("etcd ended the watch: see its log")
                self._members.answered()
                if answer.compact_revision:
                    return
                if answer.canceled:
                    # Reconnect, because the token may have expired: each connection requests a new token.
                    raise Unavailable(
                        answer.cancel_reason or "etcd cancelled the watch: see its log"
                    )
                # Wait for changes without a deadline: `_pulse` closes the connection if etcd is unavailable.
                within_s = None
                if answer.events:
                    yield answer.events
        finally:
            stream.cancel()


async def _one(stream: Any) -> Any:
    answer = await stream.read()
    stream.cancel()
    if not hasattr(answer, "TTL"):
        raise Unavailable("etcd closed the stream of a pending request: see its log")
    return answer


def _renewal(connection: EtcdConnection) -> Callable[..., Awaitable[Any]]:
    def ask(request: Any, **options: Any) -> Awaitable[Any]:
        return _one(connection.lease.LeaseKeepAlive(iter([request]), **options))

    return ask


def _item(kv: Any) -> tuple[str, Item]:
    name = kv.key.decode("utf-8", "replace")
    return name, Item(kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _end_of(prefix: str) -> bytes:
    encoded = prefix.encode()
    return encoded[:-1] + bytes([encoded[-1] + 1])
