"""`DistributedOptimizer` with ``op=Adasum``: each rank steps with its local gradients, and Adasum combines the steps.

The user's optimizer takes an ordinary step with this rank's local gradients. The resulting change of each parameter,
its *delta*, is reduced with Adasum over all ranks, and the result is added to the previous value of the parameter. The
learning rate therefore need not be scaled with the number of ranks, and any optimizer can be used. The optimizer's
state (moments, step counters) follows the local gradients and differs between ranks. From Maleki et al., "Scaling
Distributed Training with Adaptive Summation", MLSys 2021, arXiv 2006.02924, section 4.

Deltas are reduced in ``step()``, not during the backward pass. The optimizer therefore steps all parameters at once,
and its fused kernels, step hooks and closure keep working. All communication uses `elastic.api.ops`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from elastic.api import ops
from elastic.collectives.algorithms import adasum
from elastic.errors import NotInitialized
from elastic.optimizer.gradients.flat_buckets import Compressor
from elastic.optimizer.gradients.gradient_hooks import GradientHooks
from elastic.optimizer.wrapped_optimizer import WrappedOptimizer
from elastic.runtime import lifecycle


class AdasumDistributed(WrappedOptimizer):
    """Methods that ``op=Adasum`` adds to the class of an optimizer.

    They precede the optimizer's own methods in the method resolution order.
    """

    _compression: Compressor
    _sparse_as_dense: bool

    def synchronize(self) -> None:
        """Do nothing: gradients stay local, and `step` reduces the parameter deltas instead."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError: if `step` did not reduce the deltas, the ranks' parameters would diverge."""
        raise AssertionError(
            "skip_synchronize() can't be used with op=Adasum, because step() itself reduces the changes: call"
            " optimizer.step() without skip_synchronize()"
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with this rank's gradients, then replace its deltas with the Adasum of all ranks' deltas.

        All ranks must call this method.

        All ranks must call it the same number of times. A parameter without a gradient on this rank receives the deltas
        of other ranks. On an exception, the parameters keep their previous values.

        Raises:
            PeerLost: a rank was lost.
            Invalid: (a ValueError) the size of the world is not a power of two.
        """
        world = lifecycle.current()
        self._begin_step()
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
                # Restore the parameters now, so that they have their previous values if an exception is raised below.
                torch._foreach_copy_(parameters, before)
            del before
            self._reduce(parameters, list(deltas))
            torch._foreach_add_(parameters, deltas)
        self._reducer.discard()
        return result

    # The user's class already runs the step hooks, as in `WrappedOptimizer`.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients with the wrapped optimizer's method.

        This method is allowed at any time, because no gradients are in flight.
        """
        super().zero_grad(set_to_none)
        self._reducer.discard()

    def _step_alone(self, closure: Callable[[], Any] | None) -> Any:
        """Call ``step`` of the wrapped optimizer, unless a GradScaler has found non-finite gradients."""
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
        # Hide these attributes of GradScaler from the optimizer's step, which would interpret them. GradScaler deletes
        # them afterwards.
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
        """Wrap a closure so that each call starts with zero counted backward passes.

        An optimizer may call its closure several times in a step, and each call runs a backward pass.
        """

        def forgetting() -> Any:
            self._reducer.discard()
            with torch.enable_grad():
                loss = closure()
            self._reducer.discard()
            return loss

        return forgetting

    def _reduce(self, parameters: list[torch.Tensor], deltas: list[torch.Tensor]) -> None:
        """Replace each delta by the Adasum of all ranks' deltas.

        All ranks must call this method.

        Raises:
            PeerLost: a rank was lost.
            Exception: any other error of `elastic.api.ops`, unchanged.
        """
        by_device: dict[torch.device, list[int]] = {}
        for index, delta in enumerate(deltas):
            by_device.setdefault(delta.device, []).append(index)
        for indices in by_device.values():
            # Make the deltas contiguous: the memory format of a parameter may differ between ranks.
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
        """Whether the wrapped optimizer itself unscales the gradients of a GradScaler, as fused optimizers do."""
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads this attribute. If False, it skips step() on a rank with non-finite gradients, and the
        # other ranks wait for it. If True, it always calls step(): such a rank contributes zeros and lowers its own
        # scale.
        world = lifecycle.active()
        return self._takes_scaler or (world is not None and world.place.size > 1)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports


def prepare(wrapped: WrappedOptimizer, compression: Compressor, sparse_as_dense: bool) -> None:
    """Set up the reduction of the deltas of an `AdasumDistributed`."""
    assert isinstance(wrapped, AdasumDistributed)
    wrapped._compression = compression
    wrapped._sparse_as_dense = sparse_as_dense


class BackwardPasses:
    """Counter of a step's backward passes, in worlds with more than one rank.

    Gradients accumulate in the parameters, so a step may follow fewer passes than ``backward_passes_per_step``. If
    there are more, ``backward()`` raises AssertionError.
    """

    pending = False  # always False, because Adasum never reduces gradients

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], passes: int
    ) -> None:
        # weak reference, so that the hooks are removed together with the optimizer
        self._optimizer = weakref.ref(optimizer)
        self._names = names
        self._passes = passes
        self._counts: dict[int, int] = {}  # number of backward passes, by the ID of the parameter
        self._generation: int | None = None  # generation in which the passes were counted
        self._hooks = GradientHooks(self)

    @property
    def passes(self) -> int:
        return self._passes

    def set_passes(self, passes: int) -> None:
        self._passes = passes
        self.discard()

    def install_hooks(self) -> None:
        """Install gradient hooks on all parameters that require a gradient. Idempotent."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        self._hooks.install(parameter for group in groups for parameter in group["params"])

    def discard(self) -> None:
        """Reset the counts of backward passes, to abandon the current step."""
        self._counts.clear()

    def finish(self) -> None:
        """Do nothing, because no reduction is in flight."""

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Count one backward pass of a parameter.

        This method is called after the pass has added to ``parameter.grad``.
        """
        try:
            world = lifecycle.current()
        except NotInitialized:
            return
        if world.place.size == 1:
            return
        # The world has changed and the interrupted step is restarted, so discard its counts.
        if self._generation != world.generation:
            self.discard()
            self._generation = world.generation
        count = self._counts.get(id(parameter), 0) + 1
        if count > self._passes:
            raise AssertionError(
                f"{self._names.get(parameter, 'a parameter')} received more than"
                f" backward_passes_per_step={self._passes} gradients before step(): increase"
                " backward_passes_per_step to accumulate over several backward passes"
            )
        self._counts[id(parameter)] = count


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
