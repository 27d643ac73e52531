"""Compression, under the path that some scripts import it from."""

from elastic.mxnet.compression import Compression

__all__ = ["Compression"]
