"""Digests of tensors, computed at memory bandwidth. Equal bits give equal digests on all workers, for any strides.

The digests are not cryptographic. A large tensor is reduced to its row and column sums, which detect a changed bit, a
swapped tensor and moved rows or columns, but not deliberate manipulation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy
import torch

from elastic.state.snapshots.snapshot import as_bytes

WHOLE = 1 << 16  # bytes; up to this size, every byte is hashed
# 8-byte words per row. Tensor widths may be multiples of this, but a collision must preserve row and column sums.
ROW = 1024


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return a 63-bit digest of names, dtypes, shapes and bits, independent of the order.

    Return 0 if there are no tensors.
    """
    lines = sorted(_fold(name, tensor) for name, tensor in tensors)
    if not lines:
        return 0
    whole = hashlib.blake2b(b"".join(lines), digest_size=8).digest()
    return int.from_bytes(whole, "little") >> 1 or 1


def _fold(name: str, tensor: torch.Tensor) -> bytes:
    of = hashlib.blake2b(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    content = as_bytes(tensor).numpy()
    folded = 0
    if content.nbytes > WHOLE:
        folded = content.nbytes // (8 * ROW) * (8 * ROW)
        words = content[:folded].view(numpy.int64).reshape(-1, ROW)
        of.update(numpy.add.reduce(words, axis=0).tobytes())
        of.update(numpy.add.reduce(words, axis=1).tobytes())
    of.update(content[folded:].tobytes())
    return of.digest()
