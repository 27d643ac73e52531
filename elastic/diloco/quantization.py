"""Packs pseudo-gradients into 8 or 4 bits with a scale for each block of 128 elements.

The scale of a block is its largest absolute value divided by 127 or 7, a float32. Each element is stored as a code, so
that its error is at most half the scale. 4 bits take 0.266, and 8 bits 0.516, of the bytes of bfloat16.
"""

from __future__ import annotations

import torch

from elastic.errors import Invalid

BLOCK = 128  # elements
SCALE_BYTES = 4
WEIGHT_BYTES = 8


def packed_bytes(elements: int, bits: int) -> int:
    """Return the number of bytes of packed elements. The last block is padded."""
    return -(-elements // BLOCK) * (SCALE_BYTES + BLOCK * bits // 8)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize values and pack them.

    Args:
        values: 1-dimensional, floating point. A block with a value that is not finite becomes NaN.
        bits: number of bits per element, 8 or 4.

    Returns:
        a uint8 tensor of `packed_bytes` elements: all scales, then all codes.
    """
    largest = 2 ** (bits - 1) - 1
    padding = -len(values) % BLOCK
    blocks = torch.nn.functional.pad(values.float(), (0, padding)).view(-1, BLOCK)
    # A scale of 0, also by underflow, would make codes of 0 / 0.
    least = torch.finfo(torch.float32).tiny
    scales = (blocks.abs().amax(1, keepdim=True) / largest).clamp_(min=least)
    codes = (blocks / scales).round_().clamp_(-largest, largest).nan_to_num_(0.0).to(torch.int8)
    if bits == 4:
        nibbles = (codes + 8).view(torch.uint8).view(-1, 2)
        codes = nibbles[:, 0] | nibbles[:, 1] << 4
    return torch.cat([scales.view(torch.uint8).reshape(-1), codes.view(torch.uint8).reshape(-1)])


def unpack(packed: torch.Tensor, elements: int, bits: int) -> torch.Tensor:
    """Return the values that `pack` has packed, with the errors of quantization.

    Args:
        packed: the result of `pack`.
        elements: number of values.
        bits: number of bits per element, 8 or 4.

    Returns:
        a float32 tensor, 1-dimensional.
    """
    end = -(-elements // BLOCK) * SCALE_BYTES
    scales, codes = packed[:end].view(torch.float32), packed[end:]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1)
        signed = codes.view(torch.int8) - 8
    else:
        signed = codes.view(torch.int8)
    return (signed.view(-1, BLOCK) * scales[:, None]).view(-1)[:elements]


def weighted(packed: torch.Tensor, weight: float | None) -> torch.Tensor:
    """Append a weight as a float64, if there is one, to the result of `pack`."""
    if weight is None:
        return packed
    appended = torch.tensor([weight], dtype=torch.float64, device=packed.device)
    return torch.cat([packed, appended.view(torch.uint8)])


def mean(
    gathered: torch.Tensor, elements: int, bits: int, ranks: int, *, weighted: bool = False
) -> torch.Tensor:
    """Return the float32 mean of the ranks' values. All ranks sum in rank order and get the same bits.

    Args:
        gathered: uint8, the ranks' results of `weighted`, one after the other.
        elements: number of values of a rank.
        bits: number of bits per element, 8 or 4.
        ranks: number of ranks.
        weighted: whether the results contain weights. If all are 0, the mean is 0.

    Raises:
        Invalid: only some of the results contain a weight.
    """
    size = packed_bytes(elements, bits)
    if len(gathered) != ranks * (size + (WEIGHT_BYTES if weighted else 0)):
        raise Invalid(
            "only some workers report tokens, so islands can't be weighted: pass tokens= to step() on all workers,"
            " or on none"
        )
    rows = gathered.view(ranks, -1)
    total = torch.zeros(elements, dtype=torch.float32, device=gathered.device)
    if not weighted:
        for row in rows:
            total += unpack(row, elements, bits)
        return total.div_(ranks)
    # Copied, because a row need not be aligned to 8 bytes.
    weights = [float(row[size:].clone().view(torch.float64)) for row in rows]
    for row, weight in zip(rows, weights, strict=True):
        total += unpack(row[:size], elements, bits) * (weight / (sum(weights) or 1.0))
    return total
