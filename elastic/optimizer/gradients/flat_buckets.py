"""Buckets of gradients in flat buffers: how they are filled, reduced and unpacked.

`gradient_reducer` decides when each of these steps runs.

A `FlatBucket` owns one buffer and a view of it per parameter. A gradient that is not a view yet is copied into the
buffer, and the view becomes the parameter's ``grad``, so nothing is copied back after the reduction. Other ranks of the
host can access the buffer's memory and reduce it in place. A `CompressedGradient` contains a single gradient and uses a
user-defined compression class. The first bucket of a plan also contains the step flag (see
`elastic.optimizer.gradients.plan_agreement`). If there is no flat bucket, a `FlagBucket` contains it.

A bucket also detects whether a gradient was modified after it was copied. The reduction uses the gradient as the
backward pass left it, so clipping it afterwards would have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from elastic.collectives.dtypes_and_ops import rescale_
from elastic.collectives.interface import Collectives, Op, Work
from elastic.collectives.shared_memory import arena, host_copy
from elastic.optimizer.gradients.host_step_flag import HostStepFlag
from elastic.optimizer.gradients.not_finite import SAMPLE
from elastic.optimizer.gradients.plan_agreement import BucketSpec, StepFlag, mark_value

# size in bytes below which gradients are copied together, which is cheaper for small ones
SMALL_BYTES = 32 << 10
# The same limit for GPUs (an estimate): a joint copy takes two kernel launches (copy and scale), and separate copies
# take one launch per gradient. About this many bytes can be read and written in the time of one launch.
GPU_SMALL_BYTES = 4 << 20
# Gradients of at least this size in bytes are copied with non-temporal stores: they would be evicted from the caches
# before their bucket is reduced. This reduces the time of a step by 5 % with layers of 20 MB (benchmarks/step.py
# --models mlp --ranks 2).
LARGE_BYTES = 1 << 20


class Compressor(Protocol):
    """Interface of a compression class. The methods are static in Horovod's and most user-defined classes."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]: ...

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor: ...


class Scales(NamedTuple):
    """Factors by which gradients are multiplied at each stage of a reduction."""

    filling: float = 1.0  # multiplier for gradients while they are copied into the bucket
    reducing: float = 1.0  # multiplier that the group applies during the reduction
    reducing_over: int = 1  # divisor that the group applies during the reduction
    finishing: float = 1.0  # multiplier for the result of the reduction
    finishing_over: int = 1


UNSCALED = Scales()

# position of a gradient, the gradient, and its version counter when it was copied
_Watched = tuple[int, torch.Tensor, int]


class GradientBucket(Protocol):
    """Gradients of one dtype and device that are reduced in one operation."""

    parameters: Sequence[torch.Tensor]
    missing: int  # number of gradients that are not ready yet
    device: torch.device
    scales: Scales

    def wire(self) -> BucketSpec:
        """Return the description of the buffer that is sent."""

    def fill(self, position: int, *, watch: bool) -> None:
        """Copy the gradient of ``parameters[position]`` into the bucket, or zeros if it has none.

        The copy may be delayed until `launch`.

        Args:
            position: position of the parameter.
            watch: whether the script may run, and change the gradient, before `finish`. Such a change is then detected.
        """

    def launch(self, group: Collectives, op: Op, mark: StepFlag = StepFlag.STEP) -> None:
        """Start the reduction of the bucket.

        Args:
            group: group of the ranks that reduce.
            op: reduction operation.
            mark: step flag to send, if the bucket contains one.

        Raises:
            CollectiveFailed: a rank was lost.
        """

    def reduced_flag(self, op: Op) -> StepFlag:
        """Return the reduced step flag of a bucket that contains one. Call `finish` first.

        This method synchronizes with the device.
        """

    def finish(self) -> int | None:
        """Wait for the reduction, and set the parameters' gradients to its results.

        Returns:
            Position of a watched gradient that the script has changed, or None.

        Raises:
            CollectiveFailed: a rank was lost.
        """

    def discard(self, position: int) -> None:
        """Remove a parameter's gradient if it was filled into the bucket, because it may be partially reduced."""

    def drop(self) -> list[Work]:
        """Abandon the reduction. Return its works that may still be running."""


