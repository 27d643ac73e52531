"""Sums of sparse gradients over the ranks of a group, by gathering all indices and values.

The caller ensures that all ranks pass the same group and the same order of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.collectives.dtypes_and_ops import rescale_
from elastic.collectives.interface import Collectives


def total(
    group: Collectives, gradients: Sequence[torch.Tensor], scale: float = 1.0, divisor: int = 1
) -> list[torch.Tensor]:
    """Return the sum of each gradient over all ranks as a coalesced COO tensor, scaled as in `Collectives.allreduce`.

    Gradient i has the same shape, dtype and number of sparse dimensions on every rank. The number of its entries
    may differ and may be 0. Summands are added in rank order.

    Raises:
        CollectiveFailed: a rank was lost.
    """
    gradients = [gradient.coalesce() for gradient in gradients]
    device = gradients[0].device
    entries = torch.tensor(
        [gradient._nnz() for gradient in gradients], dtype=torch.int64, device=device
    )
    counts = [list(map(int, counted)) for counted in _gathered(group, entries)]
    totals = [
        _total_of(group, gradient, [count[number] for count in counts])
        for number, gradient in enumerate(gradients)
    ]
    for each in totals:
        rescale_(each._values(), scale, divisor)
    return totals


def empty(parameter: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """Return an empty sparse tensor of the parameter's shape and dtype, for a rank without a gradient."""
    indices = torch.empty((sparse_dims, 0), dtype=torch.int64, device=parameter.device)
    values = torch.empty(
        (0, *parameter.shape[sparse_dims:]), dtype=parameter.dtype, device=parameter.device
    )
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, check_invariants=False, is_coalesced=True
    )


def _total_of(group: Collectives, gradient: torch.Tensor, counts: list[int]) -> torch.Tensor:
    longest = max(counts)
    if longest == 0:
        return gradient
    # An allgather requires the same shape on all ranks, so tensors are padded to the longest one and trimmed
    # afterwards.
    indices = _gathered(group, _padded(gradient.indices().t(), longest))
    values = _gathered(group, _padded(gradient.values(), longest))
    return torch.sparse_coo_tensor(
        torch.cat([rows[:count] for rows, count in zip(indices, counts, strict=True)]).t(),
        torch.cat([rows[:count] for rows, count in zip(values, counts, strict=True)]),
        gradient.shape,
        check_invariants=False,
    ).coalesce()


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    padded = rows.new_zeros((length, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded


def _gathered(group: Collectives, tensor: torch.Tensor) -> list[torch.Tensor]:
    outputs = [torch.empty_like(tensor) for _ in range(group.size)]
    group.allgather(outputs, tensor).wait()
    return outputs
