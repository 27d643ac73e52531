"""Computations with known bitwise results, to detect devices that compute or store wrong values.

All values are integers stored as float32, and no partial sum exceeds 2**24. Every order of summation therefore gives
the same bits with every BLAS library and on every GPU, even with TF32.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from elastic import failpoints
from elastic.failpoints import actions, failpoint

SIZE, ROUNDS = 384, 4  # number of rows of each matrix, and number of multiplications
SUMMED = 1 << 20
PATTERN_BYTES = 8 << 20
PATTERNS = (0x55555555, 0xAAAAAAAA, 0x00000000, 0xFFFFFFFF)
PRODUCT_CRC = 0xBCDA38B1  # CRC-32 of the product's bytes, in row-major order
TOTAL = 7864320.0


def factors() -> tuple[Any, Any]:
    """Return two matrices of shape (SIZE, SIZE), float32, with whole numbers from -8 to 8."""
    row, column = np.indices((SIZE, SIZE), dtype=np.int64)
    left = (row * 7 + column * 13 + row * column) % 17 - 8
    right = (row * 5 + column * 11 + row * column * 3) % 17 - 8
    return left.astype(np.float32), right.astype(np.float32)


def summands() -> Any:
    """Return an array of `SUMMED` whole numbers from 0 to 15, float32."""
    return ((np.arange(SUMMED, dtype=np.int64) * 2654435761 >> 7) % 16).astype(np.float32)


def wrong_on_cpu() -> str:
    """Run the computations on the CPU. Return a description of a wrong result, or an empty string."""
    left, right = factors()
    for _ in range(ROUNDS):
        if wrong := _product_differs(np.matmul(left, right)):
            return wrong
    if (total := float(summands().sum(dtype=np.float32))) != TOTAL:
        return f"the sum of {SUMMED} numbers is {total:.0f}, expected {TOTAL:.0f}"
    memory = np.empty(PATTERN_BYTES // 4, dtype=np.uint32)
    for pattern in PATTERNS:
        memory[:] = pattern
        if bad := int(np.count_nonzero(memory != np.uint32(pattern))):
            return f"{bad} of {memory.size} words of memory do not hold {pattern:#010x}"
    return ""


def wrong_on_gpu(torch: Any, device: str) -> str:
    """Run the computations on a torch device. Return a description of a wrong result, or an empty string."""
    left, right = (torch.from_numpy(each).to(device) for each in factors())
    for _ in range(ROUNDS):
        if wrong := _product_differs(torch.matmul(left, right).cpu().numpy()):
            return wrong
    total = float(torch.from_numpy(summands()).to(device).sum())
    if total != TOTAL:
        return f"the sum of {SUMMED} numbers is {total:.0f}, expected {TOTAL:.0f}"
    for pattern in PATTERNS:
        word = pattern - (1 << 32 if pattern >> 31 else 0)
        memory = torch.full((PATTERN_BYTES // 4,), word, dtype=torch.int32, device=device)
        if bad := int((memory != word).sum()):
            return f"{bad} of {memory.numel()} words of memory do not hold {pattern:#010x}"
    return ""


def _product_differs(product: Any) -> str:
    if failpoints.in_use():
        product = _may_flip(product)
    found = zlib.crc32(np.ascontiguousarray(product).tobytes())
    if found == PRODUCT_CRC:
        return ""
    return f"the matrix product has wrong bits: CRC {found:08x}, expected {PRODUCT_CRC:08x}"


def _may_flip(product: Any) -> Any:
    product = np.array(product)

    def flip(seed: int) -> str:
        bits = product.view(np.uint32).reshape(-1)
        bits[seed % bits.size] ^= np.uint32(1 << seed % 32)
        return f"a bit of word {seed % bits.size} of the product"

    actions.flippers["product"] = flip
    failpoint("health-check")
    return product
