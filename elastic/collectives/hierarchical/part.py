"""Adapter for one of the two groups of a hierarchical group: the ranks of a host, or one rank of each host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from elastic.collectives import threads_at_exit
from elastic.collectives.interface import Collectives, Work

_SLICE_S = 0.02  # interval in seconds between two checks for the exit of the process
_LOOK_EVERY = 50  # number of wait slices between two calls of ``look``


class GroupPart:
    """Interface of a group that calls ``look`` regularly while it waits."""

    def __init__(self, group: Collectives, look: Callable[[], None] | None = None) -> None:
        self.group = group
        self._look = look

    def begin(self, start: Callable[..., Work], *arguments: Any) -> Work:
        """Begin a collective by calling ``start`` with ``arguments``.

        Raises:
            CollectiveFailed: the group has failed.
        """
        return start(*arguments)

    def finish(self, work: Work) -> None:
        """Wait until the result is in place. Raises `threads_at_exit.ProcessExiting` when the process exits."""
        for turn in itertools.count(1):
            if work.within(_SLICE_S):
                break
            threads_at_exit.leave_if_ending()
            if self._look is not None and turn % _LOOK_EVERY == 0:
                self._look()
        work.wait()

    def run(self, start: Callable[..., Work], *arguments: Any) -> None:
        self.finish(self.begin(start, *arguments))
