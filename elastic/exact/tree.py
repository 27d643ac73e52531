"""In which order the values of shards are added up: one binary tree, whoever holds which shard. Pure.

Floating point sums depend on their order. So a sum over shards follows a tree that is a function of their number alone:
a node covers the shards [start, stop) and is the sum of two nodes, of which the left one covers a power of two of them,
the largest that leaves something for the right one.

    5 shards:   ((0 + 1) + (2 + 3)) + 4         6 shards:   ((0 + 1) + (2 + 3)) + (4 + 5)

A rank adds up whole nodes as its shards come, in ascending order, like a binary counter (`schedule`). What is left are
its *partials*, the largest nodes whose shards it holds all of, and the root is combined from those of all ranks
(`program`). Every rank thus evaluates a part of the same expression, and no part is evaluated in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """The sum over the shards ``start``, ..., ``stop - 1``."""

    start: int
    stop: int


class Merge(NamedTuple):
    """What becomes of one shard's value: it comes to ``place`` of a stack, then the top two are added up so often."""

    shard: int
    place: int
    merges: int


class Partial(NamedTuple):
    """A rank's value at a place of its stack. In a program: push it."""

    rank: int
    place: int


ADD = None  # in a program: replace the two values on top by their sum
Program = tuple[Partial | None, ...]


def children(node: Node) -> tuple[Node, Node]:
    """Of a node of several shards."""
    size = node.stop - node.start
    middle = node.start + (1 << ((size - 1).bit_length() - 1))
    return Node(node.start, middle), Node(middle, node.stop)


def parent(left: Node, right: Node, shards: int) -> Node | None:
    """The node that is the sum of these two, or None if there is none among ``shards``."""
    size = left.stop - left.start
    whole = size & (size - 1) == 0 and left.start % (2 * size) == 0
    if whole and left.stop == right.start and right.stop == min(shards, left.start + 2 * size):
        return Node(left.start, right.stop)
    return None


def schedule(held: Sequence[int], shards: int) -> tuple[list[Merge], list[Node]]:
    """What a rank that holds these shards, in ascending order, does with each; and the partials on its stack then."""
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
    """For each shard of a rank, whether what it is merged into is a partial then: no later one is added to it."""
    found, lowest = [], len(merges)
    for each in reversed(merges):
        place = each.place - each.merges
        found.append(place < lowest)
        lowest = min(lowest, place)
    return found[::-1]


def program(partials: Sequence[Sequence[Node]], shards: int) -> Program:
    """How to combine the root of the partials that each rank has, by place: in postfix, as for a stack.

    Raises ValueError where a shard is in no partial.
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
            raise ValueError(f"no rank has shard {node.start}")
        else:
            for each in children(node):
                yield from combine(each)
            yield ADD

    return tuple(combine(Node(0, shards)))
