"""Reduction tree: the order in which shards are summed, independent of their assignment to ranks.

Pure: no I/O, no clock.

Floating-point sums depend on their order. A sum over shards therefore follows a binary tree that depends only on the
number of shards. A node covers the shards [start, stop) and is the sum of two nodes. The left one covers the largest
power of two that leaves at least one shard for the right one.

    5 shards:   ((0 + 1) + (2 + 3)) + 4         6 shards:   ((0 + 1) + (2 + 3)) + (4 + 5)

A rank sums whole nodes as its shards are computed, in ascending order, like a binary counter (`schedule`). The results
are the rank's *partials*: the largest nodes that cover only shards of this rank. The root is combined from the partials
of all ranks (`program`). Every rank therefore evaluates part of the same expression, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """Node of the tree: the sum over the shards ``start``, ..., ``stop - 1``."""

    start: int
    stop: int


class Merge(NamedTuple):
    """Stack operations for the value of one shard.

    The value is pushed to index ``place`` of the stack. Then the top two values are replaced by their sum ``merges``
    times.
    """

    shard: int
    place: int
    merges: int


class Partial(NamedTuple):
    """Instruction of a program: push the value at one index of a rank's stack."""

    rank: int
    place: int


ADD = None  # Instruction of a program: replace the top two values with their sum.
Program = tuple[Partial | None, ...]


def children(node: Node) -> tuple[Node, Node]:
    """Return the children of a node of several shards."""
    size = node.stop - node.start
    middle = node.start + (1 << ((size - 1).bit_length() - 1))
    return Node(node.start, middle), Node(middle, node.stop)


def parent(left: Node, right: Node, shards: int) -> Node | None:
    """Return the parent of these two nodes, or None if the tree of ``shards`` shards has no such node."""
    size = left.stop - left.start
    whole = size & (size - 1) == 0 and left.start % (2 * size) == 0
    if whole and left.stop == right.start and right.stop == min(shards, left.start + 2 * size):
        return Node(left.start, right.stop)
    return None


def schedule(held: Sequence[int], shards: int) -> tuple[list[Merge], list[Node]]:
    """Return the stack operations for a rank's shards in ascending order, and the partial sums left on its stack."""
    stack: list[Node] = []
    merges = []
    for shard in held:
        place, node = len(stack), Node(shard, shard + 1)
        while stack and (above := parent(stack[-1], node, shards)) is not None:
            stack.pop()
            node = above
        stack.append(node)
        merges.append(Merge(shard, place, place + 1 - len(stack)))
    return merges, stack


def completes(merges: Sequence[Merge]) -> list[bool]:
    """Return, for each shard of a rank, whether its merges complete a partial."""
    found, lowest = [], len(merges)
    for each in reversed(merges):
        place = each.place - each.merges
        found.append(place < lowest)
        lowest = min(lowest, place)
    return found[::-1]


def program(partials: Sequence[Sequence[Node]], shards: int) -> Program:
    """Return the instructions that combine the root from the partials of each rank, in postfix order.

    Raises ValueError if a shard does not belong to any partial.
    """
    where = {
        node: Partial(rank, place)
        for rank, nodes in enumerate(partials)
        for place, node in enumerate(nodes)
    }

    def combine(node: Node) -> Iterator[Partial | None]:
        found = where.get(node)
        if found is not None:
            yield found
        elif node.stop - node.start == 1:
            raise ValueError(
                f"shard {node.start} is not assigned to any rank: assign each shard to a rank"
            )
        else:
            for each in children(node):
                yield from combine(each)
            yield ADD

    return tuple(combine(Node(0, shards)))
