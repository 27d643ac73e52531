"""Flat buffers in which the gradients of a rank's shards are added up along the tree, and from which they travel.

A bucket is a stack of flat buffers of equal layout, one for each value that waits to be added to another: see
`elastic.exact.tree`. The gradient of a shard is copied to its place, or added to the one below it, while it is still in
the caches. After the last shard the buffers have this rank's partials, lowest first; the first becomes the result, and
``parameter.grad`` is a view of it.

With compression the buffers are of the smaller dtype: each shard's gradient is rounded to it before anything is added,
and so are sums, wherever they are made. The result is then copied into a buffer of the gradients' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elastic.collectives.interface import Work
from elastic.collectives.shared_memory import arena, host_copy
from elastic.errors import Invalid
from elastic.exact import tree
from elastic.optimizer.flat_buckets import LARGE_BYTES, SMALL_BYTES, gradient_strides, zeros

ROOM = 64  # elements behind the last gradient, so that the ranks' pieces of a bucket may be of equal length


class ShardBucket:
    """``parameters[i]``, all of one dtype and device, starts at element ``offsets[i]`` of ``elements``; ``dtype``: what
    is added up and sent.
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
        self.missing = 0  # gradients of the present shard
        self.work: Work | None = None
        self._small = [each.nbytes < SMALL_BYTES for each in parameters]
        self._waiting: list[int] = []
        self._merge = tree.Merge(0, 0, 0)
        self._last = False
        self._given: list[
            torch.Tensor
        ] = []  # what parameters have as gradients after the last shard
        self._versions = [0] * len(parameters)
        self.make(1)

    def make(self, depth: int) -> None:
        """Room for so many values that wait."""
        self.depth = depth
        self.stride = self.elements + ROOM
        self.places = zeros(depth * self.stride, self.dtype, self.device).view(depth, self.stride)
        self.flat = list(self.places)
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
                if view.nbytes >= LARGE_BYTES and host_copy.bytewise(parameter, view)
            }
            for views in self._views
        ]

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat.as_strided(each.size(), gradient_strides(each), flat.storage_offset() + offset)
            for each, offset in zip(self.parameters, self.offsets, strict=True)
        ]

    @property
    def shared(self) -> bool:
        """Whether it lies where the other ranks of the host can reach it."""
        mine = arena.mine() if self.device.type == "cpu" else None
        at, size = self.places.data_ptr(), self.places.nbytes
        return mine is not None and mine.offset_of(at, size) is not None

    # ---- gradients -----------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None  # what is left of the step before is no part of any shard
        self.missing = -1

    def shard_begins(self, merge: tree.Merge, last: bool) -> None:
        self.missing = len(self.parameters)
        self._merge, self._last = merge, last
        self._waiting.clear()

    def take(self, position: int) -> None:
        """The gradient of a parameter for the present shard is complete; it may be none."""
        self._waiting.append(position)
        self.missing -= 1
        if not self._small[position]:
            self._put([self._waiting.pop()])
        if self.missing == 0:
            if self._waiting:
                self._put(self._waiting)
                self._waiting = []
            place = self._merge.place - 1
            for _ in range(self._merge.merges - 1):
                self.flat[place - 1].add_(self.flat[place])
                place -= 1

    def _put(self, positions: list[int]) -> None:
        place = self._merge.place - (self._merge.merges > 0)
        gradients, views, zero = [], [], []
        for position in positions:
            gradient = self.parameters[position].grad
            if gradient is None:
                zero.append(self._views[place][position])
            else:
                gradients.append(gradient)
                views.append(self._views[place][position])
        if self._merge.merges:
            if self.compressed:
                gradients = [each.to(self.dtype) for each in gradients]
            if gradients:
                torch._foreach_add_(views, gradients)
            if zero:
                torch._foreach_add_(zero, 0.0)  # as a buffer of zeros would be: -0.0 becomes 0.0
        else:
            copy = self._copies[place].get(positions[0]) if gradients else None
            if copy is not None and host_copy.bytewise(gradients[0], views[0]):
                copy.run(gradients, [gradients[0].data_ptr()])
            elif gradients:
                torch._foreach_copy_(views, gradients)
            if zero:
                torch._foreach_zero_(zero)
        for position in positions:
            given = self._given[position]
            self.parameters[position].grad = given if self._last else None
            self._versions[position] = given._version

    def give(self, scale: float) -> None:
        """The sum is there: the parameters' gradients are views of it, also on a spare. One that was compressed is
        multiplied by ``scale`` now; others have been.
        """
        if self.compressed:
            self._result.copy_(self.flat[0][: self.elements])
            if scale != 1.0:
                self._result.mul_(scale)
        for parameter, given in zip(self.parameters, self._given, strict=True):
            if parameter.grad is not given:
                parameter.grad = given

    def check_untouched(self, name_of: Callable[[torch.Tensor], str]) -> None:
        """Raises Invalid if the script has written into a gradient since the last shard's was taken."""
        for parameter, given, version in zip(
            self.parameters, self._given, self._versions, strict=True
        ):
            if parameter.grad is not given or given._version != version:
                raise Invalid(
                    f"the gradient of {name_of(parameter)} was changed within the loop over the shards, when it was"
                    " not yet the mean over all of them; clip and change gradients after the loop"
                )
