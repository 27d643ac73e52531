"""Reduction of the gradients of a step over all ranks in one call, for tapes and all kinds of optimizers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from elastic.negotiation.process_sets import resolve_or_alone
from elastic.optimizer.framework_options import GradientOptions
from elastic.tensorflow import ops

Gradient = Any  # a tf.Tensor, tf.IndexedSlices or None


def reduce(
    gradients: Sequence[Gradient],
    options: GradientOptions,
    local: Sequence[bool],
    name: str = "gradients",
) -> list[Gradient]:
    """Reduce gradients over the ranks. Return the reduced gradients in the same order. The result for None is None.

    Args:
        gradients: dense gradients, IndexedSlices or None. Each position must have the same kind on every rank.
        local: for each gradient, whether its variable is local to this rank. Local gradients are not reduced.
        name: name of the collective. It must be unique among the collectives that run at the same time.
    """
    members = functools.partial(resolve_or_alone, options.process_set)
    results: list[Gradient] = list(gradients)
    dense: list[int] = []
    for place, gradient in enumerate(gradients):
        if gradient is None:
            continue
        if local[place]:
            if options.scale_local_gradients:
                results[place] = _as_share(gradient, members)
        elif isinstance(gradient, tf.IndexedSlices) and not options.sparse_as_dense:
            results[place] = ops.reduce_slices(gradient, f"{name}.{place}", members, options.op)
        else:
            dense.append(place)
    if dense:
        made = ops.reduce_dense(
            [gradients[place] for place in dense],
            name,
            members,
            options.op,
            (1.0 / options.predivide_factor, options.predivide_factor),
            options.compression,
        )
        for place, each in zip(dense, made, strict=True):
            results[place] = each
    return results


def _as_share(gradient: Gradient, members: ops.Members) -> Gradient:
    size = ops.size_of(members)
    if isinstance(gradient, tf.IndexedSlices):
        share = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(share, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)
