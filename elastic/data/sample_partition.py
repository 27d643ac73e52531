"""Assignment of samples to steps, and to ranks or shards, from the job's position. Pure: no I/O, no clock.

An epoch has one order of its samples, the same on all ranks, and the job has consumed a prefix of it. A position
therefore consists of two numbers, independent of the number of ranks and of prefetched batches. A step consumes the
next samples of the order. They are divided among the ranks (or shards) into consecutive parts whose sizes differ by at
most one. After a change of the world, the same rule applies to the remaining samples.

SamplePartition(parts=3, batch=6) with 20 samples:

    | 0 1 . 2 3 . 4 5 | 6 7 . 8 9 . 10 11 | 12 13 . 14 15 | 16 17 . 18 . 19 |
    part 0 .  1 .  2                        the sizes of the last two steps differ by at most one

No sample is repeated to fill a step. If a whole step would leave less than one sample for each part, the last two steps
share the remaining samples. A part is therefore empty only if a step has fewer samples than parts: the epoch has fewer
samples left, or each part consists of a single sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elastic.errors import Invalid


class Position(NamedTuple):
    """Position of the job in its data: all ranks together have consumed ``consumed`` samples of epoch ``epoch``."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class SamplePartition:
    """Division of an epoch into steps of ``batch`` samples, and of each step into ``parts`` (ranks or shards).

    With ``drop_last``, the epoch ends when less than a whole step is left. Raises Invalid if a number is less than 1.
    """

    parts: int
    batch: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.parts < 1 or self.batch < 1:
            raise Invalid(
                f"a step of {self.batch} samples can't be divided into {self.parts} parts: pass at least 1 for"
                " both"
            )

    @property
    def reach(self) -> int:
        """Number of samples of a stream that must be read ahead to compute `size`."""
        return self.batch + self.parts

    def size(self, left: int) -> int:
        """Return the number of samples in the next step if the epoch has ``left`` samples left.

        0 means that the epoch has ended.
        """
        if left < self.batch and self.drop_last:
            return 0
        if self.drop_last or not self.batch < left < self.reach or self.batch < 2 * self.parts:
            return min(left, self.batch)
        return left - left // 2

    def steps(self, left: int) -> int:
        """Return the number of steps in an epoch with ``left`` samples."""
        return left // self.batch if self.drop_last else -(-left // self.batch)

    def step(self, consumed: int, length: int) -> range:
        """Return the next step's positions in the epoch's order. The result is empty if the epoch is over."""
        return range(consumed, consumed + self.size(max(0, length - consumed)))

    def part(self, step: range, number: int) -> range:
        """Return the positions of rank or shard ``number`` in a step.

        The result is empty only if the step has fewer samples than parts.
        """
        size, larger = divmod(len(step), self.parts)
        start = number * size + min(number, larger)
        return step[start : start + size + (number < larger)]

    def weight(self, step: range, number: int) -> float:
        """Return the weight of a part: the average over all parts of (mean * weight) is the mean over the step.

        The weight is 1.0 if all parts have the same size, and 0.0 for an empty part.
        """
        if len(step) % self.parts == 0:
            return 1.0
        return len(self.part(step, number)) * self.parts / len(step)

    def rest(self, consumed: int, length: int) -> Iterator[range]:
        """Yield the steps of an epoch that remain after ``consumed`` samples."""
        while step := self.step(consumed, length):
            yield step
            consumed = step.stop
