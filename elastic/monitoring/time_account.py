"""Accounting of a worker's time by the activity of its training thread. Times are passed in, in seconds.

    training     in the training function, but in none of the activities below
    committing   in ``state.commit()``
    data         waiting for the next batch of a ``DataLoader``
    storage      reading the initial checkpoint, and waiting for the last one to be written
    recovering   from the end of a failed world until the state is equal on all ranks of the next one
    joining      from ``init()`` to the training function, and in planned changes
    lost         training, committing or waiting for data that has to be repeated
    idle         before and after the training function, and as a standby

The times of all activities add up to the time since the account was opened.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import get_args

from elastic.protocol.messages import Part, Times

REPEATED: tuple[Part, ...] = (
    "training",
    "committing",
    "data",
)  # activities whose time since the last commit is lost if a worker is lost


class TimeAccount:
    """Time account of one worker. One thread changes the account, and `times` is thread-safe."""

    def __init__(self, now: float, part: Part = "joining") -> None:
        self.part: Part = part
        self._since = now
        self._spent: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        # seconds by activity, up to the newest commit
        self._kept: dict[Part, float] = dict(self._spent)
        self._lock = threading.Lock()

    def begin(self, part: Part, now: float, since: float = 0.0) -> Part:
        """Begin an activity, and return the previous one.

        Args:
            part: the activity.
            now: current time, in seconds.
            since: time at which the activity began, if before ``now``. Must not precede the last change of activity.
        """
        with self._lock:
            before = self.part
            at = max(self._since, min(since, now)) if since else now
            self._spent[before] += at - self._since
            self.part, self._since = part, at
        return before

    @contextlib.contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Context manager for an activity. The previous activity continues afterwards."""
        before = self.begin(part, time.monotonic())
        try:
            yield
        finally:
            self.begin(before, time.monotonic())

    def committed(self, now: float, then: Part | None = None) -> None:
        """Record a commit: no work up to now has to be repeated. The activity continues, or becomes ``then``."""
        with self._lock:
            self._spent[self.part] += now - self._since
            self._since = now
            self.part = then or self.part
            for repeated in REPEATED:
                self._kept[repeated] = self._spent[repeated]

    def only_prepared(self) -> None:
        """Count all training time so far as joining, because it preceded the training function."""
        with self._lock:
            self._spent["joining"] += self._spent["training"]
            self._spent["training"] = self._kept["training"] = 0.0

    def stepped_back(self) -> None:
        """Record a rollback to the newest commit. The time since this commit is lost."""
        with self._lock:
            for part in REPEATED:
                self._spent["lost"] += self._spent[part] - self._kept[part]
                self._spent[part] = self._kept[part]

    def times(self, now: float) -> Times:
        """Return the seconds by activity up to now."""
        with self._lock:
            spent = dict(self._spent)
            spent[self.part] += max(0.0, now - self._since)
        return Times(**spent)


__all__ = ["REPEATED", "TimeAccount"]
