"""Which world a persistent worker meets next, where calls fail on some ranks. Pure; see `served_world`.

The word to regroup reaches the ranks at different times. A function that calls ``init()`` by itself meanwhile meets
ranks that have heard the word before it has. So ranks that meet tell each other for which word they have come, by
its number. The world belongs to the largest, and the call of whoever came with less is called off.
"""

from __future__ import annotations


class Regroupings:
    """One rank's. Words are counted in the thread that reads them, all else happens in the one that makes the calls;
    whoever calls holds a lock.
    """

    def __init__(self) -> None:
        self.number = 0  # of the last word that this rank acts on, or has acted on: what it comes to a meeting with
        self._told = 0  # words that have come
        self._met = 0  # what the present world was met for
        self._meeting = False

    def tell(self) -> bool:
        """The word has come. Returns whether the present world is over: not if it was met for this word, nor while
        ranks meet, which `met` judges.
        """
        self._told += 1
        return self._told > self._met and not self._meeting

    def begin(self) -> bool:
        """Acts on the next word. Returns whether the world that it asks for is still to be met."""
        self.number += 1
        return self._met < self.number

    def meet(self) -> None:
        """In ``init()``, before other ranks are met."""
        self._meeting = True

    def met(self, largest: int) -> None:
        """The largest number among the ranks that have met."""
        self._meeting, self._met = False, largest

    @property
    def ahead(self) -> bool:
        """Whether the world was met for a word that this rank has not acted on: its present call is called off."""
        return self._met > self.number

    @property
    def over(self) -> bool:
        """Whether a word has come for which the world was not met."""
        return self._told > self._met
