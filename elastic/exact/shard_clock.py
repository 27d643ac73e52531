"""Timer for the shards of a step, on the host or in a GPU stream."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from elastic.exact.load_balancing import SpeedWindow


class ShardClock:
    """Timer that runs from the start of the first shard of a step to the end of the last one.

    On a GPU, events are recorded and read in a later step, so that no step waits for them.
    """

    def __init__(self) -> None:
        self.window = SpeedWindow()
        self._began: float | Any = None
        self._recorded: deque[tuple[Any, Any, int]] = (
            deque()
        )  # CUDA events of the steps, and the number of shards of each step

    def begin(self) -> None:
        self._began = self._now()

    def end(self, shards: int) -> None:
        """Record the end of a step with ``shards`` shards.

        This method has no effect if `begin` was not called, as on a rank without shards.
        """
        began, self._began = self._began, None
        if began is None:
            return
        now = self._now()
        if isinstance(began, float):
            if isinstance(now, float):  # `now` is an event if the first shard has initialized CUDA.
                self.window.took(now - began, shards)
            return
        self._recorded.append((began, now, shards))
        while self._recorded and self._recorded[0][1].query():
            first, last, count = self._recorded.popleft()
            self.window.took(first.elapsed_time(last) / 1e3, count)

    @staticmethod
    def _now() -> float | Any:
        if not torch.cuda.is_initialized():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
