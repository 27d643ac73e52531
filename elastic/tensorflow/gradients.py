"""Gradients of a step, reduced over all ranks in one call: for tapes and for optimizers of every kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
import torch

from elastic.api.ops import as_op
from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.negotiation import submission
from elastic.negotiation.process_sets import ProcessSet, global_process_set, resolve
from elastic.tensorflow import bridge, ops
from elastic.tensorflow.compression import Compression

_CPU = torch.device("cpu")
Gradient = Any  # a tf.Tensor, tf.IndexedSlices or None


@dataclass(frozen=True)
class GradientOptions:
    """What a tape or an optimizer was asked for. Raises Invalid for what can't be right, when it is made.

    Attributes:
        op: Average, Sum or Adasum.
        compression: a class with ``compress`` and ``decompress``.
        sparse_as_dense: IndexedSlices travel as dense tensors; else values and indices are gathered.
        gradient_predivide_factor: Average divides by it before the sum and multiplies by it after.
        process_set: the ranks that reduce among themselves; others keep their own gradients.
        scale_local_gradients: gradients of variables that are not reduced are divided by the number of ranks.
    """

    op: Op = Op.AVERAGE
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", as_op(self.op, None))
        factor = self.gradient_predivide_factor
        if not isinstance(factor, int | float) or not math.isfinite(factor) or factor <= 0:
            raise Invalid(f"gradient_predivide_factor is {factor!r}; give a positive number")
        if factor != 1.0 and self.op is not Op.AVERAGE:
            raise Invalid("gradient_predivide_factor goes with op=Average only; leave it out")
        if self.op not in (Op.AVERAGE, Op.SUM, Op.ADASUM):
            raise Invalid(f"gradients can't be reduced with {self.op.name.title()}; use Average")
        if not all(hasattr(self.compression, name) for name in ("compress", "decompress")):
            raise Invalid(f"compression is {self.compression!r}; give one of hvd.Compression")


def check_groups(groups: object, num_groups: int = 0) -> None:
    """All gradients of a step travel together anyway. Raises Invalid for what Horovod would not take."""
    if groups is None or isinstance(groups, list | tuple):
        return
    if not isinstance(groups, int) or groups < 0:
        raise Invalid(f"groups is {groups!r}; give a number of groups or lists of variables")


def reduce(
    gradients: Sequence[Gradient],
    options: GradientOptions,
    local: Sequence[bool] | None = None,
    name: str = "gradients",
) -> list[Gradient]:
    """All gradients, reduced over the ranks; in the same order, None where there was none.

    Args:
        gradients: dense, IndexedSlices or None: the same kind in the same place on every rank.
        local: where True, the variable belongs to this rank: its gradient is not reduced.
        name: of the collective; what runs at the same time has different ones.
    """
    local = local or [False] * len(gradients)
    results: list[Gradient] = list(gradients)
    dense: list[int] = []
    for place, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if local[place]:
            results[place] = _as_share(gradient, options)
        elif isinstance(gradient, tf.IndexedSlices) and not options.sparse_as_dense:
            results[place] = ops.allreduce(
                gradient,
                op=options.op,
                name=f"{name}.{place}",
                process_set=options.process_set,
            )
        else:
            dense.append(place)
    if dense and _takes_part(options.process_set):
        factor = float(options.gradient_predivide_factor)
        made = ops.grouped_allreduce(
            [tf.convert_to_tensor(gradients[place]) for place in dense],
            op=options.op,
            compression=options.compression,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=options.process_set,
            name=name,
        )
        for place, each in zip(dense, made, strict=True):
            results[place] = each
    return results


def _takes_part(process_set: ProcessSet) -> bool:
    return process_set is global_process_set or process_set.included()


def _as_share(gradient: Any, options: GradientOptions) -> Any:
    """A local gradient, divided as the average of the others is: as many ranks' batches are in the loss of those."""
    if not options.scale_local_gradients:
        return gradient
    count = bridge.asked(lambda: submission.group_size(_CPU, resolve(options.process_set)), "size")
    if isinstance(gradient, tf.IndexedSlices):
        share = gradient.values / tf.cast(count, gradient.values.dtype)
        return tf.IndexedSlices(share, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(count, gradient.dtype)
