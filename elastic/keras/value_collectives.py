"""Collectives on single values: numbers, arrays and tensors, such as metrics. Results are tensors of Keras's backend.

On TensorFlow, these functions may be called in a ``tf.function``, where they return symbolic tensors. A step compiled
by JAX may call only functions whose result has the shape of their argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.api import arrays, ops
from elastic.api.compression import Compression
from elastic.api.ops import Average
from elastic.errors import Invalid
from elastic.keras import backends


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a number, an array or a tensor over all ranks.

    Args:
        value: the value, with the same shape and dtype on all ranks.
        name, average, prescale_factor, postscale_factor, op: see `elastic.api.ops`. The default of ``op`` is Average.
        compression: ignored, because values are small.

    Returns:
        A tensor of the backend, of the same shape; symbolic in a ``tf.function``.
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
    """Concatenate the arrays of all ranks along the first dimension.

    Args:
        value: array or tensor of shape ``[rows, ...]``. ``rows`` may differ between ranks.
        name: see `elastic.api.ops`.

    Returns:
        A tensor of the backend, of shape ``[sum of all rows, ...]``.
    """
    if _in_tensorflow(value):
        return _tensorflow().allgather(value, name)
    return _apply(lambda given: ops.allgather(given, name), value, "allgather")


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Broadcast the value of one rank to all ranks.

    Args:
        value: number, array or tensor, with the same shape and dtype on all ranks.
        root_rank: rank in the world that sends its value.
        name: see `elastic.api.ops`.

    Returns:
        A tensor of the backend, of the same shape.
    """
    if _in_tensorflow(value):
        return _tensorflow().broadcast(value, root_rank, name)
    return _apply(lambda given: ops.broadcast(given, root_rank, name), value)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduce an array over all ranks, and return this rank's share of the rows.

    Args:
        value: array or tensor of shape ``[rows, ...]``, the same on all ranks.
        name: see `elastic.api.ops`.
        op: Average or Sum.

    Returns:
        A tensor of the backend with this rank's rows.
    """
    if _in_tensorflow(value):
        return _tensorflow().reducescatter(value, op=op, name=name)
    return _apply(lambda given: ops.reducescatter(given, name=name, op=op), value, "reducescatter")


def _in_tensorflow(value: Any) -> bool:
    """Return whether TensorFlow's collectives must process the value.

    In a TensorFlow 1 graph a number is reduced immediately, as in Horovod, which runs a session for it.
    """
    if backends.backend() != "tensorflow":
        return False
    import tensorflow as tf

    if tf.executing_eagerly() or tf.is_tensor(value):
        return True
    return bool(tf.compat.v1.get_default_graph().building_function)


def _tensorflow() -> Any:
    """Return the module with the collectives of TensorFlow's tensors.

    The module is imported at the first call, because TensorFlow may be missing with other backends.
    """
    from elastic.tensorflow import ops as of_tensors

    return of_tensors


def _apply(
    compute: Callable[[torch.Tensor], torch.Tensor], value: Any, reshapes: str | None = None
) -> Any:
    """Apply ``compute`` to one value.

    ``reshapes`` is the name of a collective whose result has another shape than its argument, or None. Raises Invalid
    for such a collective in a step compiled by JAX.
    """
    if reshapes is not None and backends.is_traced(value):
        raise Invalid(
            f"{reshapes} can't run in a step that JAX compiles, because the shape of the result is known only at"
            f" run time: call {reshapes} outside the step"
        )

    if backends.backend() == "tensorflow":
        return arrays.to_numpy(compute(arrays.value_of(value)))[()]

    def run(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [compute(given[0])]

    return backends.apply(run, [backends.of_backend(value)])[0]
