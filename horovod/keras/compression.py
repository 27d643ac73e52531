"""``hvd.Compression`` for Keras: each backend casts its own tensors."""

from __future__ import annotations

from elastic.api.compression import Compression

__all__ = ["Compression"]
