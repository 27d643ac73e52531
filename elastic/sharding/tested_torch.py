"""Versions of torch with which sharded training was tested.

Sharded training uses private names of torch, which may change.
"""

from __future__ import annotations

import torch

TESTED = ("2.13", "2.14", "2.15")


def untested(what: str) -> str | None:
    """Return the reason why ``what`` is not supported with this version of torch, or None if it is supported.

    Args:
        what: predicate for the error message, such as "is fully sharded".
    """
    if torch.__version__.startswith(tuple(f"{each}." for each in TESTED)):
        return None
    return f"{what}, which is supported with torch {', '.join(TESTED)}, but not with torch {torch.__version__}"
