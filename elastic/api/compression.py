"""Compression of tensors before they are sent.

Any class with the static methods ``compress`` and ``decompress`` can be used.
"""

from __future__ import annotations

from typing import Any

import torch


class NoneCompressor:
    """Compressor that sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor:
    """Compressor that casts floating-point tensors to a smaller dtype and sends all other tensors unchanged.

    The context for ``decompress`` is the original dtype.
    """

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.dtype.is_floating_point or tensor.element_size() <= 2:
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Compressor that sends floating-point tensors as float16 (11 significant bits).

    Sums above 65504 overflow to infinity.
    """

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Compressor that sends floating-point tensors as bfloat16 (8 significant bits, the range of float32)."""

    dtype = torch.bfloat16


class Compression:
    """Compressors for the argument ``compression`` of collectives and optimizers.

    Any class with static methods ``compress`` and ``decompress`` is accepted as well.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
