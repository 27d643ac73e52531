"""One rule for buffers that change in a forward pass, as running statistics do: those of shard 0 count.

Before each shard of a step every buffer is what it was when the step began; after the step it is what shard 0 has made
of it, on every rank. So no buffer depends on which rank computed what. Models keep constant buffers too, as masks,
which may be large: what has not been written to is neither copied nor sent.
"""

from __future__ import annotations

import weakref

import torch

from elastic.exact import tree
from elastic.exact.step import ShardStep
from elastic.runtime import lifecycle

PURPOSE = "buffers of shard 0"
COMPARED_BYTES = 1 << 20  # larger ones are constants, as masks, unless torch has counted a write


class KeptBuffer:
    """One buffer: what it was when the step began, and what shard 0 has made of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.start = tensor.detach().clone()
        self.result: torch.Tensor | None = None
        self._seen = self._trait(tensor)

    def changed(self, tensor: torch.Tensor) -> bool:
        """Whether it may differ from ``start``.

        Batch normalization writes its statistics without counting a version, so small buffers are compared. On a GPU
        that would wait for it: there they are taken for changed.
        """
        if self._trait(tensor) != self._seen or tensor.shape != self.start.shape:
            return True
        if tensor.nbytes > COMPARED_BYTES:
            return False
        return tensor.is_cuda or not torch.equal(_bytes(tensor), _bytes(self.start))

    def see(self, tensor: torch.Tensor) -> None:
        """It has the value of ``start`` now."""
        self._seen = self._trait(tensor)

    def keep(self, tensor: torch.Tensor) -> None:
        """What it is now is what the step begins with."""
        if self.start.shape == tensor.shape and self.start.dtype == tensor.dtype:
            self.start.copy_(tensor)
        else:
            self.start = tensor.detach().clone()
        self.see(tensor)

    @staticmethod
    def _trait(tensor: torch.Tensor) -> tuple[int, int, int]:
        return id(tensor), tensor.data_ptr(), tensor._version


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class BufferKeeper:
    """Holds models weakly. All ranks watch equal models, in the same order."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._kept: list[KeptBuffer] = []
        self._known: list[int] = []  # which ones shard 0 changes, as all ranks know
        self._generation: int | None = None
        self._step: ShardStep | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """Safe to repeat."""
        if all(each() is not model for each in self._models):
            self._models.append(weakref.ref(model))

    def _buffers(self) -> list[torch.Tensor]:
        """Of the moment: a module may have put another tensor in the place of one."""
        models = [model for each in self._models if (model := each()) is not None]
        found = [buffer for model in models for buffer in model.buffers()]
        return list({id(each): each for each in found}.values())

    # ---- the step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step_begins(self, step: ShardStep) -> None:
        self._step = step
        buffers = self._buffers()
        if len(buffers) != len(self._kept):
            self._kept = [KeptBuffer(each) for each in buffers]
        for kept, buffer in zip(self._kept, buffers, strict=True):
            if kept.changed(buffer):
                kept.keep(buffer)
            kept.result = None

    @torch.no_grad()
    def shard_begins(self, merge: tree.Merge, last: bool) -> None:
        pass

    @torch.no_grad()
    def shard_ends(self, shard: int) -> None:
        for kept, buffer in zip(self._kept, self._buffers(), strict=True):
            if kept.changed(buffer):
                if shard == 0:
                    kept.result = buffer.detach().clone()
                self._put(kept, buffer, kept.start)

    def _put(self, kept: KeptBuffer, buffer: torch.Tensor, value: torch.Tensor) -> None:
        if buffer.shape != value.shape:
            buffer.resize_(value.shape)
        buffer.copy_(value)
        kept.see(buffer)

    @torch.no_grad()
    def step_ends(self) -> None:
        step, buffers = self._step, self._buffers()
        if step is None or not buffers:
            return
        if len(step.held) > 1:
            self._exchange(step, buffers)
        for kept, buffer in zip(self._kept, buffers, strict=True):
            if kept.result is not None:
                kept.start = kept.result
                self._put(kept, buffer, kept.result)
                kept.result = None

    def step_abandoned(self) -> None:
        """Buffers stay as they are: what is restored then may be older than the step."""
        self._step = None
        for kept in self._kept:
            kept.result = None

    # ---- the exchange --------------------------------------------------------------------------------------------

    def _exchange(self, step: ShardStep, buffers: list[torch.Tensor]) -> None:
        """What shard 0 has changed, from the rank that holds it to all others. Raises PeerLost.

        One message: whether these are the ones that it changed in the step before, and if so their values. Else two
        more follow, which ones they are and their values.
        """
        runtime = lifecycle.current()
        if self._generation != runtime.generation:
            self._generation, self._known = runtime.generation, []
        root = next(rank for rank, held in enumerate(step.held) if 0 in held)
        own = step.rank == root
        changed = [n for n, kept in enumerate(self._kept) if kept.result is not None]
        other = changed != self._known or any(
            kept.result is not None and kept.result.shape != kept.start.shape for kept in self._kept
        )
        with runtime.guard(PURPOSE):
            group = runtime.group(PURPOSE, torch.device("cpu"))
            message = self._message(own and not other, self._known, buffers)
            message[0] = int(own and other)
            group.broadcast(message, root).wait()
            if int(message[0]):
                shapes = torch.full((len(buffers), 9), -1, dtype=torch.int64, device="cpu")
                for number in changed if own else ():
                    result = self._kept[number].result
                    assert result is not None
                    shape = [result.dim(), *result.shape]
                    shapes[number, : len(shape)] = torch.tensor(
                        shape, dtype=torch.int64, device="cpu"
                    )
                group.broadcast(shapes, root).wait()
                rows = shapes.tolist()
                self._known = [number for number, row in enumerate(rows) if row[0] >= 0]
                for number in () if own else self._known:
                    shape = rows[number][1 : 1 + rows[number][0]]
                    self._kept[number].result = buffers[number].new_empty(shape)
                message = self._message(own, self._known, buffers)
                group.broadcast(message, root).wait()
        if not own:
            self._take(message, buffers)

    def _message(
        self, filled: bool, numbers: list[int], buffers: list[torch.Tensor]
    ) -> torch.Tensor:
        parts = [torch.zeros(8, dtype=torch.uint8, device="cpu")]
        for number in numbers:
            value = self._kept[number].result
            if value is None:
                value = self._kept[number].start
            parts.append(_bytes(value.cpu()))
        message = torch.cat(parts)
        return message if filled else torch.zeros_like(message)

    def _take(self, message: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        at = 8
        for number in self._known:
            kept = self._kept[number]
            like = kept.start if kept.result is None else kept.result
            data = message[at : at + like.nbytes].clone()
            kept.result = data.view(like.dtype).view(like.shape).to(like.device)
            at += like.nbytes
