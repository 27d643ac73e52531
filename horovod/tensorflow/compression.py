"""Gradient compression, under Horovod's module name."""

from elastic.api.compression import NoneCompressor
from elastic.tensorflow.compression import Compression
from elastic.tensorflow.compression import ToFloat16 as FP16Compressor

__all__ = ["Compression", "FP16Compressor", "NoneCompressor"]
