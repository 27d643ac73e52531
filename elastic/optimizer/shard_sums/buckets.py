"""Flat buffers in which the gradients of a rank's shards are summed along the reduction tree and sent.

If other gradients of this rank will be added to a gradient, that gradient stays where the backward pass wrote it. The
other gradients are added to that gradient along the tree (`elastic.exact.reduction_tree`) without copies, while they
are still in the caches. Each completed partial sum of this rank is written into its own flat buffer. The buffers are in
ascending order of the partials. The first buffer receives the result, and ``parameter.grad`` is a view of it.

With compression, all buffers have the smaller dtype: each shard's gradient is rounded to it before the summation, and
so is each sum. The result is then copied into a buffer of the gradients' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elastic.collectives.dtypes_and_ops import rescale_
from elastic.collectives.interface import Work
from elastic.collectives.shared_memory import arena, host_copy, host_sum
from elastic.errors import Invalid
from elastic.exact import reduction_tree
from elastic.optimizer.gradients.flat_buckets import (
    LARGE_BYTES,
    SMALL_BYTES,
    gradient_strides,
    zeros,
)

# number of padding elements after the last gradient, so that a bucket can be divided into pieces of equal length
ROOM = 64


class ShardBucket:
    """Bucket of parameters of one dtype and device.

    The bucket has ``elements`` elements, and gradient i starts at element ``offsets[i]``. Sums are computed and sent in
    ``dtype``.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        offsets: Sequence[int],
        elements: int,
        dtype: torch.dtype,
    ) -> None:
        self.parameters = parameters
        self.offsets = offsets
        self.elements = elements
        self.device = parameters[0].device
        self.dtype = dtype
        self.compressed = dtype != parameters[0].dtype
        self.missing = 0  # number of gradients of the current shard that are not ready yet
        self.work: Work | None = None
        self._small = [each.nbytes < SMALL_BYTES for each in parameters]
        self._waiting: list[int] = []
        # for each parameter, the values that later gradients are merged with
        self._held: list[list[torch.Tensor]] = [[] for _ in parameters]
        self._merge = reduction_tree.Merge(0, 0, 0)
        self._completes = False
        self._last = False
        self._divisor = 1
        self._adds = host_sum.may(dtype, self.device)
        # gradients of the parameters as set after the last shard
        self._given: list[torch.Tensor] = []
        self._versions = [0] * len(parameters)
        self.make(1)

    def make(self, depth: int) -> None:
        """Allocate buffers for ``depth`` partial sums."""
        self.depth = depth
        self.stride = self.elements + ROOM
        self.places = zeros(depth * self.stride, self.dtype, self.device).view(depth, self.stride)
        self.flat = list(self.places)
        # Views of the buffers to sum and send, in which complex numbers are pairs of real ones.
        self.sent = self.places
        if self.dtype.is_complex:
            self.sent = torch.view_as_real(self.places).view(depth, -1)
        self._views = [self._views_of(flat) for flat in self.flat]
        result = self._views[0]
        if self.compressed:
            self._result = torch.zeros(
                self.elements, dtype=self.parameters[0].dtype, device=self.device
            )
            result = self._views_of(self._result)
        self._given = [view.data for view in result]
        self._copies = [
            {
                position: host_copy.HostCopy([parameter], [view])
                for position, (parameter, view) in enumerate(
                    zip(self.parameters, views, strict=True)
                )
                if view.nbytes >= LARGE_BYTES
                and not self.compressed
                and host_copy.bytewise(parameter, view)
            }
            for views in self._views
        ]

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.as_strided(each.size(), gradient_strides(each), flat.storage_offset() + offset)
            for each, offset in zip(self.parameters, self.offsets, strict=True)
        ]

    @property
    def sent_elements(self) -> int:
        """Return the number of elements in each row of ``sent``, excluding padding."""
        return self.elements * (2 if self.dtype.is_complex else 1)

    @property
    def shared(self) -> bool:
        """Return whether the other ranks of this host can access the memory of the buffers."""
        mine = arena.mine() if self.device.type == "cpu" else None
        at, size = self.places.data_ptr(), self.places.nbytes
        return mine is not None and mine.offset_of(at, size) is not None

    # ---- gradients -----------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        for parameter in self.parameters:
            # Remove the previous step's gradient, which no shard of this step may add to.
            parameter.grad = None
        self.drop()
        self.missing = -1

    def drop(self) -> None:
        """Discard the values that are waiting to be merged."""
        for held in self._held:
            held.clear()

    def shard_begins(
        self, merge: reduction_tree.Merge, completes: bool, last: bool, divisor: int = 1
    ) -> None:
        """Begin a shard.

        Args:
            merge: merges to perform with the shard's gradient.
            completes: whether the shard completes a partial sum, which is then divided by ``divisor``.
            last: whether the shard is the last of this rank's shards.
            divisor: divisor of the partial sum.
        """
        self.missing = len(self.parameters)
        self._merge, self._completes, self._last = merge, completes, last
        self._divisor = divisor if completes else 1
        self._waiting.clear()

    def take(self, position: int) -> None:
        """Process a parameter's complete gradient for the current shard, or None if it has no gradient."""
        self._waiting.append(position)
        self.missing -= 1
        if not self._small[position]:
            self._put([self._waiting.pop()])
        if self.missing == 0 and self._waiting:
            self._put(self._waiting)
            self._waiting = []

    def _put(self, positions: list[int]) -> None:
        value = [self._leaf(position) for position in positions]
        held = [self._held[position] for position in positions]
        views = None
        if self._completes:
            place = self._merge.place - self._merge.merges
            views = [self._views[place][position] for position in positions]
        if not self._add_up(value, held, views):
            for merge in range(self._merge.merges, 0, -1):
                lower = [each.pop() for each in held]
                if views is not None and merge == 1 and len(positions) == 1:
                    value = [torch.add(lower[0], value[0], out=views[0])]
                else:
                    torch._foreach_add_(lower, value)
                    value = lower
            if views is None:
                for stack, each in zip(held, value, strict=True):
                    stack.append(each)
            else:
                self._write(positions, value, views)
        for position in positions:
            given = self._given[position]
            self.parameters[position].grad = given if self._last else None
            self._versions[position] = given._version

    def _add_up(
        self,
        values: list[torch.Tensor],
        held: list[list[torch.Tensor]],
        views: list[torch.Tensor] | None,
    ) -> bool:
        """Perform all merges of one gradient in a single pass over memory. Return False if that is not possible.

        The gradient is merged with the most recently held values, newest first. The tree's sum is therefore a
        sequential sum: ``a + (b + (c + d))`` is bitwise identical to ``((d + c) + b) + a``.
        """
        merges = self._merge.merges
        if not self._adds or merges == 0 or len(values) > 1:
            return False
        (value,), (stack,) = values, held
        into = stack[-merges] if views is None else views[0]
        if not host_sum.add_up([value, *stack[: -merges - 1 : -1]], into, self._divisor):
            return False
        del stack[-merges:]
        if views is None:
            stack.append(into)
        return True

    def _leaf(self, position: int) -> torch.Tensor:
        gradient = self.parameters[position].grad
        if gradient is None:
            return torch.zeros_like(self._views[0][position])
        return gradient.detach().to(self.dtype)

    def _write(
        self, positions: list[int], value: list[torch.Tensor], views: list[torch.Tensor]
    ) -> None:
        copy = None
        if len(positions) == 1 and host_copy.bytewise(value[0], views[0]):
            copy = self._copies[self._merge.place - self._merge.merges].get(positions[0])
        if value[0] is views[0]:
            pass
        elif copy is not None:
            copy.run(value, [value[0].data_ptr()])
        else:
            torch._foreach_copy_(views, value)
        # Not torch._foreach_div_, which would first round the divisor to half precision.
        for view in views:
            rescale_(view, 1.0, self._divisor)

    def values(self, position: int) -> list[torch.Tensor]:
        """Return the views of a parameter in this rank's buffers, one for each partial sum."""
        return [views[position] for views in self._views]

    def give(self, divisor: int) -> None:
        """Set the parameters' gradients to views of the complete sum, even on a rank without shards.

        A compressed sum is divided by ``divisor`` here. Other sums have already been divided.
        """
        if self.compressed:
            self._result.copy_(self.flat[0][: self.elements])
            rescale_(self._result, 1.0, divisor)
        for parameter, given in zip(self.parameters, self._given, strict=True):
            if parameter.grad is not given:
                parameter.grad = given

    def check_untouched(self, name_of: Callable[[torch.Tensor], str]) -> None:
        """Raise Invalid if the script has modified a gradient since the last shard was processed."""
        for parameter, given, version in zip(
            self.parameters, self._given, self._versions, strict=True
        ):
            if parameter.grad is not given or given._version != version:
                raise Invalid(
                    f"the gradient of {name_of(parameter)} was changed within the loop over the shards, before"
                    " the gradients of all shards were averaged: clip and change gradients after the loop."
                    " DistributedDataParallel, or a second optimizer of the same parameters, may have changed"
                    " the gradient"
                )
