"""Compression, under the path that some scripts import it from, and the class that they derive their own from."""

from __future__ import annotations

from typing import Any

import torch

from elastic.api.compression import Compression, FP16Compressor, NoneCompressor


class Compressor:
    """Base of compressors that scripts write. It need not be one: any class with the two methods will do."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor that travels, and whatever `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor, as the caller wants it."""
        raise NotImplementedError


__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
