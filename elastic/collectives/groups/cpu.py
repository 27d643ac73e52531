"""Group of CPU ranks, which select a backend that all of them support.

First, every rank publishes its host and the memory that it can share, and `backend_selection` selects the backend. If
ranks can share memory, each rank maps the memory of its neighbors and reports whether this succeeded. Shared memory is
used only if all ranks succeeded; otherwise Gloo is used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from elastic.collectives import backend_selection
from elastic.collectives.backend_selection import Backend, BackendSelection, RankInfo
from elastic.collectives.gloo.process_group import GlooCollectives
from elastic.collectives.hierarchical.plan import Topology
from elastic.collectives.hierarchical.process_group import HierarchicalCollectives
from elastic.collectives.interface import Collectives
from elastic.collectives.shared_memory import native_library, peer_memory
from elastic.collectives.shared_memory.memory_offers import MemoryOffer
from elastic.collectives.shared_memory.peer_memory import PeerMemoryUnavailable
from elastic.collectives.shared_memory.process_group import SharedCollectives
from elastic.collectives.single_rank import LocalCollectives
from elastic.errors import CollectiveFailed
from elastic.rendezvous.store import Call, Store

log = logging.getLogger("elastic.collectives")
# Each message is logged once per process, because all groups of all generations produce it.
_logged: set[str] = set()


class CpuGroup:
    """Group of CPU ranks. Call `connect` once; `abort` works at any time, from any thread.

    Args:
        timeout_s: timeout for connecting, in seconds.
        collective_timeout_s: timeout of each collective, in seconds.
        apart: whether no two ranks share a host, so that Gloo will be used. Equal on all ranks. The ranks then exchange
            Gloo's addresses immediately instead of in a second exchange.
        messages: whether the group is for messages, which use Gloo unless all ranks are on one host.
        agreed: whether the ranks agree on every call in advance. See `GlooCollectives`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        collective_timeout_s: float,
        native: bool,
        apart: bool = False,
        messages: bool = False,
        agreed: bool = False,
    ) -> None:
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._collective_timeout_s = collective_timeout_s
        self._native = native
        self._apart = apart
        self._messages = messages
        self._agreed = agreed
        self._swapping = Call()
        self._parts: list[_Part] = []
        self._aborted = False

    def connect(self, store: Store, purpose: str, bind_host: str) -> Collectives:
        """Block until this rank is connected to every other rank.

        Raises:
            CollectiveFailed: a rank is late or lost, or `abort` was called.
        """
        # Mapped memory of exited processes is released at every change of the world.
        peer_memory.sweep()
        found = native_library.load() if self._native else None
        missing = native_library.missing() if self._native else ""
        offer = MemoryOffer(self._size, self._native, found, missing)
        try:
            if self._apart:
                gloo, rows = self._connect_apart(store, purpose, bind_host, offer)
                if gloo is not None:
                    return gloo
            else:
                rows = self._introduce(store, purpose, offer)
            plan, host = self._meet(store, purpose, offer, rows)
        finally:
            offer.withdraw()
        self._log_plan(plan)
        if host is None:
            gloo = self._gloo(self._rank, self._size)
            self._adopt(gloo)
            gloo.connect(store, f"{purpose}/gloo", bind_host)
            return gloo
        if plan.backend is Backend.SHARED:
            return host
        ranks = Topology(plan.hosts, self._rank)
        peers = ranks.inter_node_ranks
        inter_node = self._gloo(peers.index(self._rank), len(peers)) if peers else None
        # If hosts have different numbers of ranks, for example some a single one, leaders send whole tensors instead
        # of shares.
        group = HierarchicalCollectives(ranks, host, inter_node)
        self._adopt(group)
        try:
            group.connect(store, purpose, bind_host)
        except BaseException:
            self._drop(group)
            raise
        return group

    def _introduce(self, store: Store, purpose: str, offer: MemoryOffer) -> list[RankInfo]:
        """Publish this rank's row, and return the rows of all ranks once each rank has published its row.

        See `group_factory.meeting`.
        """
        rows = self._swap(
            store,
            f"{purpose}/{self._size}",
            msgspec.msgpack.encode(offer.row),
            self._collective_timeout_s,
        )
        return _rows(rows)

    def _connect_apart(
        self, store: Store, purpose: str, bind_host: str, offer: MemoryOffer
    ) -> tuple[GlooCollectives | None, list[RankInfo]]:
        rows: list[RankInfo] = []

        def received(words: list[bytes]) -> None:
            rows[:] = _rows(words)
            if backend_selection.plan(rows).backend is not Backend.GLOO:
                raise CollectiveFailed(
                    "the ranks of this host use shared memory instead of Gloo: connect them"
                    " without Gloo"
                )

        gloo = self._gloo(self._rank, self._size)
        self._adopt(gloo)
        payload = msgspec.msgpack.encode(offer.row)
        try:
            gloo.connect(store, purpose, bind_host, payload=payload, on_payloads=received)
        except CollectiveFailed:
            if self._aborted or not rows or backend_selection.plan(rows).backend is Backend.GLOO:
                raise
            self._drop(gloo)
            return None, rows
        self._log_plan(backend_selection.plan(rows))
        return gloo, rows

    def _meet(
        self, store: Store, purpose: str, offer: MemoryOffer, rows: Sequence[RankInfo]
    ) -> tuple[BackendSelection, SharedCollectives | LocalCollectives | None]:
        plan = backend_selection.plan(rows)
        if self._messages and plan.backend is Backend.HIERARCHY:
            plan = BackendSelection(Backend.GLOO, plan.hosts, plan.why)
        if plan.backend is Backend.GLOO:
            return plan, None
        host, why = self._join(purpose, offer, rows, plan.local_ranks(self._rank))
        try:
            reasons = self._swap(
                store, f"{purpose}/shared/{self._size}", why.encode(), self._timeout_s
            )
        except BaseException:
            self._drop(host)
            host = None  # The exception's traceback would keep the memory alive.
            raise
        why = next((each.decode() for each in reasons if each), "")
        if why:
            self._drop(host)
            return BackendSelection(Backend.GLOO, plan.hosts, why), None
        return plan, host

    def _join(
        self, purpose: str, offer: MemoryOffer, rows: Sequence[RankInfo], ranks: Sequence[int]
    ) -> tuple[SharedCollectives | LocalCollectives | None, str]:
        if len(ranks) == 1:
            alone = LocalCollectives()
            self._adopt(alone)
            return alone, ""
        found = native_library.load()
        assert found is not None  # Cannot be None: this rank has offered memory.
        try:
            shared = SharedCollectives(
                found,
                ranks.index(self._rank),
                len(ranks),
                offer.map(rows, ranks, self._rank),
                self._collective_timeout_s,
                oversubscribed=backend_selection.cores(rows, ranks) < len(ranks),
                ranks=ranks,
                key=f"{purpose}/host of {ranks[0]}",
            )
        except (PeerMemoryUnavailable, CollectiveFailed) as error:
            return None, f"rank {self._rank}: {error}"
        self._adopt(shared)
        return shared, ""

    def _gloo(self, rank: int, size: int) -> GlooCollectives:
        return GlooCollectives(
            rank, size, self._timeout_s, self._collective_timeout_s, agreed=self._agreed
        )

    def _swap(self, store: Store, key: str, blob: bytes, timeout_s: float) -> list[bytes]:
        if self._aborted:
            raise CollectiveFailed("aborted", aborted=True)
        return store.exchange(key, self._rank, self._size, blob, timeout_s, self._swapping)

    def _log_plan(self, plan: BackendSelection) -> None:
        if plan.why and self._rank == 0 and plan.why not in _logged:
            _logged.add(plan.why)
            log.warning(
                "shared memory is unavailable between ranks of one host, so tensors are sent over the network, which"
                " is slower: %s. To select the network without this warning, set ELASTIC_NATIVE=0",
                plan.why,
            )

    # ---- abort and close -------------------------------------------------------------------------------------------

    def _adopt(self, part: _Part) -> None:
        self._parts.append(part)
        if self._aborted:  # The group was aborted before this part was registered.
            part.abort()

    def _drop(self, part: _Part | None) -> None:
        if part is not None:
            self._parts.remove(part)
            part.abort()
            part.close()

    def abort(self) -> None:
        """Abort the connection attempt or the connected groups. This method never blocks."""
        self._aborted = True
        self._swapping.abort()
        for part in list(self._parts):
            part.abort()

    def close_in_forked_child(self) -> None:
        for part in list(self._parts):
            part.close_in_forked_child()


def _rows(words: Sequence[bytes]) -> list[RankInfo]:
    return [msgspec.msgpack.decode(each, type=RankInfo) for each in words]


class _Part(Protocol):
    def abort(self) -> None: ...

    def close(self) -> None: ...

    def close_in_forked_child(self) -> None: ...
