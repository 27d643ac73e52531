"""Packing of a graph's small tensors, because passing a tensor to Python and back takes about 20 us."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

# maximum bytes of a tensor to pack; copying a larger one costs more than passing it to Python
SMALL = 16384
FEW = 4  # maximum number of tensors for which packing has no benefit

Unpack = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


def pack(tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Unpack]:
    """Join the small tensors of each dtype into one-dimensional tensors. Return all tensors and the inverse function.

    This function is suitable for elementwise operations only. All ranks pack in the same way, because packing depends
    only on shapes and dtypes.
    """
    small: dict[tf.DType, list[int]] = {}
    if not tf.executing_eagerly():
        for place, tensor in enumerate(tensors):
            if tensor.shape.is_fully_defined() and _bytes(tensor) <= SMALL:
                small.setdefault(tensor.dtype, []).append(place)
    groups = [places for places in small.values() if len(places) > FEW]
    packed = {place for places in groups for place in places}
    alone = [place for place in range(len(tensors)) if place not in packed]

    def unpack(results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        made = dict(zip(alone, results, strict=False))
        for places, joined in zip(groups, results[len(alone) :], strict=True):
            shapes = [tensors[place].shape for place in places]
            parts = tf.split(joined, [shape.num_elements() for shape in shapes])
            for place, part, shape in zip(places, parts, shapes, strict=True):
                made[place] = tf.reshape(part, shape)
        return [made[place] for place in range(len(tensors))]

    joined = [tf.concat([tf.reshape(tensors[at], [-1]) for at in places], 0) for places in groups]
    return [tensors[place] for place in alone] + joined, unpack


def _bytes(tensor: tf.Tensor) -> int:
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)
