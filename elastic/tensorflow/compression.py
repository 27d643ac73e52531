"""Compression of TensorFlow's tensors before they are sent. Any class with these two static methods can be used."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from elastic.api.compression import NoneCompressor


class CastInTensorFlow:
    """Cast floating-point tensors to a smaller dtype.

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
    """Compressor to float16, which has 11 significant bits. Sums above 65504 overflow."""

    dtype = tf.float16


class ToBFloat16(CastInTensorFlow):
    """Compressor to bfloat16, which has 8 significant bits and the range of float32."""

    dtype = tf.bfloat16


class TensorFlowCompression:
    """Values for ``compression=``. A custom class with ``compress`` and ``decompress`` works as well."""

    none = NoneCompressor
    fp16 = ToFloat16
    bf16 = ToBFloat16


Compression = TensorFlowCompression
