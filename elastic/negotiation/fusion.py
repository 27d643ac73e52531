"""Decides which reductions share a buffer. Pure: responses in, batches out; the same on every rank.

Small tensors that became ready together travel together, because each message costs more than its bytes. Large ones
travel alone, from and to their own memory: copying them into a buffer and back would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.collectives.interface import ALONE_BYTES
from elastic.negotiation.messages import ALLREDUCE, Response

FUSION_BYTES = 128 << 20  # Horovod's default


@dataclass(frozen=True)
class FusionLimits:
    """Equal on all ranks: they take those of rank 0."""

    fusion_bytes: int = FUSION_BYTES  # of one buffer; 0: nothing is fused
    alone_bytes: int = ALONE_BYTES  # from here on a tensor travels alone
    groups: bool = True  # whether a group may share its buffer with others


def batches(responses: Sequence[Response], limits: FusionLimits) -> list[list[int]]:
    """Indices of those that travel together, in the order in which the batches are to be started.

    A batch starts where its first member stands; later ones of the same kind are drawn forward into it as long as they
    fit, past others that don't go with it.
    """
    made: list[list[int]] = []
    open_at: dict[tuple[object, ...], tuple[int, int]] = {}  # kind -> batch, bytes in it
    for index, each in enumerate(responses):
        kind = _kind(each, limits)
        if kind is None:
            made.append([index])
            continue
        size = each.request.size_bytes
        batch, filled = open_at.get(kind, (-1, 0))
        if batch < 0 or filled + size > limits.fusion_bytes:
            made.append([])
            batch, filled = len(made) - 1, 0
        made[batch].append(index)
        open_at[kind] = batch, filled + size
    return made


def _kind(response: Response, limits: FusionLimits) -> tuple[object, ...] | None:
    """What must be equal in a batch; None for what travels alone."""
    request = response.request
    if request.kind != ALLREDUCE or response.error or limits.fusion_bytes == 0:
        return None
    if len(request.tensors) > 1 and not limits.groups:
        return None
    dtypes = {dtype for dtype, _ in request.tensors}
    if len(dtypes) > 1 or request.size_bytes >= min(limits.alone_bytes, limits.fusion_bytes):
        return None
    return (*dtypes, request.device, request.op, request.scales)
