"""Moves gradients into flat buffers and back: how a bucket is filled, sent and unpacked, never when.

A `FlatBucket` owns one buffer and a view of it per parameter. A gradient that is no view yet is scaled while it is
copied in, and the parameter's ``grad`` then *is* the view: after the reduction nothing is copied back. A
`CompressedGradient` carries one gradient through a user's own compression class. The first bucket of a plan also
carries the mark (see `elastic.plans`); a `MarkBucket` does where there is no flat one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from elastic.collectives.interface import Collectives, Op, Work
from elastic.plans import Mark, Wire, mark_value

SMALL_BYTES = 32 << 10  # of a gradient that is cheaper to copy together with others


class Compressor(Protocol):
    """What a compression class offers; the methods are static in Horovod's and in most users' classes."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor: ...


class GradientBucket(Protocol):
    """Gradients of one dtype and device that travel together."""

    parameters: Sequence[torch.Tensor]
    missing: int  # gradients that are not ready yet
    device: torch.device

    def wire(self) -> Wire:
        """What travels."""

    def fill(self, position: int, scale: float) -> None:
        """Take the gradient of ``parameters[position]`` as it is now, times ``scale``; zeros if it has none."""

    def launch(self, group: Collectives, op: Op) -> None:
        """Start the reduction. Raises CollectiveFailed."""

    def finish(self, scale: float) -> None:
        """Wait, multiply the result by ``scale``, and make it the parameters' gradients. Raises CollectiveFailed."""

    def discard(self, position: int) -> None:
        """Take a gradient that was filled in away from its parameter: it is neither the local nor the reduced one."""

    def drop(self) -> list[Work]:
        """Forget what is under way. Returns the works that may still run."""


