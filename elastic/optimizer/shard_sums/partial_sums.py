"""Exchange that adds up the ranks' partial sums along the reduction tree. Bitwise identical with any transport.

Each rank owns a piece of a bucket. It receives the other ranks' partial sums of that piece, evaluates the program of
`elastic.exact.reduction_tree` on them, and sends the result to all ranks. Sums are elementwise, so the assignment of
pieces does not affect the result. If all ranks share memory, `elastic.collectives.shared_memory` does the same without
copies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from elastic.collectives.dtypes_and_ops import rescale_
from elastic.collectives.interface import Collectives, Work
from elastic.exact.reduction_tree import Program

PIECE = 16  # The length of each piece is a multiple of this number of elements.


def evaluate(
    program: Program, values: Sequence[Sequence[torch.Tensor]], divisor: int
) -> torch.Tensor:
    """Return the value at the root of the tree, divided by ``divisor``.

    Args:
        program: operations of the evaluation.
        values: partial sums, by rank and place. They are overwritten.
        divisor: divisor of the result.
    """
    stack: list[torch.Tensor] = []
    for each in program:
        if each is None:
            right = stack.pop()
            stack[-1].add_(right)
        else:
            stack.append(values[each.rank][each.place])
    (root,) = stack
    return rescale_(root, 1.0, divisor)


class PartialsExchange:
    """Exchange of the partial sums of one bucket.

    Args:
        group: group of the ranks that exchange partial sums.
        places: this rank's flat buffers with its partial sums, of equal length. At least one. The first buffer receives
            the result.
        elements: number of elements to sum. Any further elements of a buffer are padding.
        program: program that evaluates the tree.
        counts: number of partial sums of each rank.
        divisor: divisor of the sum.
    """

    def __init__(
        self,
        group: Collectives,
        places: Sequence[torch.Tensor],
        elements: int,
        program: Program,
        counts: Sequence[int],
        divisor: int,
    ) -> None:
        self._group, self._program, self._divisor = group, program, divisor
        self._target = places[0]
        size = group.size
        self._length = math.ceil(elements / size / PIECE) * PIECE
        cuts = [min(elements, rank * self._length) for rank in range(size + 1)]
        self._sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        self._elements, self._counts = elements, counts
        own = places[: counts[group.rank]]
        sent = [length * len(own) for length in self._sizes]
        parcels = [each[start:stop] for start, stop in itertools.pairwise(cuts) for each in own]
        self._sent = torch.cat(parcels) if parcels else self._target.new_empty(0)
        mine = self._sizes[group.rank]
        received = [mine * count for count in counts]
        self._received = self._target.new_empty(sum(received))
        self._steps = self._run(received, sent)
        self._work: Work | None = next(self._steps)

    def _run(self, received: list[int], sent: list[int]) -> Iterator[Work]:
        group, mine = self._group, self._sizes[self._group.rank]
        yield group.alltoall(self._received, self._sent, received, sent)
        parts = iter(self._received.split(mine) if mine else ())
        values = [[next(parts, self._received) for _ in range(count)] for count in self._counts]
        result = evaluate(self._program, values, self._divisor)
        piece = result
        if mine < self._length:
            piece = self._target.new_zeros(self._length)
            piece[:mine] = result[:mine]
        whole = self._length * group.size
        fits = whole <= self._target.numel()
        into = self._target if fits else self._target.new_empty(whole)
        yield group.allgather(list(into[:whole].split(self._length)), piece)
        if not fits:
            self._target[: self._elements].copy_(into[: self._elements])

    def done(self) -> bool:
        """Return whether all communication has ended. Afterwards nothing is written to the buffers."""
        return self._work is None or self._work.done()

    def within(self, timeout_s: float) -> bool:
        self.wait()
        return True

    def advance(self) -> None:
        """Wait for the in-flight operation, and start the next one.

        Raises:
            CollectiveFailed: a rank was lost.
        """
        if self._work is not None:
            self._work.wait()
            self._work = next(self._steps, None)

    def wait(self) -> None:
        while self._work is not None:
            self.advance()
