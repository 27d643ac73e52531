"""Point-to-point messages between the ranks of a process group.

Messages use shared memory if all ranks of the process group are on one host, otherwise a separate Gloo group. CUDA
tensors are copied through host memory. All ranks connect at the same time: with the process group if the world is
fixed, otherwise at the first message of a world. Ranks that neither send nor receive then connect in a separate thread.
"""

from __future__ import annotations

import torch

from elastic.collectives.interface import MessageWork, Messenger
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.torch_backend.collective_calls import CollectiveCall

# maximum number of ranks that connect automatically; connecting more takes long, and few scripts need it
AT_ONCE = 32


class PointToPointMessages:
    """Point-to-point messages of one process group.

    Args:
        ranks: see `FollowingGroup`.
    """

    def __init__(self, purpose: str, ranks: tuple[int, ...] | None) -> None:
        self._purpose = purpose
        self._ranks = ranks
        self._known: tuple[int, Messenger] | None = None  # (generation, messenger)

    def move(self, ranks: tuple[int, ...]) -> None:
        """Set the ranks of the process group in a new world."""
        self._ranks = ranks

    def connect(self, rt: WorkerRuntime) -> None:
        """Connect to all ranks of the process group.

        All ranks must call this method.

        Raises:
            CollectiveFailed: a rank was lost, in a job of fixed size.
            PeerLost: a rank was lost.
        """
        self._group(rt)

    def _group(self, rt: WorkerRuntime) -> Messenger:
        generation, known = rt.generation, self._known
        if known is not None and known[0] == generation and not rt.broken:
            return known[1]
        group = rt.messages(self._purpose, self._ranks)
        self._known = generation, group
        return group

    def expect(self, rt: WorkerRuntime) -> None:
        """Prepare to connect in the current world as soon as another rank sends its first message."""
        if not rt.provisional and len(self._ranks or range(rt.place.size)) <= AT_ONCE:
            rt.expect_messages(self._purpose, self._ranks)

    def monitored_barrier(self, rt: WorkerRuntime, timeout_s: float, wait_all_ranks: bool) -> None:
        """Wait for all ranks. See `Messenger.monitored_barrier`."""
        self._group(rt).monitored_barrier(timeout_s, wait_all_ranks)

    def send(self, rt: WorkerRuntime, tensor: torch.Tensor, to: int, tag: int) -> CollectiveCall:
        begun = CollectiveCall()
        row = tensor.detach()
        if not _carried_as_it_is(row):
            row = row.contiguous().cpu()
        begun.works.append(self._group(rt).send(row, to, tag))
        return begun

    def receive(
        self, rt: WorkerRuntime, tensor: torch.Tensor, source: int | None, tag: int
    ) -> tuple[CollectiveCall, MessageWork]:
        """Start receiving a message. Return the call and a work that provides the sender's rank after completion."""
        begun, place = CollectiveCall(), tensor.detach()
        row = place
        if not _carried_as_it_is(place):
            row = torch.empty(place.shape, dtype=place.dtype, device="cpu")
            begun.then(lambda: place.copy_(row))
        work = self._group(rt).receive(row, source, tag)
        begun.works.append(work)
        return begun, work


def _carried_as_it_is(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.is_cpu
