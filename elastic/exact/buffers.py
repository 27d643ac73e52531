"""Synchronization of buffers that a forward pass changes, such as running statistics, across shards.

Before each shard of a step, every buffer is reset to its value at the start of the step. After the step, it has
the value computed by shard 0, on every rank. Buffers therefore do not depend on the assignment of shards to
ranks. Models also have constant buffers, such as masks, which may be large: unchanged buffers are neither
copied nor sent. Sparse buffers are assumed to be constant.

Parameters keep their values during a step: a forward pass that changes a parameter is rejected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from elastic.errors import Invalid
from elastic.exact import reduction_tree
from elastic.exact.shard_step import PassResult, ShardStep
from elastic.runtime import lifecycle

PURPOSE = "buffers of shard 0"
# Maximum size of compared buffers in bytes. Larger ones, such as masks, count as constant unless their version counter
# has changed.
COMPARED_BYTES = 1 << 20


class KeptBuffer:
    """Buffer of a model, with its value at the start of the step and its value after shard 0."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.start = tensor.detach().clone()
        self.result: torch.Tensor | None = None
        self._seen = self._trait(tensor)

    def changed(self, tensor: torch.Tensor) -> bool:
        """Return whether the buffer may differ from ``start``.

        Batch normalization writes its statistics without incrementing a version, so small buffers are compared. On a
        GPU, the comparison would synchronize, so small buffers on GPUs are treated as changed.
        """
        if self._trait(tensor) != self._seen or tensor.shape != self.start.shape:
            return True
        if tensor.nbytes > COMPARED_BYTES or _expanded(tensor):
            return False
        return tensor.is_cuda or not torch.equal(_bytes(tensor), _bytes(self.start))

    def see(self, tensor: torch.Tensor) -> None:
        """Record that the buffer currently has the value ``start``."""
        self._seen = self._trait(tensor)

    def keep(self, tensor: torch.Tensor) -> None:
        """Make the current value of the buffer the value at the start of the step."""
        if self.start.shape == tensor.shape and self.start.dtype == tensor.dtype:
            self.start.copy_(tensor)
        else:
            self.start = tensor.detach().clone()
        self.see(tensor)

    @staticmethod
    def _trait(tensor: torch.Tensor) -> tuple[int, int, int]:
        return id(tensor), tensor.data_ptr(), tensor._version


