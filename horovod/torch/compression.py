"""Gradient compression, under Horovod's module name, and the base class for custom compressors."""

from __future__ import annotations

from typing import Any

import torch

from elastic.api.compression import Compression, FP16Compressor, NoneCompressor


class Compressor:
    """Optional base class for custom compressors. Any class with these two methods can be used."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Convert a reduced tensor back to the form of the original tensor."""
        raise NotImplementedError


__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
