"""Time limit whose error message names the activity that exceeded it."""

from __future__ import annotations

import time


class TimeoutException(Exception):
    pass


class Timeout:
    """Time limit of ``timeout`` seconds, which begins now.

    ``message`` is the error message. It contains ``{activity}`` and may contain ``{timeout}``.
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout_s = timeout
        self._ends_at = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())

    def timed_out(self) -> bool:
        return self.remaining() == 0.0

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException if the time limit has passed."""
        if self.timed_out():
            raise TimeoutException(
                self._message.format(activity=activity, timeout=f"{self._timeout_s:g} seconds")
            )


__all__ = ["Timeout", "TimeoutException"]
