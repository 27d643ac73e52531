"""Memory that the ranks of one host share for one group: the offer of each rank, and the mapping of all offers.

A rank offers memory before the backend is selected, so that a single exchange is enough for the decision.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from elastic.collectives import backend_selection
from elastic.collectives.backend_selection import RankInfo, Shareable
from elastic.collectives.shared_memory import arena, memfd, peer_memory
from elastic.collectives.shared_memory.arena import Arena, Region
from elastic.collectives.shared_memory.native_library import Library
from elastic.collectives.shared_memory.peer_memory import Mapping, PeerMemoryUnavailable
from elastic.collectives.shared_memory.process_group import Memory


class MemoryOffer:
    """Memory that this rank offers to a group of ``size`` ranks that is being created.

    Call `withdraw` once the other ranks have mapped the memory or have decided not to. The constructor never raises: a
    rank that cannot offer memory gives the reason in its row. ``library`` is None if the C++ library is unavailable,
    for the reason ``missing``.
    """

    def __init__(self, size: int, native: bool, library: Library | None, missing: str) -> None:
        self._control: int | None = None
        self._staging: Region | None = None
        self._arena: Arena | None = None
        self.row = RankInfo(native, why_not=missing)
        try:
            self.row = RankInfo(native, peer_memory.myself(), why_not=missing)
            if native and library is not None:
                self.row = self._offered(size, library)
        except (OSError, PeerMemoryUnavailable) as error:
            self.withdraw()
            self.row = RankInfo(native, self.row.identity, why_not=_sentence(error))

    def _offered(self, size: int, library: Library) -> RankInfo:
        self._arena = arena.mine()
        if self._arena is None:
            raise PeerMemoryUnavailable(arena.why_not())
        self._staging = self._arena.take(library.elastic_staging_bytes())
        if self._staging is None:
            raise PeerMemoryUnavailable(
                "the shared memory of this process is full, so other ranks can't map it: start the job with"
                " ELASTIC_NATIVE=0"
            )
        control_bytes = library.elastic_control_bytes(min(size, backend_selection.MAX_LOCAL_RANKS))
        self._control = memfd.create("elastic-control", control_bytes)
        return RankInfo(
            native=True,
            identity=self.row.identity,
            arena=Shareable(self._arena.fd, self._arena.inode, self._arena.bytes),
            control=Shareable(self._control, os.fstat(self._control).st_ino, control_bytes),
            staging=self._staging.offset,
            cores=peer_memory.cores(),
        )

    def map(self, rows: Sequence[RankInfo], ranks: Sequence[int], rank: int) -> Memory:
        """Map the memory that these ranks of one host, including this one, offered.

        Raises:
            PeerMemoryUnavailable: the memory of a rank cannot be mapped.
        """
        held = _Held()
        try:
            arenas = [self._map_arena(held, rows[each], each == rank) for each in ranks]
            control = self._map_control(held, rows[ranks[0]], ranks[0] == rank)
        except BaseException as error:
            held.release(True)
            if isinstance(error, OSError):
                raise PeerMemoryUnavailable(_sentence(error)) from error
            raise
        held.staging, self._staging = self._staging, None
        return Memory(
            control=control,
            arenas=[(address, size) for address, size, _ in arenas],
            staging=[rows[each].staging for each in ranks],
            pidfds=[pidfd for _, _, pidfd in arenas],
            release=held.release,
        )

    def _map_arena(self, held: _Held, row: RankInfo, own: bool) -> tuple[int, int, int]:
        if own:
            assert self._arena is not None
            return self._arena.address, self._arena.bytes, -1
        assert row.identity is not None
        assert row.arena is not None
        mapping = peer_memory.open_peer(row.identity, row.arena, keep=True)
        held.mappings.append(mapping)
        return mapping.address, mapping.bytes, mapping.pidfd

    def _map_control(self, held: _Held, row: RankInfo, own: bool) -> int:
        assert row.control is not None
        if own:
            assert self._control is not None
            address = memfd.map_shared(self._control, row.control.bytes)
            held.control = (address, row.control.bytes)
            return address
        assert row.identity is not None
        mapping = peer_memory.open_peer(row.identity, row.control)
        held.mappings.append(mapping)
        return mapping.address

    def withdraw(self) -> None:
        """Withdraw the offer. Existing mappings remain."""
        control, self._control = self._control, None
        staging, self._staging = self._staging, None
        if control is not None:
            os.close(control)
        if staging is not None:
            staging.release()


class _Held:
    def __init__(self) -> None:
        self.mappings: list[Mapping] = []
        self.control: tuple[int, int] | None = None  # address and size of this rank's control block
        self.staging: Region | None = None

    def release(self, quiet: bool) -> None:
        """Release the mappings.

        Args:
            quiet: whether no other rank can still write to the staging memory of this rank. Otherwise, this memory is
                not reused.
        """
        staging, self.staging = self.staging, None
        if staging is not None and quiet:
            staging.release()
        while self.mappings:
            self.mappings.pop().release()
        control, self.control = self.control, None
        if control is not None:
            memfd.unmap(*control)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"shared memory can't be mapped: {arena.what_to_do(error)}"
    return str(error)
