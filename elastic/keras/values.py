"""Collectives of numbers, arrays and tensors, for metrics and the like: with tensors of Keras's backend as results.

On TensorFlow they may be called in a ``tf.function`` too, and give symbolic tensors there. A step that JAX compiles may
call those whose result has the shape of their value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.api import arrays, ops
from elastic.api.compression import Compression
from elastic.api.ops import Average
from elastic.errors import Invalid
from elastic.keras import tensors


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduces a number, an array or a tensor over all ranks; Average by default.

    ``compression`` is accepted, and without a meaning: values are small.

    Returns:
        A tensor of the backend, of the same shape; TensorFlow's in a ``tf.function`` is symbolic.
    """
    factors: dict[str, Any] = {
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    if _in_tensorflow(value):
        return _tensorflow().allreduce(value, average, op=op, name=name, **factors)

    def compute(given: torch.Tensor) -> torch.Tensor:
        return ops.allreduce(given, average, name, op=op, **factors)

    return _apply(compute, value)


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' arrays, one after the other along the first dimension, as a tensor of the backend."""
    if _in_tensorflow(value):
        return _tensorflow().allgather(value, name)
    return _apply(lambda given: ops.allgather(given, name), value, "allgather")


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Rank ``root_rank``'s value, as a tensor of the backend."""
    if _in_tensorflow(value):
        return _tensorflow().broadcast(value, root_rank, name)
    return _apply(lambda given: ops.broadcast(given, root_rank, name), value)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces an array over all ranks, and gives each its share of the rows, as a tensor of the backend."""
    if _in_tensorflow(value):
        return _tensorflow().reducescatter(value, op=op, name=name)
    return _apply(lambda given: ops.reducescatter(given, name=name, op=op), value, "reducescatter")


def _in_tensorflow(value: Any) -> bool:
    """Whether TensorFlow's collectives take it. In a graph of TensorFlow 1 a number has its result at once, as in
    Horovod, which runs a session for it.
    """
    if tensors.backend() != "tensorflow":
        return False
    import tensorflow as tf

    if tf.executing_eagerly() or tf.is_tensor(value):
        return True
    return bool(tf.compat.v1.get_default_graph().building_function)


def _tensorflow() -> Any:
    """The collectives of TensorFlow's tensors. Imported late: other backends have no TensorFlow."""
    from elastic.tensorflow import ops as of_tensors

    return of_tensors


def _apply(
    compute: Callable[[torch.Tensor], torch.Tensor], value: Any, reshapes: str | None = None
) -> Any:
    """``reshapes``: the name of a collective whose result has another shape than its value. Raises Invalid for one in a
    step that JAX compiles.
    """
    if reshapes is not None and tensors.is_traced(value):
        raise Invalid(
            f"{reshapes} in a step that JAX compiles: its result has a shape that is known only when it runs;"
            " call it outside of the step"
        )

    if tensors.backend() == "tensorflow":
        return arrays.to_numpy(compute(arrays.value_of(value)))[()]

    def run(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [compute(given[0])]

    return tensors.apply(run, [tensors.of_backend(value)])[0]
