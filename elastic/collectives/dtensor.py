"""Detection of torch's DTensor without importing it."""

from __future__ import annotations

import sys


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor. Does not import modules that the script has not imported."""
    known = sys.modules.get("torch.distributed.tensor")
    kind = getattr(known, "DTensor", None)
    return isinstance(kind, type) and isinstance(tensor, kind)
