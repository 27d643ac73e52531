"""Exchange of bytes between all ranks that runs in the background."""

from __future__ import annotations

import contextlib

import torch

from elastic.collectives.interface import Collectives
from elastic.errors import CollectiveFailed

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Transfer:
    """Exchange of uint8 tensors between all ranks. Tensors are keyed by destination or source rank.

    All ranks must call this function.

    The constructor begins the transfer. The tensors in ``sent`` must not be modified until it has ended.
    """

    def __init__(
        self,
        group: Collectives,
        sent: dict[int, list[torch.Tensor]],
        received: dict[int, list[torch.Tensor]],
    ) -> None:
        ranks = range(group.size)
        out = [each for rank in ranks for each in sent.get(rank, ())]
        self._into = [each for rank in ranks for each in received.get(rank, ())]
        source = out[0] if len(out) == 1 else torch.cat([_NOTHING, *out])
        self._target = (
            self._into[0]
            if len(self._into) == 1
            else torch.empty(sum(map(len, self._into)), dtype=torch.uint8, device="cpu")
        )
        self._work = group.alltoall(
            self._target,
            source,
            [sum(map(len, received.get(rank, ()))) for rank in ranks],
            [sum(map(len, sent.get(rank, ()))) for rank in ranks],
        )

    def wait(self) -> None:
        """Block until all tensors have been received.

        Raises:
            CollectiveFailed: the group has failed or was aborted.
        """
        self._work.wait()
        if len(self._into) != 1:
            parts = self._target.split(list(map(len, self._into)))
            for part, whole in zip(parts, self._into, strict=True):
                whole.copy_(part)

    def succeeded(self) -> bool:
        """Return whether the transfer has ended without an error, so that all tensors have been received.

        This method does not block.
        """
        if not self._work.done():
            return False
        with contextlib.suppress(CollectiveFailed):
            self.wait()
            return True
        return False
