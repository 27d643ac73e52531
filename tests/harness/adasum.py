"""Expected results of Adasum by its formula, in float64: neighbours first, then pairs of pairs."""

from __future__ import annotations

import torch


def adasum_of(vectors: list[torch.Tensor]) -> torch.Tensor:
    if len(vectors) == 1:
        return vectors[0].double()
    middle = len(vectors) // 2
    a, b = adasum_of(vectors[:middle]), adasum_of(vectors[middle:])
    ab, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - ab / (2 * aa) if aa else 1
    right = 1 - ab / (2 * bb) if bb else 1
    return left * a + right * b
