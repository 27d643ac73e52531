"""Group that exchanges short values through the rendezvous store, and connects its ranks only for tensors.

Between distant hosts, the connections of a group take several round trips. A worker that lacks only a few bytes of the
state does not have to wait for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastic.collectives.interface import Collectives, Op, Work

if TYPE_CHECKING:
    import torch

LIMIT = 128 << 10  # maximum size in bytes of what a rank receives through the store in an exchange
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

    def broadcast_short(self, content: bytes | bytearray, root: int) -> bytes | None:
        """Broadcast the bytes of rank ``root``, and return them. Return None on all ranks if they exceed `LIMIT`.

        Raises:
            CollectiveFailed: a rank was lost.
        """
        sent = _SENT + content if len(content) <= LIMIT else _TOO_LARGE
        received = self.swap(sent if self.rank == root else b"")[root]
        return received[1:] if received.startswith(_SENT) else None

    def any_of(self, flags: Sequence[bool]) -> list[bool] | None:
        """Return, for each flag, whether it is set on at least one rank.

        All ranks pass the same number of flags. Return None on all ranks if the flags of all ranks exceed `LIMIT`.

        Raises:
            CollectiveFailed: a rank was lost.
        """
        size = len(flags) // 8 + 1
        if self.size * size > LIMIT:
            return None
        # The leading bit keeps the number of flags.
        mine = int("1" + "".join("1" if flag else "0" for flag in flags), 2)
        blobs = self.swap(mine.to_bytes(size, "big"))
        found = functools.reduce(operator.or_, (int.from_bytes(each, "big") for each in blobs))
        return [bit == "1" for bit in f"{found:b}"[1:]]

    @functools.cached_property
    def _tensors(self) -> Collectives:
        return self._form()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._tensors.broadcast(tensor, root)

    def allreduce(self, tensor: torch.Tensor, op: Op) -> Work:
        return self._tensors.allreduce(tensor, op)
