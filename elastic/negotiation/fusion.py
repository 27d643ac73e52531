"""Tensor fusion: decides which reductions share a buffer. Pure: the same responses give the same batches on every rank.

Small tensors that become ready together are fused, because for them the overhead per message exceeds the transfer time.
Large tensors are reduced separately and in place: copying them to a buffer and back would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.collectives.interface import ALONE_BYTES
from elastic.negotiation.messages import ALLREDUCE, Response

FUSION_BYTES = 128 << 20  # same default as Horovod's


@dataclass(frozen=True)
class FusionLimits:
    """Size limits for fusion. Every rank uses the limits of rank 0."""

    fusion_bytes: int = FUSION_BYTES  # maximum size of a fusion buffer in bytes; 0 disables fusion
    alone_bytes: int = ALONE_BYTES  # minimum size in bytes of a tensor that is reduced separately
    groups: bool = True  # whether tensors of a group may share a buffer with tensors outside it


def batches(responses: Sequence[Response], limits: FusionLimits) -> list[list[int]]:
    """Return the indices of the responses in each batch, in the order in which to start the batches.

    A batch takes the position of its first member. Later responses of the same kind are added while they fit, even if
    responses of other kinds are in between.
    """
    made: list[list[int]] = []
    # open batch of each kind, with its size in bytes
    open_at: dict[tuple[object, ...], tuple[int, int]] = {}
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
    request = response.request
    if request.kind != ALLREDUCE or response.error or limits.fusion_bytes == 0:
        return None
    if len(request.tensors) > 1 and not limits.groups:
        return None
    dtypes = {dtype for dtype, _ in request.tensors}
    if len(dtypes) > 1 or request.size_bytes >= min(limits.alone_bytes, limits.fusion_bytes):
        return None
    return (*dtypes, request.device, request.op, request.scales)
