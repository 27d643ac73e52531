"""Messages from one rank of a process group to another. Acts.

They travel over Gloo, also within a host, and CUDA tensors through the memory of the host. All ranks of a group have to
connect before two of them can speak. So that no rank that never sends keeps the others waiting, each begins to connect
as soon as the process group is there, and in each new world, in a thread.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from elastic.collectives import threads
from elastic.errors import CollectiveFailed, Interrupted
from elastic.runtime.lifecycle import Runtime
from elastic.torch_backend.collective_calls import Begun

if TYPE_CHECKING:
    from elastic.collectives.gloo.process_group import GlooCollectives, GlooMessage


class Messages:
    """Of one process group. ``ranks`` as there."""

    def __init__(self, purpose: str, ranks: tuple[int, ...] | None) -> None:
        self._purpose = purpose
        self._ranks = ranks
        self._begun_in = 0  # the generation

    def connect(self, rt: Runtime) -> None:
        """Begins to, once in a world. Returns at once."""
        size = rt.place.size if self._ranks is None else len(self._ranks)
        if rt.provisional or size == 1 or self._begun_in == rt.generation:
            return
        self._begun_in = rt.generation
        threads.begin("elastic-messages", self._connect, rt)

    def _connect(self, rt: Runtime) -> None:
        with contextlib.suppress(CollectiveFailed, Interrupted):  # who sends something is told
            rt.messages(self._purpose, self._ranks)

    def send(self, rt: Runtime, tensor: torch.Tensor, to: int, tag: int) -> Begun:
        begun = Begun()
        row = tensor.detach().contiguous().cpu()
        begun.works.append(self._group(rt).send(row, to, tag))
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
        work = self._group(rt).receive(row, source, tag)
        begun.works.append(work)
        return begun, work

    def _group(self, rt: Runtime) -> GlooCollectives:
        self.connect(rt)
        return rt.messages(self._purpose, self._ranks)
