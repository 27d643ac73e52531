"""Compression of tensors before they are sent: any class with these two static methods works."""

from __future__ import annotations

from typing import Any

import torch


class NoneCompressor:
    """Send tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor:
    """Send floating-point tensors in a smaller dtype, others unchanged. The context is the original dtype."""

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
    """Compressor to float16, which has 11 significant bits. Sums above 65504 overflow."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """bfloat16: 8 significant bits, the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """Values of ``compression=``. Any class with static methods ``compress`` and ``decompress`` is accepted as well."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
