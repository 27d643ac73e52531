"""Compression, under the path that some scripts import it from."""

from __future__ import annotations

from elastic.tensorflow.compression import AsFloat16 as FP16Compressor
from elastic.tensorflow.compression import AsItIs as NoneCompressor
from elastic.tensorflow.compression import Compression

__all__ = ["Compression", "FP16Compressor", "NoneCompressor"]
