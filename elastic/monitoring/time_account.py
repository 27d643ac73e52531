"""How a worker's time goes: what its training thread does, from one moment to the next. Times are passed in.

    training     in the training function, and in none of the others
    committing   in ``state.commit()``
    data         waiting for the next batch of a ``DataLoader``
    storage      reading a checkpoint to begin with, and waiting for the last one to be written
    recovering   from the end of a world that broke until the state is equal everywhere in the next
    joining      from ``init()`` to the training function, and in planned changes
    lost         what was training, committing or waiting for data, and has to be done again
    idle         before and after the training function, and standing by

They add up to the time since the account was begun.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import get_args

from elastic.protocol.messages import Part, Times

REPEATED: tuple[Part, ...] = ("training", "committing", "data")  # has to be done again after a loss


class TimeAccount:
    """One worker's. Changed by one thread; `times` is for any."""

    def __init__(self, now: float, part: Part = "joining") -> None:
        self.part: Part = part
        self._since = now
        self._spent: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
        self._kept: dict[Part, float] = dict(self._spent)  # at the newest commit
        self._lock = threading.Lock()

    def begin(self, part: Part, now: float, since: float = 0.0) -> Part:
        """From now on it does this, or ``since`` an earlier moment, though not from before the last change. What it did
        before."""
        with self._lock:
            before = self.part
            at = max(self._since, min(since, now)) if since else now
            self._spent[before] += at - self._since
            self.part, self._since = part, at
        return before

    @contextlib.contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """And then again what it did before."""
        before = self.begin(part, time.monotonic())
        try:
            yield
        finally:
            self.begin(before, time.monotonic())

    def committed(self, now: float, then: Part | None = None) -> None:
        """Up to here nothing will have to be done again. From here on it does what it did, or ``then``."""
        with self._lock:
            self._spent[self.part] += now - self._since
            self._since = now
            self.part = then or self.part
            for repeated in REPEATED:
                self._kept[repeated] = self._spent[repeated]

    def only_prepared(self) -> None:
        """What looked like training was the way to the training function."""
        with self._lock:
            self._spent["joining"] += self._spent["training"]
            self._spent["training"] = self._kept["training"] = 0.0

    def stepped_back(self) -> None:
        """To the newest commit: what followed it is lost."""
        with self._lock:
            for part in REPEATED:
                self._spent["lost"] += self._spent[part] - self._kept[part]
                self._spent[part] = self._kept[part]

    def times(self, now: float) -> Times:
        """Up to now."""
        with self._lock:
            spent = dict(self._spent)
            spent[self.part] += max(0.0, now - self._since)
        return Times(**spent)


__all__ = ["REPEATED", "TimeAccount"]
