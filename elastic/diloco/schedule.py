"""Schedule of a DiLoCo round: the inner steps at which each fragment of the parameters is sent and merged.

Pure: no I/O, no clock.

Inner steps are counted from 1. A round has ``every`` inner steps. Fragment f of P is sent after inner step n if n is
congruent to (f + 1) * every // P modulo ``every``, and merged after inner step n + delay. ``delay`` is less than the
shortest distance between two sends, so at most one fragment is in flight. If an interrupted merge is repeated, later
fragments are sent once it is complete.

    every=8, fragments=2, delay=3:   step  1  2  3  4  5  6  7  8  9 10 11 12
                                     sent           0           1           0
                                     merged                  0           1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic.errors import Invalid


class Sent(NamedTuple):
    """Fragment in flight."""

    fragment: int  # index of the fragment
    step: int  # inner step after which the fragment was sent
    due: int  # inner step after which the fragment is merged


@dataclass(frozen=True)
class RoundSchedule:
    """Schedule of the fragments of a round.

    Args:
        every: number of inner steps in a round, at least 1.
        fragments: number of fragments. Each fragment is sent once per round.
        delay: number of inner steps between sending and merging a fragment. 0 means that the step waits for the result.

    Raises:
        Invalid: a number is out of range.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise Invalid(f"{name} is {value!r}: pass an integer of {least} or more")
        if self.fragments > self.every:
            raise Invalid(
                f"{self.fragments} fragments can't be sent in a round of {self.every} inner steps: pass at most"
                f" fragments={self.every}, or a larger every"
            )
        if self.delay >= self.every // self.fragments:
            raise Invalid(
                f"delay={self.delay} is too large: a fragment is sent every {self.every // self.fragments} inner"
                " steps, and the previous fragment must be merged before. Pass a smaller delay, fewer fragments"
                " or a larger every"
            )

    def sent_at(self, step: int) -> Sent | None:
        """Return the fragment that is sent after an inner step, or None."""
        place = (step - 1) % self.every + 1
        for fragment in range(self.fragments):
            if (fragment + 1) * self.every // self.fragments == place:
                return Sent(fragment, step, step + self.delay)
        return None

    def sent_late(self, sent: Sent, position: int) -> Sent:
        """Return a fragment that is sent, perhaps again, after inner step ``position`` instead of after ``sent.step``.

        It is merged ``delay`` steps later, but before it is due to be sent in the next round, so that frequent
        interruptions cannot postpone the merge forever.
        """
        latest = sent.step + self.every - 1
        return sent._replace(due=max(sent.due, min(position + self.delay, latest)))

    def merge(self, number: int) -> Sent:
        """Return the fragment and the steps of merge ``number`` (counted from 0), assuming that no send is skipped."""
        round_, fragment = divmod(number, self.fragments)
        step = round_ * self.every + (fragment + 1) * self.every // self.fragments
        return Sent(fragment, step, step + self.delay)


def partition(sizes: Sequence[int], fragments: int) -> list[range]:
    """Divide parameters into consecutive fragments of about equal size, each with at least one parameter.

    Args:
        sizes: number of elements of each parameter, in the model's order.
        fragments: number of fragments.

    Raises:
        Invalid: the number of fragments exceeds the number of parameters.
    """
    if fragments > len(sizes):
        raise Invalid(
            f"fragments={fragments} exceeds the number of trained parameters, {len(sizes)}: pass at most"
            f" fragments={len(sizes)}"
        )
    ends = list(itertools.accumulate(sizes))
    cuts = [0]
    for number in range(1, fragments):
        wanted = ends[-1] * number / fragments
        first, last = cuts[-1] + 1, len(sizes) - (fragments - number)
        cuts.append(min(range(first, last + 1), key=lambda cut: abs(ends[cut - 1] - wanted)))
    cuts.append(len(sizes))
    return [range(start, end) for start, end in itertools.pairwise(cuts)]
