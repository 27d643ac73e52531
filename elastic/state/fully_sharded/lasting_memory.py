"""Memory of a bank that outlives its process, for as long as another process of the host maps it. Acts.

It lies in the arena, which the other ranks of the host map. A header says which commit is whole in it, so that they can
tell when the process is gone, wherever it was killed.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import torch

from elastic.collectives.shared_memory import arena, peer_memory
from elastic.collectives.topology import Identity, Shareable
from elastic.sharding.inventory import CommitId

HEADER = 64  # bytes: 8 int64
_WHOLE = 0x7E1A5710C0331701  # first of them, then generation, number, shard; 0: not whole


# By bank. A process that leaves, or whose script raises, drops its state before it ends, and an arena gives memory back
# that nobody refers to, while others of the host still need it.
_kept: dict[int, torch.Tensor] = {}


@dataclass(frozen=True)
class ArenaOffer:
    """Of a process to those of its host."""

    owner: Identity
    memory: Shareable


def offer() -> ArenaOffer | None:
    """This process's. None: the system refuses, or ELASTIC_NATIVE is 0."""
    mine = arena.mine()
    if mine is None:
        return None
    try:
        return ArenaOffer(peer_memory.myself(), Shareable(mine.fd, mine.inode, mine.bytes))
    except peer_memory.Unreachable:
        return None


def allocate(size: int, bank: int) -> torch.Tensor:
    """uint8 [size], in the arena if there is one: there it stays until this bank allocates again, or the process ends.
    ``bank``: a number that no other bank of this process has.
    """
    _kept.pop(bank, None)
    mine = arena.mine()
    found = None if mine is None else mine.tensor(size, torch.uint8)
    if found is None:
        return torch.zeros(size, dtype=torch.uint8, device="cpu")
    _kept[bank] = found
    return found


def keep(buffer: torch.Tensor, bank: int) -> torch.Tensor:
    """This memory, of `allocate`, stays until the bank allocates again."""
    if offset_of(buffer) >= 0:
        _kept[bank] = buffer
    return buffer


def offset_of(buffer: torch.Tensor) -> int:
    """Where it lies in the arena; -1: elsewhere."""
    mine = arena.mine()
    found = None if mine is None else mine.offset_of(buffer.data_ptr(), buffer.nbytes)
    return -1 if found is None else found


def mark(buffer: torch.Tensor, commit: CommitId | None, shard: int) -> None:
    """Writes the header. None: from here on nothing in it is whole."""
    header = buffer[:HEADER].view(torch.int64)
    header[0] = 0
    if commit is not None:
        header[1], header[2], header[3] = commit.generation, commit.number, shard
        header[0] = _WHOLE


def is_whole(buffer: torch.Tensor, commit: CommitId, shard: int) -> bool:
    return buffer[:HEADER].view(torch.int64)[:4].tolist() == [_WHOLE, *commit, shard]


class PeerArena:
    """The arena of another process of this host, mapped until nobody refers to it. Raises Unreachable."""

    def __init__(self, offered: ArenaOffer) -> None:
        mapping = peer_memory.open_peer(offered.owner, offered.memory, keep=True)
        self.bytes = mapping.bytes
        self._address = mapping.address
        weakref.finalize(self, mapping.release).atexit = False

    def view(self, offset: int, size: int) -> torch.Tensor:
        """uint8 [size]. To be used while this object lives."""
        memory = (ctypes.c_char * size).from_address(self._address + offset)
        return torch.frombuffer(memory, dtype=torch.uint8)