class WatchedParameter:
    """Parameter of a model, with its version and address at the start of the step."""

    __slots__ = ("_place", "_tensor", "_version", "name")

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self._tensor = tensor
        self._place, self._version = self._now()

    def _now(self) -> tuple[int, int]:
        # On GPUs, the forward pass of an LSTM moves its weights to contiguous memory, which changes addresses but not
        # values.
        return 0 if self._tensor.is_cuda else self._tensor.data_ptr(), self._tensor._version

    def changed(self) -> bool:
        """Return whether the parameter was written to, according to its version, or was moved to other memory."""
        return self._now() != (self._place, self._version)


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has a version counter. Inference tensors, which are not trained, have none."""
    return tensor.layout == torch.strided and not is_lazy(tensor) and not tensor.is_inference()


def _expanded(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is expanded. torch rejects in-place writes to such a tensor."""
    return any(
        not stride and n > 1 for stride, n in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class BufferKeeper:
    """Tracker of the buffers of models.

    The models are referenced weakly. All ranks watch equal models in the same order.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._modules: list[torch.nn.Module] = []  # modules of the models at the start of the step
        self._children: list[int] = []  # number of direct submodules of each module
        self._names: list[str] = []  # names of the buffers
        self._parameters: dict[int, WatchedParameter] = {}
        self._kept: list[KeptBuffer] = []
        self._known: list[
            int
        ] = []  # buffers that shard 0 changed in the previous step, known to all ranks
        self._generation: int | None = None
        self._step: ShardStep | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """Start to track the buffers of a model. Idempotent."""
        if all(each() is not model for each in self._models):
            self._models.append(weakref.ref(model))

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None and _dense(buffer):
                    yield f"{number} {name}", buffer

    def _buffers(self) -> list[torch.Tensor]:
        return list({id(each): each for _, each in self._named()}.values())

    def _describe(self, found: str) -> str:
        number, name = found.split(" ", 1)
        return f"{name} of {type(self._modules[int(number)]).__name__}"

    # ---- the step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step_begins(self, step: ShardStep) -> None:
        self._step = step
        models = [model for each in self._models if (model := each()) is not None]
        self._modules = [module for model in models for module in model.modules()]
        self._children = [len(module._modules) for module in self._modules]
        self._names = [name for name, _ in self._named()]
        self._parameters = {
            id(each): WatchedParameter(f"{number} {name}", each)
            for number, module in enumerate(self._modules)
            for name, each in module._parameters.items()
            if each is not None and _dense(each)
        }
        buffers = self._buffers()
        if len(buffers) != len(self._kept):
            self._kept = [KeptBuffer(each) for each in buffers]
        for kept, buffer in zip(self._kept, buffers, strict=True):
            if kept.changed(buffer):
                kept.keep(buffer)
            kept.result = None

    @torch.no_grad()
    def shard_begins(self, merge: reduction_tree.Merge, last: bool) -> None:
        pass

    @torch.no_grad()
    def shard_ends(self, shard: int) -> None:
        self._check(shard)
        for kept, buffer in zip(self._kept, self._buffers(), strict=True):
            if kept.changed(buffer):
                if shard == 0:
                    kept.result = buffer.detach().clone()
                self._put(kept, buffer, kept.start)

    def second_pass_begins(self, shard: int) -> None:
        pass

    @torch.no_grad()
    def second_pass_ends(self, shard: int) -> PassResult:
        self._check(shard)
        for kept, buffer in zip(self._kept, self._buffers(), strict=True):
            if kept.changed(buffer):
                self._put(kept, buffer, kept.start)
        return PassResult(0, 0.0)

    def digest_of(self, shard: int) -> int:
        return 0

    def largest(self, shard: int) -> float:
        return 0.0

    def state_of(self, shard: int) -> dict[str, Any]:
        starts = {
            id(buffer): kept.start for kept, buffer in zip(self._kept, self._buffers(), strict=True)
        }
        return {"buffers": {name: starts[id(buffer)].cpu() for name, buffer in self._named()}}

    def _check(self, shard: int) -> None:
        for each in self._parameters.values():
            if each.changed():
                raise Invalid(
                    f"{self._describe(each.name)} was changed within the loop over the shards, in shard {shard}, for"
                    " example by nn.Embedding(max_norm=...) in its forward pass. Workers would apply the change"
                    " a different number of times. Change the tensor after the loop on every worker. If the"
                    " tensor is not trained, make it a buffer: all workers get its value after shard 0"
                )
        names = [name for name, _ in self._named()]
        if names != self._names:
            # No name was added or removed, so only the order differs.
            odd = [*sorted({*names} ^ {*self._names}), *names][0]
            raise Invalid(
                f"the buffer {self._describe(odd)} was {'created' if odd in names else 'removed'} within the loop"
                f" over the shards, in shard {shard}. A worker that joins or computes no shard would"
                f" {'lack' if odd in names else 'keep'} the buffer. Register the buffer when you create the"
                " module, and do not remove it"
            )
        for module, children in zip(self._modules, self._children, strict=True):
            if len(module._modules) != children:
                raise Invalid(
                    f"a module within {type(module).__name__} was created or removed within the loop over the"
                    f" shards, in shard {shard}, so models would differ between workers: create all modules"
                    " before training"
                )

    def _put(self, kept: KeptBuffer, buffer: torch.Tensor, value: torch.Tensor) -> None:
        if buffer.shape != value.shape:
            buffer.resize_(value.shape)
        buffer.copy_(value)
        kept.see(buffer)

    @torch.no_grad()
    def step_ends(self) -> None:
        step, buffers = self._step, self._buffers()
        if step is not None and buffers and len(step.held) > 1:
            self._exchange(step, buffers)
        for kept, buffer in zip(self._kept, buffers, strict=True):
            if kept.result is not None:
                kept.start = kept.result
                self._put(kept, buffer, kept.result)
        self.step_abandoned()

    def step_abandoned(self) -> None:
        """Do nothing, because the commit that is restored next also restores the buffers."""
        self._step, self._modules, self._parameters = None, [], {}
        for kept in self._kept:
            kept.result = None

    # ---- the exchange --------------------------------------------------------------------------------------------

    def _exchange(self, step: ShardStep, buffers: list[torch.Tensor]) -> None:
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
            message = self._message(own and not other, self._known, own and not other)
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
                message = self._message(own, self._known, True)
                group.broadcast(message, root).wait()
        if not own:
            self._take(message, buffers)

    def _message(self, filled: bool, numbers: list[int], given: bool) -> torch.Tensor:
        parts = [torch.zeros(8, dtype=torch.uint8, device="cpu")]
        for number in numbers:
            kept = self._kept[number]
            value = kept.result if given and kept.result is not None else kept.start
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
