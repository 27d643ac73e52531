"""`goodput`: time that this worker has spent on each activity."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from elastic import context
from elastic.protocol.messages import Times


@dataclass(frozen=True)
class Goodput:
    """Time in seconds that a worker has spent on each activity since ``init()``. docs/spot.md describes each field.

    ``wall_s`` is the sum of the parts, and ``goodput`` is ``training_s / wall_s``.
    """

    training_s: float
    committing_s: float
    data_s: float
    storage_s: float
    recovering_s: float
    joining_s: float
    lost_s: float
    idle_s: float

    @property
    def wall_s(self) -> float:
        return float(sum(self.__dict__.values()))

    @property
    def goodput(self) -> float:
        return self.training_s / self.wall_s if self.wall_s else 0.0


def goodput() -> Goodput:
    """Return the time that this worker has spent on training, recoveries and other activities, in seconds.

    ``elastic.goodput().goodput`` is the fraction of time spent on training that was not lost. The call takes
    microseconds and does not communicate. ``elasticrun --summary`` prints the same for all workers when the job ends.

    Raises:
        NotInitialized: ``init()`` was not called.
    """
    times: Times = context.current().account.times(time.monotonic())
    return Goodput(**{f"{part}_s": spent for part, spent in msgspec.structs.asdict(times).items()})


__all__ = ["Goodput", "goodput"]
