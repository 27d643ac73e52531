"""Compression, under Horovod's module name, and the base class for custom compressors."""

from __future__ import annotations

from typing import Any

import torch

from elastic.api.compression import Compression, FP16Compressor, NoneCompressor


class Compressor:
    """Optional base class of a script's compressors. Any class with the two methods can be used."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced tensor in the caller's form."""
        raise NotImplementedError


__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