class FlatBucket:
    """Bucket with one flat buffer of ``elements`` elements.

    Gradient i, of shape ``parameters[i].shape``, starts at element ``offsets[i]``.

    Parameters are in ascending order of size.
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
        self.scales = UNSCALED
        dtype, device = parameters[0].dtype, parameters[0].device
        self.device = device
        length = elements + marked
        # Zeroed, because the padding between gradients is also sent.
        self._wire = zeros(length, wire_dtype, device)
        self._wires = _views(self._wire, parameters, offsets)
        # buffer to send, in which complex numbers are viewed as pairs of real numbers
        self._sent = _real(self._wire)
        # leading elements of the reduced buffer, which are checked for infinity and NaN
        self.sample = self._sent[: min(elements, SAMPLE)]
        self._flat, self._views = self._wire, self._wires
        self._in_place = wire_dtype == dtype
        if not self._in_place:
            self._flat = torch.zeros(length, dtype=dtype, device=device)
            self._views = _views(self._flat, parameters, offsets)
        self._copies = {
            position: host_copy.HostCopy([parameter], [wire])
            for position, (parameter, wire) in enumerate(zip(parameters, self._wires, strict=True))
            if self._in_place and wire.nbytes >= LARGE_BYTES and host_copy.bytewise(parameter, wire)
        }
        self._mark = self._sent[-1] if marked else None
        self._reduced_flag = HostStepFlag(self._sent[-1]) if marked else None
        self._pointers = [view.data_ptr() for view in self._views]
        # Tensors that become ``parameter.grad``. They are separate from the views, because Module.to() and some scripts
        # replace a gradient's memory, and because each gradient needs its own version counter.
        self._given = [view.data for view in self._views]
        small = GPU_SMALL_BYTES if device.type == "cuda" else SMALL_BYTES
        self._small = [
            parameter.numel() * parameter.element_size() < small for parameter in parameters
        ]
        large = [offset for offset, small in zip(offsets, self._small, strict=True) if not small]
        self._smalls = self._wire[: min(large, default=elements)]
        # Number of sparse dimensions of each sparse gradient that is reduced as a dense one, by position. The results
        # are converted back for optimizers that require sparse gradients.
        self._sparse: dict[int, int] = {}
        # Small gradients to copy together: position, gradient and version. The last two are set only for watched
        # gradients.
        self._waiting: list[tuple[int, torch.Tensor | None, int]] = []
        # position of a gradient that the script changed before it was copied, or None
        self._changed: int | None = None
        self._watched: list[_Watched] = []
        self._work: Work | None = None

    def wire(self) -> BucketSpec:
        return wire_of(self._sent)

    def fill(self, position: int, *, watch: bool) -> None:
        if self._small[position]:
            waits = self.parameters[position].grad if watch else None
            self._waiting.append((position, waits, 0 if waits is None else waits._version))
            return
        scale, wire = self.scales.filling, self._wires[position]
        gradient = self.parameters[position].grad
        if gradient is None:
            wire.zero_()
        elif not self._in_place or not self._is_given(gradient, position):
            gradient = self._dense(gradient, position)
            if scale == 1.0:
                self._copy(position, gradient)
            else:
                torch.mul(gradient, scale, out=wire)
        elif scale != 1.0:
            wire.mul_(scale)
        if self._in_place:
            gradient = self._give(position)
        if watch and gradient is not None:
            self._watched.append((position, gradient, gradient._version))

    def _copy(self, position: int, gradient: torch.Tensor) -> None:
        copy, wire = self._copies.get(position), self._wires[position]
        if copy is not None and host_copy.bytewise(gradient, wire):
            copy.run([gradient], [gradient.data_ptr()])
        else:
            wire.copy_(gradient)

    def _dense(self, gradient: torch.Tensor, position: int) -> torch.Tensor:
        if not gradient.is_sparse:
            return gradient
        self._sparse[position] = gradient.sparse_dim()
        return gradient.to_dense()

    def _fill_small(self) -> None:
        wires, gradients, missing = [], [], []
        for position, seen, version in self._waiting:
            gradient = self.parameters[position].grad
            if gradient is None:
                missing.append(self._wires[position])
            else:
                if seen is not None and (gradient is not seen or gradient._version != version):
                    self._changed = position
                if not self._in_place or not self._is_given(gradient, position):
                    wires.append(self._wires[position])
                    gradients.append(self._dense(gradient, position))
            if self._in_place:
                gradient = self._give(position)
            if seen is not None and gradient is not None:
                self._watched.append((position, gradient, gradient._version))
        if missing:
            torch._foreach_zero_(missing)
        if wires:
            torch._foreach_copy_(wires, gradients)
        if self.scales.filling != 1.0:
            self._smalls.mul_(self.scales.filling)
        self._waiting.clear()

    def launch(self, group: Collectives, op: Op, mark: StepFlag = StepFlag.STEP) -> None:
        if self._waiting:
            self._fill_small()
        if self._mark is not None:
            # overwrites the reduced flag of the previous step
            self._mark.fill_(mark_value(op, mark))
        self._work = _reduce(group, self._sent, op, self.scales)

    def finish(self) -> int | None:
        assert self._work is not None, "waiting for a bucket that was never launched"
        # Do the host's work before the wait: after the wait, the GPU would be idle until the next launch.
        changed, self._changed = self._changed, None
        for position, gradient, version in self._watched:
            if _changed(self.parameters[position], gradient, version):
                changed = position
        self._watched.clear()
        for position in range(len(self.parameters)):
            # Set the gradient again: model.zero_grad() after the backward pass may have removed it.
            self._give(position)
        self._work.wait()
        self._work = None
        if self._reduced_flag is not None:
            self._reduced_flag.fetch()
        scale, divisor = self.scales.finishing, self.scales.finishing_over
        if not self._in_place:
            if scale == 1.0:
                self._flat.copy_(self._wire)
            else:
                torch.mul(self._wire, scale, out=self._flat)
            scale = 1.0
        rescale_(self._flat, scale, divisor)
        for position, dims in self._sparse.items():
            self.parameters[position].grad = self._given[position].to_sparse(dims)
        return changed

    def reduced_flag(self, op: Op) -> StepFlag:
        assert self._reduced_flag is not None, "this bucket carries no mark"
        return self._reduced_flag.read(op)

    def discard(self, position: int) -> None:
        gradient = self.parameters[position].grad
        if gradient is not None and (
            position in self._sparse or self._is_given(gradient, position)
        ):
            self.parameters[position].grad = None

    def drop(self) -> list[Work]:
        self._waiting.clear()
        self._watched.clear()
        self._changed = None
        works = [] if self._work is None else [self._work]
        self._work = None
        return works

    def _give(self, position: int) -> torch.Tensor:
        parameter, given = self.parameters[position], self._given[position]
        if given.data_ptr() != self._pointers[position]:
            given = self._given[position] = self._views[position].data
        if parameter.grad is not given:
            parameter.grad = given
        return given

    def _is_given(self, gradient: torch.Tensor, position: int) -> bool:
        return gradient is self._given[position] and gradient.data_ptr() == self._pointers[position]


class CompressedGradient:
    """Bucket of one gradient with a user-defined compression.

    The compressed tensors must have equal shapes on all ranks.
    """

    def __init__(self, parameter: torch.Tensor, compression: Compressor) -> None:
        self.parameters: Sequence[torch.Tensor] = (parameter,)
        self.missing = 1
        self.scales = UNSCALED
        self.device = parameter.device
        self._compression = compression
        self._wire: torch.Tensor | None = None
        self._context: Any = None
        # number of sparse dimensions of the gradient, or None, as in FlatBucket
        self._sparse: int | None = None
        self._waits: _Watched | None = None  # the gradient until it is launched, then None
        self._changed = False  # whether the script changed the gradient before the launch
        self._watched: _Watched | None = None
        self._work: Work | None = None

    def wire(self) -> BucketSpec:
        (parameter,) = self.parameters
        compressed, _ = self._compression.compress(torch.zeros_like(parameter))
        return wire_of(_real(compressed.contiguous()))

    def fill(self, position: int, *, watch: bool) -> None:
        (parameter,) = self.parameters
        if watch and parameter.grad is not None:
            self._waits = (0, parameter.grad, parameter.grad._version)

    def launch(self, group: Collectives, op: Op, mark: StepFlag = StepFlag.STEP) -> None:
        (parameter,) = self.parameters
        watch = self._waits is not None
        self._changed = self._waits is not None and _changed(parameter, *self._waits[1:])
        self._waits = None
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            self._sparse = parameter.grad.sparse_dim()
            parameter.grad = parameter.grad.to_dense()
        # Scale before the compression, because sums in a smaller dtype may overflow.
        scale = self.scales.filling
        gradient = parameter.grad if scale == 1.0 else parameter.grad * scale
        wire, self._context = self._compression.compress(gradient)
        # Use .data, so that an in-place reduction of an uncompressed gradient does not increase its version counter,
        # which would look like a change by the script.
        self._wire = wire.contiguous().data
        if watch:
            # Compress only now, at the launch, because a compression with error feedback may modify the gradient.
            self._watched = (0, parameter.grad, parameter.grad._version)
        self._work = _reduce(group, _real(self._wire), op, self.scales)

    def finish(self) -> int | None:
        assert self._work is not None, "waiting for a gradient that was never launched"
        assert self._wire is not None
        self._work.wait()
        self._work = None
        (parameter,) = self.parameters
        changed = self._changed or (
            self._watched is not None and _changed(parameter, *self._watched[1:])
        )
        result = self._compression.decompress(self._wire, self._context)
        scale, divisor = self.scales.finishing, self.scales.finishing_over
        result = result if scale == 1.0 else result * scale
        if divisor != 1:
            whole = not (result.is_floating_point() or result.is_complex())
            result = result / divisor if whole else rescale_(result.clone(), 1.0, divisor)
        parameter.grad = result if self._sparse is None else result.to_sparse(self._sparse)
        self._wire = self._context = self._watched = None
        return 0 if changed else None

    def reduced_flag(self, op: Op) -> StepFlag:
        raise AssertionError("this bucket has no step flag: create it with a step flag")

    def discard(self, position: int) -> None:
        if self._work is not None:
            self.parameters[position].grad = None

    def drop(self) -> list[Work]:
        works = [] if self._work is None else [self._work]
        self._work = self._watched = self._waits = None
        return works


class FlagBucket:
    """Bucket that contains only the step flag, for plans without a flat bucket."""

    def __init__(self, device: torch.device) -> None:
        self.parameters: Sequence[torch.Tensor] = ()
        self.missing = 0
        self.scales = UNSCALED
        self.device = device
        self._wire = zeros(1, torch.float32, device)
        self._reduced_flag = HostStepFlag(self._wire)
        self._work: Work | None = None

    def wire(self) -> BucketSpec:
        return wire_of(self._wire)

    def fill(self, position: int, *, watch: bool) -> None:
        raise AssertionError(
            "this bucket holds no gradients: call fill() of the bucket that contains the parameter"
        )

    def launch(self, group: Collectives, op: Op, mark: StepFlag = StepFlag.STEP) -> None:
        self._wire.fill_(mark_value(op, mark))
        self._work = _reduce(group, self._wire, op, self.scales)

    def finish(self) -> int | None:
        assert self._work is not None, "waiting for a mark that was never launched"
        self._work.wait()
        self._work = None
        self._reduced_flag.fetch()
        return None

    def reduced_flag(self, op: Op) -> StepFlag:
        return self._reduced_flag.read(op)

    def discard(self, position: int) -> None:
        pass

    def drop(self) -> list[Work]:
        works = [] if self._work is None else [self._work]
        self._work = None
        return works


def zeros(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Create a flat tensor of zeros for reductions. On the CPU, other ranks of the host can access its memory."""
    if device.type == "cpu":
        return arena.zeros(elements, dtype)
    return torch.zeros(elements, dtype=dtype, device=device)


