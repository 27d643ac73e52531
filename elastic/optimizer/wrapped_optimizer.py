"""Methods that `elastic.optimizer.distributed_optimizer` adds to the class of the user's optimizer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.failpoints import failpoint
from elastic.optimizer.gradients import reduction_description
from elastic.runtime import lifecycle

# default name of a parameter, formatted with the index of its group and its index in the group
UNNAMED = "allreduce.noname.{}.{}"


class Reducer(Protocol):
    """Interface of an object that reduces the gradients, or the steps, of one optimizer."""

    @property
    def passes(self) -> int: ...

    @property
    def pending(self) -> bool: ...

    def set_passes(self, passes: int) -> None: ...

    def install_hooks(self) -> None: ...

    def finish(self) -> None: ...

    def discard(self) -> None: ...


class WrappedOptimizer(torch.optim.Optimizer):
    """Methods that `DistributedOptimizer` adds to the class of the wrapped optimizer.

    They take precedence over the methods of that class.
    """

    gradients_made: reduction_description.OptimizerArguments
    _parameter_names: dict[torch.Tensor, str]
    _synchronized: bool  # whether the script has called synchronize() since the last step
    _synchronized_for_scaler: bool
    _should_synchronize: bool
    _reducer: Reducer
    # the user's original optimizer; a scheduler that was created with it uses its groups and its step()
    _unwrapped: weakref.ref[torch.optim.Optimizer]

    @property
    def backward_passes_per_step(self) -> int:
        return self._reducer.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes per step. Call this between steps, on all ranks.

        Raises:
            Invalid: the number is less than 1.
        """
        check_passes(passes)
        self._reducer.set_passes(passes)

    def gradient_layout(self, name: str) -> list[str]:
        """Return this optimizer's lines of the state's layout, which must be equal on all ranks.

        See `elastic.optimizer.gradients.reduction_description`.
        """
        parameters = (each for group in self.param_groups for each in group["params"])
        return reduction_description.lines(
            name, self.gradients_made, parameters, self._parameter_names
        )

    def gradient_bytes(self) -> int:
        """Return the size in bytes of the gradients' CPU buckets, as far as it is known before the first step."""
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
        """Return the name that ``named_parameters`` gives a parameter."""
        return self._parameter_names.get(parameter, "a parameter without a name")

    def synchronize(self) -> None:
        """Wait until every parameter's ``grad`` is reduced.

        All ranks must call this method.

        All ranks must call it the same number of times. Afterwards, call ``step()`` inside `skip_synchronize`. The call
        is not needed if the last backward pass of a step has already completed the reduction: see
        `elastic.optimizer.gradients.gradient_reducer`.

        Raises:
            PeerLost: a rank was lost.
        """
        self._reducer.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager in which ``step()`` applies gradients without reducing them::

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
        """Reduce the gradients, apply them with the wrapped optimizer's ``step``, and return its result.

        If ``closure`` is given, gradients are reduced after each of its calls.

        Raises:
            PeerLost: a rank was lost.
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
        self._begin_step()
        return self._apply_gradients(super().step, closure)

    def _begin_step(self) -> None:
        # Count the step before values change: even if it fails midway, the state must not look unchanged.
        lifecycle.current().activity += 1
        if (unwrapped := self._unwrapped()) is not None:
            # Without this flag, schedulers warn that they were stepped before the optimizer.
            unwrapped._opt_called = True  # type: ignore[attr-defined]
        failpoint("optimizer-step")

    # torch wraps the step() of each class once, to run profiling and step hooks. The user's class is already wrapped:
    # if this class were wrapped as well, step hooks would run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients with the wrapped optimizer's method.

        Raises:
            AssertionError: called between ``backward()`` and ``step()``.
            Invalid: called within the loop over shards.
        """
        if self._reducer.pending:
            if (shards := self.gradients_made.shards) is not None:
                raise Invalid(
                    f"optimizer.zero_grad() was called within the loop over the shards of step {shards.step},"
                    " while gradients were being accumulated: call zero_grad() before the loop"
                )
            raise AssertionError(
                "optimizer.zero_grad() was called between loss.backward() and optimizer.step() or"
                " optimizer.synchronize(), while gradients were being reduced: call zero_grad() after the step"
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with the wrapped optimizer's method, and reset the counts of backward passes."""
        super().load_state_dict(state_dict)
        # load_state_dict() has replaced ``state`` and ``param_groups``, which are shared with the original optimizer.
        if (unwrapped := self._unwrapped()) is not None:
            unwrapped.param_groups, unwrapped.state = self.param_groups, self.state
        self._reset_passes()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group with the wrapped optimizer's method. All ranks must add the same group."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[number]["params"]):
            self._parameter_names.setdefault(parameter, UNNAMED.format(number, index))
        self._reducer.install_hooks()

    def _reset_passes(self) -> None:
        """Abandon the current step.

        This method is called by `State.restore`, because gradients of an aborted step are never used.
        """
        self._reducer.discard()
        self._synchronized = self._synchronized_for_scaler = False
        self._should_synchronize = True

    def _apply_gradients(self, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        return step() if closure is None else step(closure)

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def synchronized() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return synchronized

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads this attribute before it checks the gradients for non-finite values and possibly skips
        # step(). It must check reduced gradients, so that all ranks make the same decision.
        if self._should_synchronize and self._reducer.pending:
            self._reducer.finish()
            self._synchronized_for_scaler = True
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    def __reduce__(self) -> tuple[Any, ...]:
        # Hooks and buffers belong to this process, so copies and pickles get the user's original class.
        classes = type(self).__mro__
        user_class = classes[classes.index(WrappedOptimizer) + 1]
        return (user_class.__new__, (user_class,), self.__getstate__())


def wrap(
    optimizer: torch.optim.Optimizer,
    wrapped_class: type[WrappedOptimizer],
    names: dict[torch.Tensor, str],
    made: reduction_description.OptimizerArguments,
) -> WrappedOptimizer:
    """Create an instance of ``wrapped_class`` that shares the contents of ``optimizer``.

    Call `reduce_with` before the first use.
    """
    wrapped = wrapped_class.__new__(wrapped_class)
    # A scheduler that was created earlier has patched the optimizer's step(). Drop the patch, because it bypasses the
    # reduction.
    wrapped.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    wrapped._unwrapped = weakref.ref(optimizer)
    wrapped._parameter_names = names
    wrapped.gradients_made = made
    wrapped._synchronized = False
    wrapped._synchronized_for_scaler = False
    wrapped._should_synchronize = True
    return wrapped


def reduce_with(wrapped: WrappedOptimizer, reducer: Reducer) -> None:
    """Set the reducer of the optimizer's gradients or steps."""
    wrapped._reducer = reducer


def check_passes(passes: object) -> None:
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise Invalid(f"backward_passes_per_step is {passes!r}: pass a whole number, at least 1")
