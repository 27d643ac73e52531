"""`DistributedOptimizer` with ``op=Adasum``: every rank steps by itself, and the steps are added up with Adasum.

The user's optimizer takes one ordinary step with this rank's own gradients. What it changed, the *delta* of each
parameter, is reduced with Adasum over all ranks, and the result is added to the parameters as they were before. So
learning rates need not be scaled with the number of ranks, and optimizers of any kind work; their state (moments, step
counters) follows the local gradients and differs between ranks. From Maleki et al., "Scaling WrappedOptimizer Training
with Adaptive Summation", MLSys 2021, arXiv 2006.02924, section 4.

Deltas travel after backward and not during it: an optimizer that is stepped once as a whole keeps its fused kernels,
its step hooks and its closure, which one stepped for each parameter alone does not. Nothing here talks to other
processes but by `elastic.api.ops`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from elastic.api import ops
from elastic.collectives.algorithms import adasum
from elastic.errors import NotInitialized
from elastic.failpoints import failpoint
from elastic.optimizer.flat_buckets import Compressor
from elastic.optimizer.gradients.gradient_hooks import GradientHooks
from elastic.optimizer.wrapped_optimizer import WrappedOptimizer
from elastic.runtime import lifecycle


class AdasumDistributed(WrappedOptimizer):
    """What ``op=Adasum`` adds to an optimizer's class; comes before that class in the method order."""

    _compression: Compressor
    _sparse_as_dense: bool

    def synchronize(self) -> None:
        """Does nothing: gradients stay this rank's own, and deltas travel in `step`."""

    def skip_synchronize(self) -> NoReturn:
        """Raises AssertionError: without exchanging deltas the ranks' parameters would drift apart."""
        raise AssertionError(
            "skip_synchronize() can't be used with op=Adasum: step() itself exchanges its changes; call"
            " optimizer.step() without it"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients, and apply the Adasum of all ranks' steps instead.

        Every rank must call it equally often. A parameter without a gradient here takes the others' steps. If it
        raises, as it does with PeerLost when the world broke, the parameters are as they were before. Raises Invalid
        (a ValueError) in a world whose size is no power of two.
        """
        world = lifecycle.current()
        # Before the values change, so that nobody takes the state for unchanged if the step fails half way.
        world.activity += 1
        failpoint("optimizer-step")
        parameters = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        own_step = super(WrappedOptimizer, self).step
        if world.place.size == 1 or not parameters:
            return own_step() if closure is None else own_step(closure)
        adasum.check(world.place.size)
        with torch.no_grad():
            before = [parameter.detach().clone() for parameter in parameters]
            try:
                result = self._step_alone(closure)
                deltas = torch._foreach_sub(parameters, before)
            finally:
                # Whatever happens from here on, nobody finds them half way.
                torch._foreach_copy_(parameters, before)
            del before
            self._reduce(parameters, list(deltas))
            torch._foreach_add_(parameters, deltas)
        self._reducer.discard()
        return result

    # As in `WrappedOptimizer`: the user's class runs its step hooks.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own, at any time: no gradient is ever under way."""
        super().zero_grad(set_to_none)
        self._reducer.discard()

    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:
        """The user's optimizer's own step. With a GradScaler, it may be none."""
        if closure is not None:
            closure = self._forgetting(closure)
        if self._sparse_as_dense:
            for parameter, gradient in self._gradients():
                if gradient.is_sparse:
                    parameter.grad = gradient.to_dense()
        own_step = super(WrappedOptimizer, self).step
        found_inf = self.__dict__.get("found_inf")
        if found_inf is None or self._takes_scaler:
            return own_step() if closure is None else own_step(closure)
        scale = self.__dict__.get("grad_scale")
        # The step would take them for its own business; GradScaler deletes them afterwards.
        self.__dict__.update(found_inf=None, grad_scale=None)
        try:
            if float(found_inf):
                return None
            if scale is not None:
                for _, gradient in self._gradients():
                    gradient.div_(scale.to(gradient.device))
            return own_step()
        finally:
            self.__dict__.update(found_inf=found_inf, grad_scale=scale)

    def _gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, parameter.grad

    def _forgetting(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """An optimizer may call its closure, and with it backward, many times in a step."""

        def forgetting() -> Any:
            self._reducer.discard()
            with torch.enable_grad():
                loss = closure()
            self._reducer.discard()
            return loss

        return forgetting

    def _reduce(self, parameters: list[torch.Tensor], deltas: list[torch.Tensor]) -> None:
        """Overwrites each delta with the Adasum of all ranks'. Raises PeerLost, and what `elastic.api.ops` raises."""
        by_device: dict[torch.device, list[int]] = {}
        for index, delta in enumerate(deltas):
            by_device.setdefault(delta.device, []).append(index)
        for indices in by_device.values():
            # Contiguous, so that ranks may keep a parameter in different memory formats.
            whole = [_real(deltas[index]).contiguous() for index in indices]
            packed = [self._compression.compress(each) for each in whole]
            name = f"adasum.{self._name(parameters[indices[0]])}"
            reduced = ops.grouped_allreduce_([each for each, _ in packed], name=name, op=ops.Adasum)
            for index, result, (_, context) in zip(indices, reduced, packed, strict=True):
                _real(deltas[index]).copy_(self._compression.decompress(result, context))

    def _name(self, parameter: torch.Tensor) -> str:
        return self._parameter_names.get(parameter, "parameters")

    @property
    def _takes_scaler(self) -> bool:
        """Whether the user's optimizer itself undoes a GradScaler's scale, as fused ones do."""
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() asks this. Told no, it would not call step() on a rank that found infinities, and the others
        # would wait for it. Told yes, it always does: such a rank adds a delta of zeros, and lowers its own scale.
        world = lifecycle.active()
        return self._takes_scaler or (world is not None and world.place.size > 1)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports


def prepare(wrapped: WrappedOptimizer, compression: Compressor, sparse_as_dense: bool) -> None:
    """Says how the deltas of an `AdasumDistributed` travel."""
    assert isinstance(wrapped, AdasumDistributed)
    wrapped._compression = compression
    wrapped._sparse_as_dense = sparse_as_dense


class BackwardPasses:
    """Counts the backward passes of a step, in a world of more than one.

    Gradients add up in the parameters themselves, so a step may come after fewer; more than were announced are an
    error in the script, raised in backward.
    """

    pending = False  # no gradient is ever under way

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], passes: int
    ) -> None:
        # Weak, so that an optimizer that is dropped takes its hooks with it.
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._passes = passes
        self._counts: dict[int, int] = {}  # by id of the parameter
        self._generation: int | None = None  # in which they were counted
        self._hooks = GradientHooks(self)

    @property
    def passes(self) -> int:
        return self._passes

    def set_passes(self, passes: int) -> None:
        self._passes = passes
        self.discard()

    def install_hooks(self) -> None:
        """Have backward call us for every parameter that requires a gradient. Safe to repeat."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        self._hooks.install(parameter for group in groups for parameter in group["params"])

    def discard(self) -> None:
        """A step begins anew."""
        self._counts.clear()

    def finish(self) -> None:
        """Nothing is under way."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """``parameter.grad`` has received one backward pass."""
        try:
            world = lifecycle.current()
        except NotInitialized:
            return
        if world.place.size == 1:
            return
        if self._generation != world.generation:  # an interrupted step is begun anew
            self.discard()
            self._generation = world.generation
        count = self._counts.get(id(parameter), 0) + 1
        if count > self._passes:
            raise AssertionError(
                f"{self._names.get(parameter, 'a parameter')} received more than"
                f" backward_passes_per_step={self._passes} gradients before step(); to accumulate over several"
                " backward passes, increase backward_passes_per_step"
            )
        self._counts[id(parameter)] = count


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
