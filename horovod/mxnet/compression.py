"""Compression, under a path from which some scripts import it."""

from elastic.mxnet.compression import Compression

__all__ = ["Compression"]
