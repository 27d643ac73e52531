"""One of the groups that a hierarchy is made of, as its thread uses it: the ranks of a host, or one of each host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from elastic.collectives import threads
from elastic.collectives.interface import Collectives, Work

_SLICE_S = 0.02  # how often a wait looks whether the process ends
_LOOK_EVERY = 50  # slices


class GroupPart:
    """``look`` is called now and then in a wait."""

    def __init__(self, group: Collectives, look: Callable[[], None] | None = None) -> None:
        self.group = group
        self._look = look

    def begin(self, start: Callable[..., Work], *arguments: Any) -> Work:
        """Raises CollectiveFailed; so does `finish`."""
        return start(*arguments)

    def finish(self, work: Work) -> None:
        """Waits until the result is in place. Raises `threads.Ending` at the end of the process."""
        for turn in itertools.count(1):
            if work.within(_SLICE_S):
                break
            threads.leave_if_ending()
            if self._look is not None and turn % _LOOK_EVERY == 0:
                self._look()
        work.wait()

    def run(self, start: Callable[..., Work], *arguments: Any) -> None:
        self.finish(self.begin(start, *arguments))
