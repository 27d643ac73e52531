"""Reduction of a step's gradients over all ranks, for Gluon trainers, Modules and custom loops."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.mxnet import ops
from elastic.mxnet.bridge import Array
from elastic.mxnet.compression import Compression
from elastic.mxnet.parameters import only_gradient
from elastic.negotiation.process_sets import ProcessSet, global_process_set
from elastic.optimizer.gradients.gradient_options import check_compression, check_predivide_factor


def ranks(process_set: ProcessSet) -> int:
    """Return the number of ranks that average gradients with this rank, or 1 if this rank is not in the process set."""
    return (process_set.size() or 1) if process_set.included() else 1


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """MXNet optimizer that sums gradients over all ranks before each update.

    As in Horovod, gradients are averaged by dividing the optimizer's ``rescale_grad`` by the number of ranks. All other
    attributes are those of the optimizer.

    Args:
        optimizer: an MXNet optimizer. Do not use it directly afterwards.
        gradient_predivide_factor: factor by which gradients are divided before the sum and multiplied afterwards.
        num_groups: ignored, since all gradients that MXNet updates together are reduced in one call.
        process_set: the ranks that reduce their gradients together. Other ranks keep their own gradients.

    Raises:
        Invalid: ``optimizer`` is not an MXNet optimizer, or the factor is not positive.

    Example::

        optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.1 * hvd.size()))
    """

    _optimizer: Any
    _gradient_predivide_factor: float
    _process_set: ProcessSet
    _ranks: int  # the divisor that is included in the optimizer's rescale_grad

    def __init__(
        self,
        optimizer: mx.optimizer.Optimizer,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise Invalid(
                f"optimizer is a {type(optimizer).__name__}: pass an MXNet optimizer, for example"
                " mx.optimizer.create('sgd')"
            )
        check_predivide_factor(gradient_predivide_factor, Op.AVERAGE)
        # Set without attribute assignment, which would set the attributes of the wrapped optimizer.
        self.__dict__.update(
            _optimizer=optimizer,
            _gradient_predivide_factor=gradient_predivide_factor,
            _process_set=process_set,
            _ranks=1,
        )
        self._follow_the_world()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

    def __getstate__(self) -> dict[str, Any]:
        # The process set is not pickled, because it belongs to this process.
        return {**self.__dict__, "_process_set": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process_set=global_process_set)

    def create_state(self, index: int, weight: Array) -> Any:
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: int, weight: Array) -> Any:
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._reduce(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._reduce(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: dict[Any, float]) -> None:
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: dict[Any, float]) -> None:
        self._optimizer.set_wd_mult(args_wd_mult)

    def _follow_the_world(self) -> None:
        """Update the divisor if the world has changed since the last update."""
        now = ranks(self._process_set)
        self._optimizer.rescale_grad *= self._ranks / now
        self.__dict__["_ranks"] = now

    def _reduce(self, index: Any, grad: Any) -> None:
        self._follow_the_world()
        if self._ranks == 1:
            return
        several = isinstance(index, list | tuple)
        name = f"{index[0]}:{index[-1]}" if several else str(index)
        factor = self._gradient_predivide_factor
        ops.grouped_allreduce_(
            list(grad) if several else [grad],
            op=ops.Sum,
            name=f"gradients.{name}",
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self._process_set,
        )


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """Gluon trainer whose gradients are averaged over all ranks in each ``step()``.

    Args:
        params: ``net.collect_params()``, a dict, or a list of parameters, which is sorted by name.
        optimizer, optimizer_params: as for Gluon's trainer. A `DistributedOptimizer` is unwrapped, with a warning.
        compression: `Compression.none`, `Compression.fp16`, or a class with ``compress`` and ``decompress``.
        gradient_predivide_factor: factor by which gradients are divided before the sum and multiplied afterwards.
        prefix: prefix of the collective's name. If a program has several trainers, each needs its own prefix.
        num_groups: number of calls for the gradients; one by default.
        process_set: the ranks that reduce their gradients together. Other ranks keep their own gradients.

    Raises:
        Invalid: the factor is not positive, or the compression lacks one of its methods. Raised by ``step()`` if a
            parameter is on several devices.
        PeerLost: a worker was lost. Raised by ``step()`` and ``allreduce_grads()``.

    Example::

        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1 * hvd.size()})
    """

    def __init__(
        self,
        params: Any,
        optimizer: mx.optimizer.Optimizer | str,
        optimizer_params: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_compression(compression)
        check_predivide_factor(gradient_predivide_factor, Op.AVERAGE)
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._optimizer
            warnings.warn(
                "DistributedTrainer reduces gradients itself, so it uses the optimizer inside of the"
                " DistributedOptimizer",
                stacklevel=2,
            )
        if isinstance(params, list | tuple):
            params = sorted(params, key=lambda parameter: str(parameter.name))
        self._compression = compression
        self._gradient_predivide_factor = gradient_predivide_factor
        self._prefix = prefix or ""
        self._num_groups = num_groups
        self._process_set = process_set
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)

    @property
    def _scale(self) -> float:
        """Gradient scale of Gluon's trainer, without the factor 1 / batch size.

        The scale is computed in each step, because the world may change.
        """
        return self._own_scale / ranks(self._process_set)

    @_scale.setter
    def _scale(self, scale: float) -> None:
        self._own_scale = scale

    def _allreduce_grads(self) -> None:
        if ranks(self._process_set) == 1:
            return
        gradients = [only_gradient(each) for each in self._params if each.grad_req != "null"]
        packed = [self._compression.compress(gradient) for gradient in gradients]
        factor = self._gradient_predivide_factor
        for number, (begin, end) in enumerate(groups(len(packed), self._num_groups)):
            ops.grouped_allreduce_(
                [array for array, _ in packed[begin:end]],
                op=ops.Sum,
                name=f"{self._prefix}gradients.{number}",
                prescale_factor=1.0 / factor,
                postscale_factor=factor,
                process_set=self._process_set,
            )
        for gradient, (array, context) in zip(gradients, packed, strict=True):
            if array is not gradient:
                gradient[:] = self._compression.decompress(array, context)


def groups(count: int, wanted: int) -> Sequence[tuple[int, int]]:
    """Return the bounds of ``wanted`` groups of nearly equal size for ``count`` items.

    If ``wanted`` is 0, return one group.
    """
    parts = max(1, min(wanted, count))
    return [(count * part // parts, count * (part + 1) // parts) for part in range(parts)]
