"""Group that exchanges short values through the rendezvous store, and connects its ranks only for tensors.

Between distant hosts, the connections of a group take several round trips. A worker that lacks only a few bytes of the
state does not have to wait for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic.collectives.interface import Collectives, Op, Work

if TYPE_CHECKING:
    import torch

LIMIT = 128 << 10  # maximum size in bytes of a value that is sent through the store
_SENT, _TOO_LARGE = b"\0", b"\1"


class DistantGroup:
    """Group of some ranks of a world that spans several hosts.

    Args:
        rank: rank within the group.
        size: number of ranks of the group.
        swap: exchanges bytes between all ranks of the group, and returns those of all ranks. May raise
            CollectiveFailed.
        form: connects the ranks and returns the group for tensors. May raise CollectiveFailed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        swap: Callable[[bytes], list[bytes]],
        form: Callable[[], Collectives],
    ) -> None:
        self.rank, self.size = rank, size
        self.swap = swap
        self._form = form

    def broadcast_short(self, content: bytes, root: int) -> bytes | None:
        """Broadcast the bytes of rank ``root``, and return them. Return None on all ranks if they exceed `LIMIT`.

        Raises:
            CollectiveFailed: a rank was lost.
        """
        sent = _SENT + content if len(content) <= LIMIT else _TOO_LARGE
        received = self.swap(sent if self.rank == root else b"")[root]
        return received[1:] if received.startswith(_SENT) else None

    @functools.cached_property
    def _tensors(self) -> Collectives:
        return self._form()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._tensors.broadcast(tensor, root)

    def allreduce(self, tensor: torch.Tensor, op: Op) -> Work:
        return self._tensors.allreduce(tensor, op)