def wire_of(tensor: torch.Tensor) -> BucketSpec:
    """Return the description of a buffer, which is sent to joined ranks.

    See `elastic.optimizer.gradients.plan_agreement`.
    """
    return BucketSpec(tensor.numel(), str(tensor.dtype).removeprefix("torch."), tensor.device.type)


def gradient_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives a parameter's gradient.

    They are the parameter's strides if it is dense, otherwise contiguous ones.
    """
    return torch.empty_like(parameter, device="meta").stride()


def _real(wire: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor.

    Complex numbers become pairs of real ones, which all backends can reduce.
    """
    return torch.view_as_real(wire).view(-1) if wire.is_complex() else wire


def _reduce(group: Collectives, wire: torch.Tensor, op: Op, scales: Scales) -> Work:
    return group.allreduce(wire, op, scales.reducing, scales.reducing_over)


def _changed(parameter: torch.Tensor, gradient: torch.Tensor, version: int) -> bool:
    """Return whether the script has changed or replaced the gradient.

    A gradient that was removed, for example by ``model.zero_grad()``, does not count as changed.
    """
    now = parameter.grad
    return now is not None and (now is not gradient or now._version != version)


def _views(
    flat: torch.Tensor, parameters: Sequence[torch.Tensor], offsets: Sequence[int]
) -> list[torch.Tensor]:
    return [
        flat.as_strided(parameter.size(), gradient_strides(parameter), offset)
        for parameter, offset in zip(parameters, offsets, strict=True)
    ]
