"""Gradient compression, under Horovod's module name."""

from elastic.mxnet.compression import Compression

__all__ = ["Compression"]
