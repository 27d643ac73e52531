"""How TensorFlow's tensors shrink before they travel: any class with these two static methods will do."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class AsItIs:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class _Cast:
    """Sends floating point tensors in a smaller dtype; others as they are. The context is the dtype to return to."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if not tensor.dtype.is_floating or tensor.dtype.size <= 2:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class AsFloat16(_Cast):
    """float16: 11 significant bits; sums beyond 65504 overflow."""

    dtype = tf.float16


class AsBFloat16(_Cast):
    """bfloat16: 8 significant bits, the range of float32."""

    dtype = tf.bfloat16


class CompressionOfTensors:
    """What ``compression=`` takes; a class of your own with ``compress`` and ``decompress`` works as well."""

    none = AsItIs
    fp16 = AsFloat16
    bf16 = AsBFloat16


Compression = CompressionOfTensors
