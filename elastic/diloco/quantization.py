"""Quantization of pseudo-gradients to 8 or 4 bits with a scale for each block of 128 elements.

The scale of a block, a float32, is its largest absolute value divided by the largest value of the format. Relative to
bfloat16, the packed size is 0.266 with 4 bits and 0.516 with 8 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from elastic.errors import Invalid

BLOCK = 128  # number of elements that share a scale
SCALE_BYTES = 4
WEIGHT_BYTES = 8


class CodeFormat(NamedTuple):
    """Format of the packed elements, which are multiples of their block's scale.

    With integers, the error of an element is at most half the scale. With float8, it is at most 1/16 of the
    element, or 2**-10 times the scale for the smallest elements.
    """

    bits: int
    largest: float  # largest value that the format represents
    dtype: torch.dtype


FORMATS: dict[torch.dtype | str | None, CodeFormat] = {
    torch.int8: CodeFormat(8, 127.0, torch.int8),
    "int4": CodeFormat(4, 7.0, torch.int8),
    torch.float8_e4m3fn: CodeFormat(8, 448.0, torch.float8_e4m3fn),
}


def packed_bytes(elements: int, code: CodeFormat) -> int:
    """Return the number of bytes of packed elements. The last block is padded."""
    return -(-elements // BLOCK) * (SCALE_BYTES + BLOCK * code.bits // 8)


def pack(values: torch.Tensor, code: CodeFormat) -> torch.Tensor:
    """Quantize values and pack them.

    Args:
        values: 1-dimensional floating-point tensor. A block with a value that is not finite becomes NaN.
        code: format of the packed elements.

    Returns:
        A 1-dimensional uint8 tensor of `packed_bytes` elements: all scales, then all codes.
    """
    padding = -len(values) % BLOCK
    blocks = torch.nn.functional.pad(values.float(), (0, padding)).view(-1, BLOCK)
    # A scale of 0, possibly due to underflow, would lead to 0 / 0.
    least = torch.finfo(torch.float32).tiny
    scales = (blocks.abs().amax(1, keepdim=True) / code.largest).clamp_(min=least)
    multiples = (blocks / scales).clamp_(-code.largest, code.largest).nan_to_num_(0.0)
    codes = (multiples if code.dtype.is_floating_point else multiples.round_()).to(code.dtype)
    if code.bits == 4:
        nibbles = (codes + 8).view(torch.uint8).view(-1, 2)
        codes = nibbles[:, 0] | nibbles[:, 1] << 4
    return torch.cat([scales.view(torch.uint8).reshape(-1), codes.view(torch.uint8).reshape(-1)])


def unpack(packed: torch.Tensor, elements: int, code: CodeFormat) -> torch.Tensor:
    """Convert the result of `pack` back to values, which contain the quantization errors.

    Args:
        packed: the result of `pack`.
        elements: number of values.
        code: format of the packed elements.

    Returns:
        A 1-dimensional float32 tensor of ``elements`` elements.
    """
    end = -(-elements // BLOCK) * SCALE_BYTES
    scales, codes = packed[:end].view(torch.float32), packed[end:]
    if code.bits == 4:
        multiples = torch.stack([codes & 15, codes >> 4], 1).view(torch.int8) - 8
    else:
        multiples = codes.view(code.dtype).float()
    return (multiples.view(-1, BLOCK) * scales[:, None]).view(-1)[:elements]


def weighted(packed: torch.Tensor, weight: float | None) -> torch.Tensor:
    """Append a weight as a float64 to the result of `pack`. If the weight is None, return the result unchanged."""
    if weight is None:
        return packed
    appended = torch.tensor([weight], dtype=torch.float64, device=packed.device)
    return torch.cat([packed, appended.view(torch.uint8)])


def mean(
    gathered: torch.Tensor, elements: int, code: CodeFormat, ranks: int, *, weighted: bool = False
) -> torch.Tensor:
    """Return the float32 mean of the ranks' values. All ranks sum in rank order and get the same bits.

    Args:
        gathered: uint8 tensor with the ranks' results of `weighted`, one after the other.
        elements: number of values of a rank.
        code: format of the packed elements.
        ranks: number of ranks.
        weighted: whether the results contain weights. If all are 0, the mean is 0.

    Raises:
        Invalid: only some of the results contain a weight.
    """
    size = packed_bytes(elements, code)
    if len(gathered) != ranks * (size + (WEIGHT_BYTES if weighted else 0)):
        raise Invalid(
            "only some workers report tokens, so islands can't be weighted: pass tokens= to step() on all workers,"
            " or on none"
        )
    rows = gathered.view(ranks, -1)
    total = torch.zeros(elements, dtype=torch.float32, device=gathered.device)
    if not weighted:
        for row in rows:
            total += unpack(row, elements, code)
        return total.div_(ranks)
    # Copied, because a row may not be aligned to 8 bytes, as float64 requires.
    weights = [float(row[size:].clone().view(torch.float64)) for row in rows]
    for row, weight in zip(rows, weights, strict=True):
        total += unpack(row[:size], elements, code) * (weight / (sum(weights) or 1.0))
    return total
