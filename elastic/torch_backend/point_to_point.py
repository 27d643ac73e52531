"""Messages from one rank of a process group to another. Acts.

They travel over a Gloo group of their own, also within a host, and CUDA tensors through the memory of the host. All its
ranks connect it together: where worlds don't change, with the process group; else at the first message of a world, in
which those that send and receive none take part in a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic.runtime.lifecycle import Runtime
from elastic.torch_backend.collective_calls import Begun

if TYPE_CHECKING:
    from elastic.collectives.gloo.process_group import GlooMessage

AT_ONCE = 32  # ranks; more take long to connect each to each, and few scripts need it


class Messages:
    """Of one process group. ``ranks`` as there."""

    def __init__(self, purpose: str, ranks: tuple[int, ...] | None) -> None:
        self._purpose = purpose
        self._ranks = ranks

    def connect(self, rt: Runtime) -> None:
        """With all its ranks. Raises CollectiveFailed, or PeerLost."""
        rt.messages(self._purpose, self._ranks)

    def expect(self, rt: Runtime) -> None:
        """In each world, from its beginning: this rank is there when others send their first message."""
        if not rt.provisional and len(self._ranks or range(rt.place.size)) <= AT_ONCE:
            rt.expect_messages(self._purpose, self._ranks)

    def monitored_barrier(self, rt: Runtime, timeout_s: float, wait_all_ranks: bool) -> None:
        """See `GlooCollectives.monitored_barrier`."""
        rt.messages(self._purpose, self._ranks).monitored_barrier(timeout_s, wait_all_ranks)

    def send(self, rt: Runtime, tensor: torch.Tensor, to: int, tag: int) -> Begun:
        begun = Begun()
        row = tensor.detach().contiguous().cpu()
        begun.works.append(rt.messages(self._purpose, self._ranks).send(row, to, tag))
        return begun

    def receive(
        self, rt: Runtime, tensor: torch.Tensor, source: int | None, tag: int
    ) -> tuple[Begun, GlooMessage]:
        """The second tells who has sent it."""
        begun, place = Begun(), tensor.detach()
        row = place
        if not (place.is_contiguous() and place.device.type == "cpu"):
            row = torch.empty(place.shape, dtype=place.dtype, device="cpu")
            begun.then(lambda: place.copy_(row))
        work = rt.messages(self._purpose, self._ranks).receive(row, source, tag)
        begun.works.append(work)
        return begun, work
