"""Estimate of the offset between this worker's clock and the driver's, from requests with four timestamps each.

Pure: no I/O, no clock.

    asked                request sent, by this worker's clock
    heard, told          request received and answer sent, by the driver's clock
    answered             answer received, by this worker's clock

As in NTP (Mills et al., RFC 5905, section 8; the bound is Cristian's, 1989): if both directions take the same time, the
clocks differ by ``((heard - asked) + (told - answered)) / 2``, and the error is at most half of the round trip in any
case. The fastest request is therefore used instead of an average, because slower requests add no information.
"""

from __future__ import annotations


class ClockOffset:
    """Estimate from one round of requests.

    Create a new object for each round, because clocks drift by about 10 us per second.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._offset_ns = 0
        self._round_trip_ns: int | None = None

    def add(self, asked_ns: int, received_ns: int, sent_ns: int, answered_ns: int) -> None:
        """Add a request with its four times, in nanoseconds. A request with inconsistent times is ignored."""
        self.samples += 1
        round_trip_ns = (answered_ns - asked_ns) - (sent_ns - received_ns)
        if round_trip_ns < 0 or sent_ns < received_ns:
            return
        if self._round_trip_ns is None or round_trip_ns < self._round_trip_ns:
            self._round_trip_ns = round_trip_ns
            self._offset_ns = ((received_ns - asked_ns) + (sent_ns - answered_ns)) // 2

    @property
    def known(self) -> bool:
        return self._round_trip_ns is not None

    @property
    def error_ns(self) -> int:
        """Return an upper bound of the error, in nanoseconds."""
        return (self._round_trip_ns or 0) // 2

    @property
    def offset_ns(self) -> int:
        """Return the number of nanoseconds to add to a time of this worker, or 0 if the offset is within the error.

        Processes of one host share a clock, so any nonzero value would be noise.
        """
        return 0 if abs(self._offset_ns) <= self.error_ns else self._offset_ns
