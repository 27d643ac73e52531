"""Memory of a snapshot buffer (bank) that outlives its process while another process on the host maps it.

The memory is part of the arena, which the other ranks of the host map. A header states which commit is complete in it.
The other ranks can therefore verify the contents, whenever the process was killed.
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

HEADER = 64  # bytes: 8 int64
_RESERVE = 1.5  # reserved address space of a bank, as a multiple of its size
_RESERVE_MOST = (
    1 / 16
)  # fraction of the arena; larger banks reserve no additional space, because the arena has other users
# first int64 of the header, followed by generation, number, shard; 0 means incomplete
_WHOLE = 0x7E1A5710C0331701


# Flags by bank. They prevent the reuse of memory that other processes on the host still need after a process that
# leaves or raises has dropped its state.
_kept: dict[int, torch.Tensor] = {}


@dataclass(frozen=True)
class ArenaOffer:
    """Handle of a process's arena, with which other processes on the host can map it."""

    owner: Identity
    memory: Shareable


def offer() -> ArenaOffer | None:
    """Return the handle of this process's arena, or None if the system does not permit mapping it or
    ELASTIC_NATIVE=0.
    """
    mine = arena.mine()
    if mine is None:
        return None
    try:
        return ArenaOffer(peer_memory.myself(), Shareable(mine.fd, mine.inode, mine.bytes))
    except peer_memory.PeerMemoryUnavailable:
        return None


def allocate(size: int, bank: int) -> torch.Tensor:
    """Allocate the memory of a bank, in the arena if one exists.

    Memory in the arena is kept until this bank allocates again or the process exits. Address space for `resized` is
    reserved after it; its pages are not touched.

    Args:
        size: size in bytes.
        bank: a number that is unique among the banks of this process.

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
    """Return memory from `allocate` with another size, or None if the new size does not fit the reserved space.

    Used pages stay allocated, because allocating a page in a virtual machine takes several times as long as copying it.
    The memory of a bank is therefore up to twice as large as its contents.
    """
    reserved = buffer.untyped_storage().nbytes()
    if not size <= reserved <= 2 * size:
        return None
    return buffer.as_strided((size,), (1,), 0)


def keep(buffer: torch.Tensor, bank: int) -> torch.Tensor:
    """Keep memory from `allocate` until the bank allocates again, and return it."""
    if offset_of(buffer) >= 0:
        _kept[bank] = buffer
    return buffer


def offset_of(buffer: torch.Tensor) -> int:
    """Return the offset of the buffer in the arena in bytes, or -1 outside of the arena."""
    mine = arena.mine()
    found = None if mine is None else mine.offset_of(buffer.data_ptr(), buffer.nbytes)
    return -1 if found is None else found


def mark(buffer: torch.Tensor, commit: CommitId | None, shard: int) -> None:
    """Write the header with the shard and its commit. None marks the contents as incomplete."""
    header = buffer[:HEADER].view(torch.int64)
    header[0] = 0
    if commit is not None:
        header[1], header[2], header[3] = commit.generation, commit.number, shard
        header[0] = _WHOLE


def is_whole(buffer: torch.Tensor, commit: CommitId, shard: int) -> bool:
    """Return whether the header states that this shard of this commit is complete."""
    return buffer[:HEADER].view(torch.int64)[:4].tolist() == [_WHOLE, *commit, shard]


class PeerArena:
    """Mapping of the arena of another process on this host.

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
        """Return a uint8 tensor [size] that is valid while this object exists."""
        memory = (ctypes.c_char * size).from_address(self._address + offset)
        return torch.frombuffer(memory, dtype=torch.uint8)
