"""The class of a wrapped optimizer: what `elastic.optimizer.distributed_optimizer` adds to the user's own class."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.failpoints import failpoint
from elastic.optimizer.gradients import gradient_layout
from elastic.runtime import lifecycle

# Without a model's names a parameter is named after its place: the group, and the index in the group.
UNNAMED = "allreduce.noname.{}.{}"


class Reducer(Protocol):
    """Reduces the gradients, or the steps, of one optimizer."""

    @property
    def passes(self) -> int: ...

    @property
    def pending(self) -> bool: ...

    def set_passes(self, passes: int) -> None: ...

    def install_hooks(self) -> None: ...

    def finish(self) -> None: ...

    def discard(self) -> None: ...


class WrappedOptimizer(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` adds to an optimizer's class; precedes that class in the method order."""

    gradients_made: gradient_layout.OptimizerArguments
    _parameter_names: dict[torch.Tensor, str]
    _synchronized: bool  # since the last step, by the user
    _synchronized_for_scaler: bool
    _should_synchronize: bool
    _reducer: Reducer

    @property
    def backward_passes_per_step(self) -> int:
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes, from the next one on. Call it between steps, on all ranks. Raises Invalid
        for less than 1.
        """
        check_passes(passes)
        self._reducer.set_passes(passes)

    def gradient_layout(self, name: str) -> list[str]:
        """The lines of a state's layout that must be the same on every rank: see
        `elastic.optimizer.gradients.gradient_layout`.
        """
        parameters = (each for group in self.param_groups for each in group["params"])
        return gradient_layout.lines(name, self.gradients_made, parameters, self._parameter_names)

    def gradient_bytes(self) -> int:
        """Size in bytes of the CPU buckets for its gradients, as far as known before a step."""
        options = self.gradients_made.options
        if options.op is Op.ADASUM or self.gradients_made.shards is not None or not options.casts:
            return 0
        return sum(
            each.numel() * options.wire_dtype(each).itemsize
            for group in self.param_groups
            for each in group["params"]
            if each.requires_grad and each.device.type == "cpu"
        )

    def parameter_name(self, parameter: torch.Tensor) -> str:
        """The name of a parameter in ``named_parameters``."""
        return self._parameter_names.get(parameter, "a parameter without a name")

    def synchronize(self) -> None:
        """Wait until every parameter's ``grad`` is reduced. Raises PeerLost when the world breaks.

        Every rank must call it equally often. Follow it with ``step()`` inside `skip_synchronize`. Not needed if the
        last backward pass of a step has done it: see `elastic.optimizer.gradients.gradient_reducer`.
        """
        self._reducer.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` inside use the gradients as they are::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, then let the optimizer apply them. Returns what its own ``step`` returns.

        Gradients that ``closure`` computes are reduced at each call of it. Raises PeerLost.
        """
        if self._should_synchronize:
            if closure is not None:
                closure = self._synchronizing(closure)
            elif not self._synchronized_for_scaler or self._reducer.pending:
                if self._synchronized and not self._synchronized_for_scaler:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() context after"
                        " optimizer.synchronize(): gradients would be reduced a second time. Call step() inside"
                        " `with optimizer.skip_synchronize():`",
                        stacklevel=2,
                    )
                self.synchronize()
        self._synchronized = self._synchronized_for_scaler = False
        # Before the values change, so that nobody takes the state for unchanged if the step fails half way.
        lifecycle.current().activity += 1
        failpoint("optimizer-step")
        return self._apply_gradients(super().step, closure)

    # torch wraps the step() of each class once, for profiling and step hooks. The user's class has been; wrapping this
    # one too would run step hooks twice.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients like the optimizer's own method. Raises AssertionError between ``backward()`` and ``step()``,
        and with shards Invalid within the loop over them.
        """
        if self._reducer.pending:
            if (shards := self.gradients_made.shards) is not None:
                raise Invalid(
                    f"optimizer.zero_grad() was called within the loop over the shards of step {shards.step}, whose"
                    " gradients are being accumulated: call it before the loop"
                )
            raise AssertionError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step() or"
                " optimizer.synchronize(), while gradients are being reduced: call it after the step"
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state like the optimizer's own method, and reset the count of backward passes."""
        super().load_state_dict(state_dict)
        self._reset_passes()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group like the optimizer's own method. All ranks must add the same."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[number]["params"]):
            self._parameter_names.setdefault(parameter, UNNAMED.format(number, index))
        self._reducer.install_hooks()

    def _reset_passes(self) -> None:
        """Abandon the present step. `State.restore` calls this: no gradient of an aborted step is ever used."""
        self._reducer.discard()
        self._synchronized = self._synchronized_for_scaler = False
        self._should_synchronize = True

    def _apply_gradients(self, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """With the user's own ``step``."""
        return step() if closure is None else step(closure)

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return synchronized

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads this first, then looks for infinities in the gradients, then may skip step(). It must
        # see the reduced gradients: only then do all ranks find, or miss, the same infinities.
        if self._should_synchronize and self._reducer.pending:
            self._reducer.finish()
            self._synchronized_for_scaler = True
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle is an optimizer like the one that was wrapped: hooks and buffers belong to this process.
        classes = type(self).__mro__
        user_class = classes[classes.index(WrappedOptimizer) + 1]
        return (user_class.__new__, (user_class,), self.__getstate__())


def wrap(
    optimizer: torch.optim.Optimizer,
    wrapped_class: type[WrappedOptimizer],
    names: dict[torch.Tensor, str],
    made: gradient_layout.OptimizerArguments,
) -> WrappedOptimizer:
    """Create an instance of ``wrapped_class`` with the contents of ``optimizer``. Usable after `reduce_with`."""
    wrapped = wrapped_class.__new__(wrapped_class)
    # A scheduler made before patched the optimizer's step(): that one knows nothing of gradients on other ranks.
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    wrapped._parameter_names = names
    wrapped.gradients_made = made
    wrapped._synchronized = False
    wrapped._synchronized_for_scaler = False
    wrapped._should_synchronize = True
    return wrapped


def reduce_with(wrapped: WrappedOptimizer, reducer: Reducer) -> None:
    """Set the object that reduces its gradients, or its steps."""
    wrapped._reducer = reducer


def check_passes(passes: object) -> None:
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise Invalid(f"backward_passes_per_step is {passes!r}: pass a whole number, at least 1")
