"""Decides which gradients travel together, and in what order. Pure: sizes in, a plan out; it never sees a tensor.

Buckets are cut along the order in which backward makes gradients, so the first ones fill, and travel, while it still
works on the rest. That order is seen in the first step; without it, it is taken to be the reverse of the order in which
parameters were declared. The plan is a function of the items and the order alone, never of ranks or of timing: every
rank makes the same one, and it outlives any change of the world.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

FIRST_BYTES = 1 << 20
FULL_BYTES = 8 << 20  # by measurement over Gloo, see the docstring of benchmarks/step.py
# On GPUs, not measured by us: DistributedDataParallel's within a host, twice that over a network, where NCCL needs more
# bytes for its full bandwidth.
GPU_FULL_BYTES = 25 << 20
GPU_FULL_BYTES_APART = 50 << 20
ALIGNMENT = 64  # bytes: each gradient starts on a cache line, for vector loads


class Gradient(NamedTuple):
    """One gradient. Items of different kinds (dtype and device) never share a bucket."""

    kind: str
    elements: int
    element_bytes: int


class Bucket(NamedTuple):
    """One flat buffer. ``offsets`` and ``elements`` count elements; ``members`` are indices into the items.

    The smallest members lie in front, side by side, so that they can be treated in one go.
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
    """The buckets in the order in which they are to be launched; each item is in exactly one.

    ``order``: the items as they become ready; None for the last declared first.
    A bucket is closed once it holds ``full_bytes``, the first of a kind once it holds ``first_bytes``, so that
    communication starts early. (Closed *before* it would hold more, it would often end with the bias of the next
    layer, and wait for that layer's whole backward.) The items of one of ``groups`` stay together whatever their size,
    as far as they are of one kind.
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
    # A bucket is complete when the last of its members is, so that one decides the order of launching.
    turn = {index: number for number, index in enumerate(order)}
    closed.sort(key=lambda members: max(turn[index] for index in members))
    return [_laid_out(items, members) for members in closed]


def expected_order(count: int) -> tuple[int, ...]:
    """In which gradients become ready as long as nobody has seen it."""
    return tuple(reversed(range(count)))


def seen_order(seen: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Of ``count`` gradients, from those that became ready in one step; None if there were none.

    The others come last, as they were declared: they may be missing again, and nothing waits for them before the end.
    """
    if not seen:
        return None
    first = dict.fromkeys(seen)
    return (*first, *(index for index in range(count) if index not in first))


def split(count: int, parts: int) -> list[list[int]]:
    """``count`` indices in ``parts`` runs of nearly equal length, without empty runs."""
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
