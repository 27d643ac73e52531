"""Selection of the world that a persistent worker joins after calls have failed. Pure: no I/O, no clock.

The request to regroup reaches the ranks at different times. Until then, a function that calls ``init()`` may rendezvous
with ranks that have already received the request. Ranks therefore exchange the number of the request that they act on.
The world is formed for the largest of these numbers, and calls on ranks with a smaller number are cancelled.
"""

from __future__ import annotations


class Regroupings:
    """State of one rank's regrouping. The reading thread calls `tell`, and the calling thread calls the other methods.

    The caller must hold a lock.
    """

    def __init__(self) -> None:
        # Number of the last request that this rank acts on or has acted on. It is sent to the other ranks.
        self.number = 0
        self._requests = 0  # number of received requests
        self._met = 0  # number of the request to regroup for which the current world was formed
        self._meeting = False

    def tell(self) -> bool:
        """Count a request to regroup. Return whether the current world has ended.

        The world has not ended if it was formed for this request. During a rendezvous, `met` decides later.
        """
        self._requests += 1
        return self._requests > self._met and not self._meeting

    def begin(self) -> bool:
        """Act on the next request. Return whether its world must still be formed."""
        self.number += 1
        return self._met < self.number

    def meet(self) -> None:
        """Record that a rendezvous is about to begin. Called in ``init()``."""
        self._meeting = True

    def met(self, largest: int) -> None:
        """Record the largest number among the ranks of the rendezvous."""
        self._meeting, self._met = False, largest

    @property
    def ahead(self) -> bool:
        """Return whether the world was formed for a request that this rank has not handled, so that its call is
        cancelled.
        """
        return self._met > self.number

    @property
    def over(self) -> bool:
        """Return whether a request has arrived that is newer than the world."""
        return self._requests > self._met
