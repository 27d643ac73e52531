"""Compression of TensorFlow tensors before they are sent."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from elastic.api.compression import NoneCompressor


class CastInTensorFlow:
    """Compressor that casts floating-point tensors to a smaller dtype.

    Other tensors are sent unchanged. The context is the original dtype.
    """

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        if not tensor.dtype.is_floating or tensor.dtype.size <= 2:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class ToFloat16(CastInTensorFlow):
    """Compressor that casts to float16 (11 significant bits). Sums above 65504 overflow."""

    dtype = tf.float16


class ToBFloat16(CastInTensorFlow):
    """Compressor that casts to bfloat16 (8 significant bits, the range of float32)."""

    dtype = tf.bfloat16


class TensorFlowCompression:
    """Compressors for the argument ``compression``. A class with ``compress`` and ``decompress`` is also accepted."""

    none = NoneCompressor
    fp16 = ToFloat16
    bf16 = ToBFloat16


Compression = TensorFlowCompression
