"""Decides which collectives of a set of ranks become standing orders, and knows who waits in which run of one. Pure.

A number that has run alone five times becomes a *standing order*: from then on a rank starts it as soon as it has
submitted it, on a data group that serves nothing else, and nobody is told. That can't mix anything up: on that group
there is one collective, of one size, one at a time. Only a rank that has waited for a while reports which run it waits
in. If another one asks for something else by that name instead of this run, the decision is an error as ever, those
that have started cut the group, and no further order is given in this set. A set has at most four, and none with more
than 16 ranks: each costs connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elastic.negotiation.messages import ALLREDUCE, Request

TIMES_ALONE = 5  # until a number becomes a standing order
MOST_ORDERS = 4
_UP_TO = 16  # ranks
_ADASUM = 2


class StandingOrders:
    """Of a set with so many ranks, by number: those that stand, and the runs of them that take long."""

    def __init__(self, ranks: int) -> None:
        self._standing: set[int] = set()
        self._left = MOST_ORDERS if ranks <= _UP_TO else 0  # that may still be given
        self._alone: dict[int, int] = {}  # how often a number ran alone
        self._late: dict[int, dict[int, int]] = {}  # order -> rank -> the run in which it waits

    def __contains__(self, number: int) -> bool:
        return number in self._standing

    def __iter__(self) -> Iterator[int]:
        return iter(self._standing)

    def __bool__(self) -> bool:
        return bool(self._standing)

    # ---- which there are -------------------------------------------------------------------------------------------

    def ran_alone(self, number: int, request: Request) -> bool:
        """Whether it becomes a standing order now."""
        if not self._left:
            return False
        self._alone[number] = times = self._alone.get(number, 0) + 1
        if times < TIMES_ALONE or number in self._standing:
            return False
        plain = request.kind == ALLREDUCE and request.op != _ADASUM and len(request.tensors) == 1
        if not plain or request.device != "cpu":
            return False  # what is started on a GPU does not wait for its thread
        self._standing.add(number)
        self._left -= 1
        return True

    def ran_in_company(self, numbers: Iterable[int]) -> None:
        """They have to run alone as often again."""
        for number in numbers if self._alone and self._left else ():
            self._alone.pop(number, None)

    def end(self, numbers: Iterable[int], failed: bool) -> None:
        """These are orders no more; where one could not run, none is ever given again."""
        ended = self._standing.intersection(numbers)
        self._standing -= ended
        if ended and failed:
            self._left = 0

    def forget_numbers(self) -> None:
        """They mean something else from here on. Not while an order stands."""
        assert not self._standing
        self._alone.clear()

    # ---- who waits in a run ----------------------------------------------------------------------------------------

    def report(self, number: int, rank: int, run: int) -> None:
        """This rank has waited in this run for a while."""
        self._late.setdefault(number, {})[rank] = run

    def withdraw(self, number: int, rank: int, run: int) -> bool:
        """The run that it reported has ended. Whether it still counted as waiting in it."""
        waited = self._late.get(number, {}).get(rank) == run
        if waited:
            del self._late[number][rank]
        return waited

    def late(self) -> Iterator[tuple[int, dict[int, int]]]:
        """The orders in which somebody waits, with the run of each rank that does."""
        return ((number, runs) for number, runs in self._late.items() if runs)

    def forget_late(self, number: int) -> dict[int, int]:
        """Who waited in which run: they wait for something else now."""
        return self._late.pop(number, {})
