"""Collectives of numbers, arrays and tensors, outside of a graph: for metrics and the like."""

from __future__ import annotations

from typing import Any

import torch

from elastic.api import arrays, ops
from elastic.api.ops import Average


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = None,
) -> Any:
    """Reduces a number, an array or a tensor over all ranks; Average by default. The result is an array of numpy.

    ``compression`` is accepted, and without a meaning: values are small.
    """
    made = ops.allreduce(
        _torch(value),
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )
    return arrays.to_numpy(made)[()]


def allgather(value: Any, name: str | None = None) -> Any:
    """All ranks' arrays, one after the other along the first dimension, as an array of numpy."""
    return arrays.to_numpy(ops.allgather(_torch(value), name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Rank ``root_rank``'s value, as an array of numpy."""
    return arrays.to_numpy(ops.broadcast(_torch(value), root_rank, name))[()]


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces an array over all ranks, and gives each its share of the rows, as an array of numpy."""
    return arrays.to_numpy(ops.reducescatter(_torch(value), name=name, op=op))


def _torch(value: Any) -> torch.Tensor:
    return arrays.value_of(value)
