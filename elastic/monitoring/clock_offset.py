"""How far the driver's clock is from this worker's: decided from questions and answers with four times each. Pure.

    asked (here)  ->  heard, told (there)  ->  answered (here)

As in NTP (Mills et al., RFC 5905, section 8; the bound is Cristian's, 1989): if both ways take equally long, the clocks
differ by ``((heard - asked) + (told - answered)) / 2``, and however long each way takes, the error is at most half of
the round trip. So the quickest of several questions is believed, and no mean is taken: a slow one says less.
"""

from __future__ import annotations


class ClockOffset:
    """Made anew for every round of questions: crystals drift by some ten microseconds per second."""

    def __init__(self) -> None:
        self.samples = 0
        self._offset_ns = 0
        self._round_trip_ns: int | None = None

    def add(self, asked_ns: int, heard_ns: int, told_ns: int, answered_ns: int) -> None:
        """One question. An answer whose times can't be is left out."""
        self.samples += 1
        round_trip_ns = (answered_ns - asked_ns) - (told_ns - heard_ns)
        if round_trip_ns < 0 or told_ns < heard_ns:
            return
        if self._round_trip_ns is None or round_trip_ns < self._round_trip_ns:
            self._round_trip_ns = round_trip_ns
            self._offset_ns = ((heard_ns - asked_ns) + (told_ns - answered_ns)) // 2

    @property
    def known(self) -> bool:
        return self._round_trip_ns is not None

    @property
    def error_ns(self) -> int:
        """At most so far off."""
        return (self._round_trip_ns or 0) // 2

    @property
    def offset_ns(self) -> int:
        """What has to be added to a time of this worker. 0 where the clocks can't be told apart.

        Processes of one host share one clock, and there any other value would be noise.
        """
        return 0 if abs(self._offset_ns) <= self.error_ns else self._offset_ns
