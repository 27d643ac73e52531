"""Small tensors of a graph travel in one: each that goes to Python and back costs some 20 us, whatever its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

SMALL = 16384  # bytes: above it, copying costs more than the way to Python
FEW = 4  # tensors: up to here there is nothing to gain

Unpack = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


def pack(tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Unpack]:
    """These tensors with the small ones of each dtype in one dimension, one after the other; and the way back.

    For what works on each element alone. All ranks pack alike: it depends on shapes and dtypes, and on nothing else.
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
