"""Group that exchanges short values through the rendezvous store, and connects its ranks only for tensors.

Between distant hosts, the connections of a group take several round trips. A worker that lacks only a few bytes of the
state does not have to wait for them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from elastic.collectives.interface import Collectives, Op, Work

if TYPE_CHECKING:
    import torch

LIMIT = 128 << 10  # maximum size in bytes of what a rank receives through the store in an exchange
_SENT, _TOO_LARGE = b"\0", b"\1"
Wait = Callable[[], list[bytes]]


class Broadcast(NamedTuple):
    """Result of a broadcast through the store, equal on all ranks."""

    content: bytes | None  # None iff it exceeded `LIMIT`
    # replies of the other ranks in rank order; None for a reply that was too large
    replies: list[bytes | None]


class DistantGroup:
    """Group of some ranks of a world that spans several hosts.

    Args:
        rank: rank within the group.
        size: number of ranks of the group.
        start: starts to exchange bytes between all ranks of the group, and returns a function that waits for those of
            all ranks. The function may raise CollectiveFailed.
        form: connects the ranks and returns the group for tensors. May raise CollectiveFailed.
        known: result of the first broadcast, if all ranks know it already.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        start: Callable[[bytes], Wait],
        form: Callable[[], Collectives],
        known: Broadcast | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._known = known
        self._start = start
        self._form = form

    def swap(self, blob: bytes) -> list[bytes]:
        """Exchange bytes with all ranks of the group, and return those of all ranks.

        Raises:
            CollectiveFailed: a rank was lost.
        """
        return self._start(blob)()

    def start_broadcast(
        self, content: bytes | bytearray, root: int, reply: bytes = b""
    ) -> Callable[[], Broadcast]:
        """Start to broadcast the bytes of rank ``root``, and to send the replies of the other ranks to all ranks.

        Returns:
            A function that waits for the result. It may raise CollectiveFailed.
        """
        if self._known is not None:
            known, self._known = self._known, None
            return lambda: known
        sends = self.rank == root
        mine = content if sends else reply
        limit = LIMIT if sends else LIMIT // self.size
        wait = self._start(_SENT + mine if len(mine) <= limit else _TOO_LARGE)

        def received() -> Broadcast:
            blobs = [each[1:] if each.startswith(_SENT) else None for each in wait()]
            replies = [each for rank, each in enumerate(blobs) if rank != root]
            return Broadcast(blobs[root], replies)

        return received

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
