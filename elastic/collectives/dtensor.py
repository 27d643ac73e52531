"""Detection of torch's DTensor without importing it."""

from __future__ import annotations

import sys


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, without importing the module that defines DTensor."""
    known = sys.modules.get("torch.distributed.tensor")
    kind = getattr(known, "DTensor", None)
    return isinstance(kind, type) and isinstance(tensor, kind)
