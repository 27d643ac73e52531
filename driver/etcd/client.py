"""The few things that we ask of etcd, of whichever of its members answers. Decides nothing.

Every question has a deadline. A member that doesn't answer is left for the next one, at once; when none does, that is
said once (see `availability`). What is asked with ``within_s=None`` waits until etcd is back.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from elastic.driver.etcd.connection import EtcdConnection, LeaseGone, Rejected, Unavailable
from elastic.driver.etcd.endpoints import CALL_S, GRACE_S, Log, Members
from elastic.driver.etcd.keys import ROOT
from elastic.driver.network.credentials import EtcdAccess
from elastic.driver.reasons import Reason


class Item(NamedTuple):
    """The value of a key. ``created`` and ``changed`` are revisions: they grow with every change of anything."""

    value: bytes
    created: int
    changed: int
    lease: int


class Listing(NamedTuple):
    """All keys of a prefix, sorted, as they were at a revision."""

    items: dict[str, Item]
    revision: int


class Unchanged(NamedTuple):
    """A condition: the last change of ``key`` is the one of this revision; 0: there is no such key."""

    key: str
    changed: int


class Put(NamedTuple):
    key: str
    value: bytes
    lease: int = 0  # it goes with this lease


class Etcd:
    """``root``: the prefix under which all is that will be asked for; it has to be readable. Made in an event loop.

    Calls raise Unavailable (no answer in time: it may have been done all the same) and Rejected.
    """

    def __init__(
        self, access: EtcdAccess, log: Log, *, root: str = ROOT, grace_s: float = GRACE_S
    ) -> None:
        self.access = access
        self._log = log
        self._members = Members(access, log, root=root.encode(), end=_end_of(root), grace_s=grace_s)
        self._rpc = self._members.rpc

    async def open(self) -> None:
        """See that it is there and lets us in. Raises Invalid, with what to do, within 5 seconds."""
        await self._members.open()

    async def close(self) -> None:
        """Within a bound. What is under way ends in Unavailable, watches end."""
        await self._members.close()

    def tell(self, noticed: Callable[[Reason], None]) -> None:
        """Whom to tell from now on that it is away, or back."""
        self._members.noticed = noticed

    def unsettled_s(self, settle_s: float) -> float:
        """How long until etcd has been back for ``settle_s``: see `Contact.unsettled_s`."""
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
        """Returns the revision of the change."""
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
        """All of it at once if all conditions hold, and then its revision; else nothing, and None.

        If an answer is lost it is asked again, so None may also mean that the first time has changed the condition.
        etcd takes 128 operations at most, and 1.5 MB.
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
        """A new lease. etcd counts in whole seconds, and takes 2 for less."""
        request = self._rpc.LeaseGrantRequest(TTL=max(1, round(ttl_s)))
        return int(
            (await self._members.ask(lambda each: each.lease.LeaseGrant, request, within_s)).ID
        )

    async def keep_alive(self, lease: int, *, within_s: float | None = 5.0) -> float:
        """Renew it: how long it lives now, 0 if it is gone."""
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)
        return float((await self._members.ask(_renewal, request, within_s)).TTL)

    async def time_left(self, lease: int, *, within_s: float | None = 5.0) -> tuple[float, float]:
        """How long a lease lives on if it is not renewed, and how long after a renewal; 0 and 0 if it is gone."""
        request = self._rpc.LeaseTimeToLiveRequest(ID=lease)
        answer = await self._members.ask(lambda each: each.lease.LeaseTimeToLive, request, within_s)
        return (float(answer.TTL), float(answer.grantedTTL)) if answer.TTL >= 0 else (0.0, 0.0)

    async def revoke(self, lease: int, *, within_s: float | None = 5.0) -> None:
        """End it now; its keys go with it. It may be over already."""
        request = self._rpc.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(LeaseGone):
            await self._members.ask(lambda each: each.lease.LeaseRevoke, request, within_s)

    # ---- changes

    async def watch(self, key: str) -> AsyncGenerator[Item | None, None]:
        """The key as it is, then at each change; it may be told twice, and changes in between may be left out."""
        async for items in self._watch(key, b""):
            yield items.get(key)

    async def watch_prefix(self, prefix: str) -> AsyncGenerator[dict[str, Item], None]:
        """All keys of a prefix, as with `watch`."""
        async for items in self._watch(prefix, _end_of(prefix)):
            yield items

    async def _watch(self, key: str, end: bytes) -> AsyncGenerator[dict[str, Item], None]:
        # After whatever has ended a watch everything is read anew: so it does not matter what was missed, nor
        # whether etcd still knows it, nor whether it has been restored from a backup.
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
                    self._log("warning", f"etcd denies reading {key}: {error}; retrying")
                refused = True
                await self._members.failed(error, connection)
            except Unavailable as error:
                await self._members.failed(error, connection)

    async def _changes(
        self, connection: EtcdConnection, key: str, end: bytes, revision: int
    ) -> AsyncGenerator[Any, None]:
        """The events of each answer. Ends where etcd has forgotten what has to be told."""
        rpc = self._rpc
        create = rpc.WatchCreateRequest(key=key.encode(), range_end=end, start_revision=revision)
        # A member without a leader would be silent for ever.
        stream = connection.watches.Watch(metadata=(*connection.metadata, ("hasleader", "true")))
        try:
            await connection.outcome(stream.write(rpc.WatchRequest(create_request=create)), CALL_S)
            within_s: float | None = CALL_S
            while True:
                answer = await connection.outcome(stream.read(), within_s)
                if not hasattr(answer, "events"):
                    raise Unavailable("it ended the watch")
                self._members.answered()
                if answer.compact_revision:
                    return
                if answer.canceled:
                    # Also because the token has run out; the next connection gets a new one.
                    raise Unavailable(answer.cancel_reason or "it cancelled the watch")
                within_s = None  # `_pulse` sees to it that the connection is closed if etcd is away
                if answer.events:
                    yield answer.events
        finally:
            stream.cancel()


async def _one(stream: Any) -> Any:
    answer = await stream.read()
    stream.cancel()
    if not hasattr(answer, "TTL"):
        raise Unavailable("it ended the stream")
    return answer


def _renewal(connection: EtcdConnection) -> Callable[..., Awaitable[Any]]:
    """LeaseKeepAlive is a stream; we ask one question with each."""

    def ask(request: Any, **options: Any) -> Awaitable[Any]:
        return _one(connection.lease.LeaseKeepAlive(iter([request]), **options))

    return ask


def _item(kv: Any) -> tuple[str, Item]:
    name = kv.key.decode("utf-8", "replace")
    return name, Item(kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _end_of(prefix: str) -> bytes:
    """The first key after all that begin with the prefix."""
    encoded = prefix.encode()
    return encoded[:-1] + bytes([encoded[-1] + 1])
