"""Selection of the world that a persistent worker joins after a failed call. Pure: no I/O, no clock.

A request to regroup reaches the ranks at different times. On a rank that has not received it, a function that calls
``init()`` may rendezvous with ranks that have. In a rendezvous, ranks therefore exchange the number of the request that
they act on. The world is formed for the largest number, and calls on ranks with a smaller number are cancelled.
"""

from __future__ import annotations


class Regroupings:
    """State of one rank's regrouping. The reading thread calls `receive`; the calling thread calls the other methods.

    The caller must hold a lock.
    """

    def __init__(self) -> None:
        # number of the request that this rank acts on, or acted on last; sent to the other ranks in a rendezvous
        self.number = 0
        self._requests = 0  # number of requests received
        self._met = 0  # number of the request for which the current world was formed
        self._meeting = False

    def receive(self) -> bool:
        """Count a received request to regroup. Return whether it ends the current world.

        The request has no effect on a world that was formed for it. During a rendezvous, the result is decided in
        `met`.
        """
        self._requests += 1
        return self._requests > self._met and not self._meeting

    def begin(self) -> bool:
        """Start to act on the next request. Return whether a world must still be formed for it."""
        self.number += 1
        return self._met < self.number

    def meet(self) -> None:
        """Record that a rendezvous is about to begin in ``init()``."""
        self._meeting = True

    def met(self, largest: int) -> None:
        """Record the largest request number among the ranks of the rendezvous."""
        self._meeting, self._met = False, largest

    @property
    def ahead(self) -> bool:
        """Return whether the world was formed for a request that this rank has yet to handle.

        If so, the rank's current call is cancelled.
        """
        return self._met > self.number

    @property
    def over(self) -> bool:
        """Return whether a request has arrived that is newer than the world."""
        return self._requests > self._met
