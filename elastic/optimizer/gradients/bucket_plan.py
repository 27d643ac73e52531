"""Assignment of gradients to buckets, and the order in which buckets are reduced. Pure: uses only sizes, no tensors.

Buckets follow the order in which the backward pass computes gradients, so that the first buckets are reduced while it
is still computing the remaining gradients. The order is observed in the first step. Until then it is assumed to be the
reverse of the order in which parameters were declared. The plan depends only on the items and the order, not on ranks
or timing. It is therefore equal on all ranks and remains valid when the world changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

FIRST_BYTES = 1 << 20
# size in bytes, measured with Gloo: see the docstring of benchmarks/step.py
FULL_BYTES = 8 << 20
# The sizes for GPUs were not measured. They are the default of DistributedDataParallel within a host, and twice that
# over a network, where NCCL needs larger messages for full bandwidth.
GPU_FULL_BYTES = 25 << 20
GPU_FULL_BYTES_APART = 50 << 20
ALIGNMENT = 64  # bytes; each gradient starts at a cache line, which allows aligned vector loads


class Gradient(NamedTuple):
    """Size and kind (dtype and device) of one gradient. Gradients of different kinds never share a bucket."""

    kind: str
    elements: int
    element_bytes: int


class Bucket(NamedTuple):
    """Layout of one flat buffer. ``offsets`` and ``elements`` are in elements; ``members`` are indices of the items.

    The smallest members come first and are adjacent, so that they can be processed together.
    """

    kind: str
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int


def plan(
    items: Sequence[Gradient],
    *,
    order: Sequence[int] | None = None,
    groups: Sequence[Sequence[int]] = (),
    first_bytes: int = FIRST_BYTES,
    full_bytes: int = FULL_BYTES,
) -> list[Bucket]:
    """Return the buckets in launch order. Each item is in exactly one bucket.

    A bucket is closed once it contains at least its maximum number of bytes. (If it were closed *before* exceeding the
    maximum, it would often end with the bias of the next layer and wait for the whole backward pass of that layer.)

    Args:
        items: the gradients.
        order: indices of the items in the order in which they become ready. None means reverse order of
            declaration.
        groups: indices of items that share a bucket regardless of its size, if they are of the same kind.
        first_bytes: size in bytes at which the first bucket of a kind is closed. It is small, so that communication
            starts early.
        full_bytes: size in bytes at which any other bucket is closed.
    """
    group_of = {item: number for number, group in enumerate(groups) for item in group}
    grouped: dict[tuple[int, str], list[int]] = {}
    filling: dict[str, list[int]] = {}
    filled_bytes: dict[str, int] = {}
    closed: list[list[int]] = []
    started: set[str] = set()
    order = expected_order(len(items)) if order is None else order
    for index in order:
        kind = items[index].kind
        if index in group_of:
            grouped.setdefault((group_of[index], kind), []).append(index)
            continue
        filling.setdefault(kind, []).append(index)
        size = _padded(items[index]) * items[index].element_bytes
        filled_bytes[kind] = filled_bytes.get(kind, 0) + size
        if filled_bytes[kind] >= (full_bytes if kind in started else first_bytes):
            started.add(kind)
            closed.append(filling.pop(kind))
            del filled_bytes[kind]
    closed += filling.values()
    closed += grouped.values()
    # A bucket is complete when its last member is ready, which therefore determines the launch order.
    turn = {index: number for number, index in enumerate(order)}
    closed.sort(key=lambda members: max(turn[index] for index in members))
    return [_laid_out(items, members) for members in closed]


def expected_order(count: int) -> tuple[int, ...]:
    """Return the order in which gradients are assumed to become ready before the first observed step."""
    return tuple(reversed(range(count)))


def seen_order(seen: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Return the order in which ``count`` gradients became ready in one step, or None if none became ready.

    Gradients that did not become ready come last, in the order of declaration. They may be missing in later steps as
    well, and in this order no earlier bucket waits for them.
    """
    if not seen:
        return None
    first = dict.fromkeys(seen)
    return (*first, *(index for index in range(count) if index not in first))


def split(count: int, parts: int) -> list[list[int]]:
    """Split ``count`` indices into at most ``parts`` consecutive, non-empty runs of nearly equal length."""
    parts = min(parts, count)
    cuts = [count * part // parts for part in range(parts + 1)] if parts else []
    return [list(range(start, end)) for start, end in itertools.pairwise(cuts)]


def _laid_out(items: Sequence[Gradient], members: list[int]) -> Bucket:
    members = sorted(members, key=lambda index: items[index].elements)
    offsets = []
    elements = 0
    for index in members:
        offsets.append(elements)
        elements += _padded(items[index])
    return Bucket(items[members[0]].kind, tuple(members), tuple(offsets), elements)


def _padded(item: Gradient) -> int:
    step = max(1, ALIGNMENT // item.element_bytes)
    return -(-max(1, item.elements) // step) * step