class FlatBucket:
    """One buffer of ``elements`` elements; gradient i of shape ``parameters[i].shape`` starts at ``offsets[i]``.

    The parameters come smallest first.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        offsets: Sequence[int],
        elements: int,
        wire_dtype: torch.dtype,
        *,
        marked: bool = False,
    ) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        dtype, device = parameters[0].dtype, parameters[0].device
        self.device = device
        length = elements + marked
        # Zeros, because the gaps between gradients travel too.
        self._flat = torch.zeros(length, dtype=dtype, device=device)
        self._views = _views(self._flat, parameters, offsets)
        self._wire, self._wires = self._flat, self._views
        if wire_dtype != dtype:
            self._wire = torch.zeros(length, dtype=wire_dtype, device=device)
            self._wires = _views(self._wire, parameters, offsets)
        self._mark = self._wire[elements] if marked else None
        self._pointers = [view.data_ptr() for view in self._views]
        # What parameters get as ``grad``. Module.to() and some scripts keep such an object and give it other memory,
        # so that these are no views of the buffer any more.
        self._given = [view.view_as(view) for view in self._views]
        self._small = [
            parameter.numel() * parameter.element_size() < SMALL_BYTES for parameter in parameters
        ]
        large = [offset for offset, small in zip(offsets, self._small, strict=True) if not small]
        self._smalls = self._wire[: min(large, default=elements)]
        self._waiting: list[int] = []  # small ones, to be filled in together
        self._scale = 1.0
        self._work: Work | None = None

    def wire(self) -> Wire:
        return wire_of(self._wire)

    def fill(self, position: int, scale: float) -> None:
        if self._small[position]:
            self._waiting.append(position)
            self._scale = scale
            return
        view, wire = self._views[position], self._wires[position]
        gradient = self.parameters[position].grad
        if gradient is None:
            wire.zero_()
        elif gradient.is_sparse:
            torch.mul(gradient.to_dense(), scale, out=wire)
        elif wire is not view or not self._is_given(gradient, position):
            torch.mul(gradient, scale, out=wire)
        elif scale != 1.0:
            wire.mul_(scale)
        if wire is view:
            self._give(position)

    def _fill_small(self) -> None:
        """All small ones at once: for each alone the call would cost more than its few bytes."""
        wires, gradients = [], []
        for position in self._waiting:
            gradient = self.parameters[position].grad
            if gradient is None:
                self._wires[position].zero_()
            elif self._wire is not self._flat or not self._is_given(gradient, position):
                wires.append(self._wires[position])
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if wires:
            torch._foreach_copy_(wires, gradients)
        if self._scale != 1.0:
            self._smalls.mul_(self._scale)
        if self._wire is self._flat:
            for position in self._waiting:
                self._give(position)
        self._waiting.clear()

    def launch(self, group: Collectives, op: Op) -> None:
        if self._waiting:
            self._fill_small()
        if self._mark is not None:
            self._mark.fill_(mark_value(op, Mark.STEP))  # there is the last step's result
        self._work = group.allreduce(self._wire, op)

    def finish(self, scale: float) -> None:
        assert self._work is not None, "a bucket is waited for that was never launched"
        self._work.wait()
        self._work = None
        if self._wire is not self._flat:
            torch.mul(self._wire, scale, out=self._flat) if scale != 1.0 else self._flat.copy_(
                self._wire
            )
        elif scale != 1.0:
            self._flat.mul_(scale)
        for position in range(len(self.parameters)):
            # Again, because a model.zero_grad() since backward takes them away.
            self._give(position)

    def discard(self, position: int) -> None:
        parameter = self.parameters[position]
        if parameter.grad is not None and self._is_given(parameter.grad, position):
            parameter.grad = None

    def drop(self) -> list[Work]:
        self._waiting.clear()
        works = [] if self._work is None else [self._work]
        self._work = None
        return works

    def _give(self, position: int) -> None:
        parameter = self.parameters[position]
        if parameter.grad is None or not self._is_given(parameter.grad, position):
            if self._given[position].data_ptr() != self._pointers[position]:
                self._given[position] = self._views[position].view_as(self._views[position])
            parameter.grad = self._given[position]

    def _is_given(self, gradient: torch.Tensor, position: int) -> bool:
        return gradient is self._given[position] and gradient.data_ptr() == self._pointers[position]


class CompressedGradient:
    """One gradient and the user's compression class. What it makes of the tensor must have one shape on all ranks."""

    def __init__(self, parameter: torch.Tensor, compression: Compressor) -> None:
        self.parameters: Sequence[torch.Tensor] = (parameter,)
        self.missing = 1
        self.device = parameter.device
        self._compression = compression
        self._scale = 1.0
        self._wire: torch.Tensor | None = None
        self._context: Any = None
        self._work: Work | None = None

    def wire(self) -> Wire:
        (parameter,) = self.parameters
        return wire_of(self._compression.compress(torch.zeros_like(parameter))[0])

    def fill(self, position: int, scale: float) -> None:
        self._scale = scale

    def launch(self, group: Collectives, op: Op) -> None:
        (parameter,) = self.parameters
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        # Scaled before it is compressed, as sums in a small dtype may overflow.
        gradient = parameter.grad if self._scale == 1.0 else parameter.grad * self._scale
        wire, self._context = self._compression.compress(gradient)
        self._wire = wire.contiguous()
        self._work = group.allreduce(self._wire, op)

    def finish(self, scale: float) -> None:
        assert self._work is not None, "a gradient is waited for that was never launched"
        assert self._wire is not None
        self._work.wait()
        self._work = None
        (parameter,) = self.parameters
        result = self._compression.decompress(self._wire, self._context)
        parameter.grad = result if scale == 1.0 else result * scale
        self._wire = self._context = None

    def discard(self, position: int) -> None:
        if self._work is not None:
            self.parameters[position].grad = None

    def drop(self) -> list[Work]:
        works = [] if self._work is None else [self._work]
        self._work = None
        return works


class MarkBucket:
    """Nothing but the mark."""

    def __init__(self, device: torch.device) -> None:
        self.parameters: Sequence[torch.Tensor] = ()
        self.missing = 0
        self.device = device
        self._wire = torch.zeros(1, device=device)
        self._work: Work | None = None

    def wire(self) -> Wire:
        return wire_of(self._wire)

    def fill(self, position: int, scale: float) -> None:
        raise AssertionError("no gradient has its place here")

    def launch(self, group: Collectives, op: Op) -> None:
        self._wire.fill_(mark_value(op, Mark.STEP))
        self._work = group.allreduce(self._wire, op)

    def finish(self, scale: float) -> None:
        assert self._work is not None, "a mark is waited for that was never launched"
        self._work.wait()
        self._work = None

    def discard(self, position: int) -> None:
        pass

    def drop(self) -> list[Work]:
        works = [] if self._work is None else [self._work]
        self._work = None
        return works


def wire_of(tensor: torch.Tensor) -> Wire:
    """As a joined rank needs to know it: see `elastic.plans`."""
    return Wire(tensor.numel(), str(tensor.dtype).removeprefix("torch."), tensor.device.type)


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides that autograd gives this parameter's gradient: its own if it is dense, else contiguous ones."""
    return torch.empty_like(parameter, device="meta").stride()


def _views(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor], offsets: Sequence[int]
) -> list[torch.Tensor]:
    return [
        flat.as_strided(parameter.size(), gradient_strides(parameter), offset)
        for parameter, offset in zip(parameters, offsets, strict=True)
    ]
