"""Compression, at a path that some scripts import."""

from elastic.mxnet.compression import Compression

__all__ = ["Compression"]
