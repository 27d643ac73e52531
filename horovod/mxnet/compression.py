"""Compression, under the path that some scripts import it from."""

from __future__ import annotations

from elastic.mxnet.compression import Compression

__all__ = ["Compression"]
