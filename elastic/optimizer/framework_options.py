"""Options of gradient tapes and optimizers of frameworks other than torch.

This module only validates the options, and does not communicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.api.ops import as_op
from elastic.collectives.interface import Op
from elastic.errors import Invalid
from elastic.negotiation.process_sets import ProcessSet
from elastic.optimizer.gradients.gradient_options import check_compression, check_predivide_factor


@dataclass(frozen=True)
class GradientOptions:
    """Validated options. Create them with `checked`.

    Attributes:
        op: Average, Sum or Adasum.
        compression: a class with ``compress`` and ``decompress`` for the framework's tensors.
        sparse_as_dense: whether sparse gradients are reduced as dense tensors. Otherwise values and indices are
            gathered.
        predivide_factor: factor by which Average divides gradients before the sum and multiplies the result afterwards.
        process_set: the ranks that reduce their gradients together. Other ranks keep their own gradients.
        scale_local_gradients: whether gradients of variables that are not reduced are divided by the number of ranks.
    """

    op: Op
    compression: Any
    sparse_as_dense: bool
    predivide_factor: float
    process_set: ProcessSet
    scale_local_gradients: bool


def checked(
    op: int,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    groups: object,
    process_set: ProcessSet,
    scale_local_gradients: bool,
) -> GradientOptions:
    """Validate the options of a tape or optimizer, and return them.

    Args:
        op, compression, sparse_as_dense, gradient_predivide_factor, process_set, scale_local_gradients: see
            `GradientOptions`.
        groups: a number of groups, or lists of variables. It is validated but has no effect, because all gradients of a
            step are reduced together.

    Raises:
        Invalid: an option has an invalid value.
    """
    reduction = as_op(op, None)
    if reduction not in (Op.AVERAGE, Op.SUM, Op.ADASUM):
        raise Invalid(
            f"gradients can't be reduced with {reduction.name.title()}: use Average, Sum or Adasum"
        )
    check_predivide_factor(gradient_predivide_factor, reduction)
    check_compression(compression)
    if not isinstance(groups, list | tuple | None) and (not isinstance(groups, int) or groups < 0):
        raise Invalid(f"groups is {groups!r}: pass a number of groups or lists of variables")
    return GradientOptions(
        reduction,
        compression,
        sparse_as_dense,
        float(gradient_predivide_factor),
        process_set,
        scale_local_gradients,
    )
