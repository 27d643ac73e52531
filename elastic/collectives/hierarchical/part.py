"""One of the groups that a hierarchy is made of, as its thread uses it: the ranks of a host, or one of each host."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from elastic.collectives import threads
from elastic.collectives.interface import Collectives, Work
from elastic.errors import CollectiveFailed

_SLICE_S = 0.02  # how often a wait looks whether the process ends
_LOOK_EVERY = 50  # slices

_RANK = re.compile(r"\brank (\d+)\b")


class GroupPart:
    """``ranks``: those of the whole group, by their rank in this one. ``look`` is called now and then in a wait."""

    def __init__(
        self, group: Collectives, ranks: Sequence[int], look: Callable[[], None] | None = None
    ) -> None:
        self.group = group
        self._ranks = ranks
        self._look = look

    def begin(self, start: Callable[..., Work], *arguments: Any) -> Work:
        """Raises CollectiveFailed that names ranks of the whole group; so does `finish`."""
        try:
            return start(*arguments)
        except CollectiveFailed as error:
            raise self._renamed(error) from None

    def finish(self, work: Work) -> None:
        """Waits until the result is in place. Raises `threads.Ending` at the end of the process."""
        try:
            for turn in itertools.count(1):
                if work.within(_SLICE_S):
                    break
                threads.leave_if_ending()
                if self._look is not None and turn % _LOOK_EVERY == 0:
                    self._look()
            work.wait()
        except CollectiveFailed as error:
            raise self._renamed(error) from None

    def run(self, start: Callable[..., Work], *arguments: Any) -> None:
        self.finish(self.begin(start, *arguments))

    def _renamed(self, error: CollectiveFailed) -> CollectiveFailed:
        def name(found: re.Match[str]) -> str:
            number = int(found[1])
            return f"rank {self._ranks[number]}" if number < len(self._ranks) else found[0]

        return CollectiveFailed(_RANK.sub(name, str(error)))
