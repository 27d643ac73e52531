"""Messages from one rank of a process group to another. Acts.

They travel through shared memory where all ranks of the process group lie on one host, else over Gloo, in a group of
their own; CUDA tensors through the memory of the host. All its ranks connect that together: where worlds don't change,
with the process group; else at the first message of a world, in which those that send and receive none take part in a
thread.
"""

from __future__ import annotations

import torch

from elastic.collectives.interface import MessageWork, Messenger
from elastic.runtime.worker import Runtime
from elastic.torch_backend.collective_calls import Begun

AT_ONCE = 32  # ranks; more take long to connect each to each, and few scripts need it


class Messages:
    """Of one process group. ``ranks`` as there."""

    def __init__(self, purpose: str, ranks: tuple[int, ...] | None) -> None:
        self._purpose = purpose
        self._ranks = ranks
        self._known: tuple[int, Messenger] | None = None  # with its generation

    def connect(self, rt: Runtime) -> None:
        """With all its ranks. Raises CollectiveFailed, or PeerLost."""
        self._group(rt)

    def _group(self, rt: Runtime) -> Messenger:
        generation, known = rt.generation, self._known
        if known is not None and known[0] == generation and not rt.broken:
            return known[1]
        group = rt.messages(self._purpose, self._ranks)
        self._known = generation, group
        return group

    def expect(self, rt: Runtime) -> None:
        """In each world, from its beginning: this rank is there when others send their first message."""
        if not rt.provisional and len(self._ranks or range(rt.place.size)) <= AT_ONCE:
            rt.expect_messages(self._purpose, self._ranks)

    def monitored_barrier(self, rt: Runtime, timeout_s: float, wait_all_ranks: bool) -> None:
        """See `Messenger.monitored_barrier`."""
        self._group(rt).monitored_barrier(timeout_s, wait_all_ranks)

    def send(self, rt: Runtime, tensor: torch.Tensor, to: int, tag: int) -> Begun:
        begun = Begun()
        row = tensor.detach()
        if not _carried_as_it_is(row):
            row = row.contiguous().cpu()
        begun.works.append(self._group(rt).send(row, to, tag))
        return begun

    def receive(
        self, rt: Runtime, tensor: torch.Tensor, source: int | None, tag: int
    ) -> tuple[Begun, MessageWork]:
        """The second tells who has sent it."""
        begun, place = Begun(), tensor.detach()
        row = place
        if not _carried_as_it_is(place):
            row = torch.empty(place.shape, dtype=place.dtype, device="cpu")
            begun.then(lambda: place.copy_(row))
        work = self._group(rt).receive(row, source, tag)
        begun.works.append(work)
        return begun, work


def _carried_as_it_is(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.is_cpu
