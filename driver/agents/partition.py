"""Decides whether a host that does not answer is lost, or we are the ones who are cut off. Pure.

Who hears nobody at all can't tell: all hosts may be gone, or only the way from here to anywhere. The others train on
meanwhile, and nothing that is decided here could be told them. So where several hosts were there and none is, none is
given up; once one is heard of again, each of the others gets its time anew.
"""

from __future__ import annotations


class Reach:
    """Hosts by name."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # that were reached, and were not lost since
        self._here: set[str] = set()
        self._held: set[str] = set()  # would be lost, if anybody was here

    @property
    def cut_off(self) -> bool:
        """Whether hosts are not given up because nobody is reached."""
        return bool(self._held)

    def here(self, host: str) -> list[str]:
        """It is reached. Returns those that were held, who get another chance."""
        self._known.add(host)
        self._here.add(host)
        released, self._held = self._held - {host}, set()
        return sorted(released)

    def expected(self, host: str) -> None:
        """A driver before this one has reached it."""
        self._known.add(host)

    def away(self, host: str) -> None:
        """Its connection has ended; it may come back."""
        self._here.discard(host)

    def drop(self, host: str) -> None:
        """It is let go: whether it is there says nothing any more."""
        for hosts in (self._known, self._here, self._held):
            hosts.discard(host)

    def overdue(self, host: str) -> bool:
        """It has not come back in time: whether it is lost."""
        self._here.discard(host)
        if host in self._known and not self._here and len(self._known) > 1:
            self._held.add(host)
            return False
        self._known.discard(host)
        return True

    def give_up(self) -> list[str]:
        """It has lasted too long: all that were held are lost."""
        held, self._held = self._held, set()
        self._known -= held
        return sorted(held)
