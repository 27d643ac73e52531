"""Snapshot buffer memory that outlives the process as long as another process on the host maps the memory.

The memory is part of the arena, which the other ranks of the host map. A header identifies the commit of which the
memory contains a complete shard. If the process is killed at any time, the other ranks can therefore determine whether
the contents are usable.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from dataclasses import dataclass

import torch

from elastic.collectives.backend_selection import Identity, Shareable
from elastic.collectives.shared_memory import arena, peer_memory
from elastic.sharding.shard_inventory import CommitId

HEADER = 64  # size of the header in bytes: 8 int64
_RESERVE = 1.5  # address space that a buffer reserves, as a multiple of its size
# limit for the reserved space as a fraction of the arena; larger buffers reserve no additional space, because the arena
# has other users
_RESERVE_MOST = 1 / 16
# first int64 of the header of a complete shard; 0 if incomplete. It is followed by generation, number and shard.
_WHOLE = 0x7E1A5710C0331701


# Current memory of each buffer, by number. The reference keeps it allocated when a process that leaves or raises drops
# its state, because other processes on the host still need it.
_kept: dict[int, torch.Tensor] = {}


@dataclass(frozen=True)
class ArenaOffer:
    """Handle with which other processes on the host can map a process's arena."""

    owner: Identity
    memory: Shareable


def offer() -> ArenaOffer | None:
    """Return the handle of this process's arena, or None if other processes cannot map it.

    They cannot if ELASTIC_NATIVE=0 is set or the system does not permit it.
    """
    mine = arena.mine()
    if mine is None:
        return None
    try:
        return ArenaOffer(peer_memory.myself(), Shareable(mine.fd, mine.inode, mine.bytes))
    except peer_memory.PeerMemoryUnavailable:
        return None


def allocate(size: int, bank: int) -> torch.Tensor:
    """Allocate the memory of a snapshot buffer, in the arena if one exists.

    Memory in the arena stays allocated until this buffer allocates again or the process exits. Address space for
    `resized` is reserved behind it, but its pages are not touched.

    Args:
        size: size in bytes.
        bank: number of the buffer, unique within this process.

    Returns:
        A uint8 tensor [size] of whole pages, which it shares with no other tensor.
    """
    _kept.pop(bank, None)
    mine, reserved = arena.mine(), int(size * _RESERVE)
    if mine is not None:
        if reserved > mine.bytes * _RESERVE_MOST:
            reserved = size
        found = mine.tensor(reserved, torch.uint8)
        if found is not None:
            return keep(found[:size], bank)
    return torch.frombuffer(mmap.mmap(-1, reserved), dtype=torch.uint8)[:size]


def resized(buffer: torch.Tensor, size: int) -> torch.Tensor | None:
    """Return memory from `allocate` with another size, or None if that size does not fit into the reserved space.

    Pages that have been used stay allocated, because in a virtual machine, allocating a page takes several times as
    long as copying it. The memory is therefore up to twice as large as its contents.
    """
    reserved = buffer.untyped_storage().nbytes()
    if not size <= reserved <= 2 * size:
        return None
    return buffer.as_strided((size,), (1,), 0)


def keep(buffer: torch.Tensor, bank: int) -> torch.Tensor:
    """Keep memory from `allocate` until this buffer allocates again, and return it."""
    if offset_of(buffer) >= 0:
        _kept[bank] = buffer
    return buffer


def offset_of(buffer: torch.Tensor) -> int:
    """Return a tensor's offset in the arena in bytes, or -1 if it is not in the arena."""
    mine = arena.mine()
    found = None if mine is None else mine.offset_of(buffer.data_ptr(), buffer.nbytes)
    return -1 if found is None else found


def mark(buffer: torch.Tensor, commit: CommitId | None, shard: int) -> None:
    """Write the shard and its commit to the header. None as ``commit`` marks the contents as incomplete."""
    header = buffer[:HEADER].view(torch.int64)
    header[0] = 0
    if commit is not None:
        header[1], header[2], header[3] = commit.generation, commit.number, shard
        header[0] = _WHOLE


def is_whole(buffer: torch.Tensor, commit: CommitId, shard: int) -> bool:
    """Return whether, according to the header, the memory contains this shard of this commit completely."""
    return buffer[:HEADER].view(torch.int64)[:4].tolist() == [_WHOLE, *commit, shard]


class PeerArena:
    """Mapping of another process's arena on this host.

    The mapping is released when the object is garbage-collected.

    Raises:
        PeerMemoryUnavailable: the arena cannot be mapped.
    """

    def __init__(self, offered: ArenaOffer) -> None:
        mapping = peer_memory.open_peer(offered.owner, offered.memory, keep=True)
        self.bytes = mapping.bytes
        self._address = mapping.address
        weakref.finalize(self, mapping.release).atexit = False

    def view(self, offset: int, size: int) -> torch.Tensor:
        """Return a uint8 tensor [size] of the mapped memory. It is valid as long as this object exists."""
        memory = (ctypes.c_char * size).from_address(self._address + offset)
        return torch.frombuffer(memory, dtype=torch.uint8)
