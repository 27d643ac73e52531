"""Compression of MXNet's arrays before they are sent.

Any class with the static methods ``compress`` and ``decompress`` can be used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elastic.api.compression import NoneCompressor
from elastic.mxnet.bridge import Array


class ToHalf:
    """Compressor that sends float32 and float64 arrays as float16, with 11 significant bits.

    Sums above 65504 overflow to infinity. Arrays of other dtypes are sent unchanged.
    """

    @staticmethod
    def compress(tensor: Array) -> tuple[Array, Any]:
        if np.dtype(tensor.dtype).kind != "f" or np.dtype(tensor.dtype).itemsize <= 2:
            return tensor, None
        return tensor.astype("float16"), tensor.dtype

    @staticmethod
    def decompress(tensor: Array, ctx: Any) -> Array:
        return tensor if ctx is None else tensor.astype(ctx)


class MXNetCompression:
    """Compressors for the argument ``compression``.

    A custom class with ``compress`` and ``decompress`` is also accepted.
    """

    none = NoneCompressor
    fp16 = ToHalf


Compression = MXNetCompression
