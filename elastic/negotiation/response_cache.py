"""One rank's side of the negotiation in one set of ranks: what it offers, and what it makes of decisions. Pure.

Keeps the numbers that the coordinator has given to names, exactly as every other member does, because all are told the
same decisions in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from elastic.negotiation.message_table import bits
from elastic.negotiation.messages import (
    Decision,
    Members,
    Offer,
    Request,
    Settled,
)


class Asked(Protocol):
    """A collective that this rank has submitted. Keys are equal where requests would be."""

    key: Hashable  # kept for who has no number yet
    run: tuple[int, int] | None  # of a standing order: its number, and the how-manieth run it is

    @property
    def name(self) -> str: ...

    @property
    def lasting(self) -> bool:
        """Whether it may have a number."""

    def make_key(self) -> Hashable: ...

    def request(self) -> Request: ...


A = TypeVar("A", bound=Asked)


class Offers(Generic[A]):
    """Of one set. Names in flight are unique: whoever submits sees to that."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.in_flight: dict[str, A] = {}  # offered or not, undecided
        self._new: list[A] = []  # not offered yet
        self._epoch = 0
        self._numbers: dict[Hashable, int] = {}  # by key
        self._keys: dict[str, Hashable] = {}  # of the names that have a number
        self._entries: list[Settled] = []  # by number
        self._standing: dict[int, int] = {}  # numbers of standing orders -> which one
        self._runs: dict[int, int] = {}  # of standing orders, by number
        self._late: list[tuple[int, int]] = []
        self._ended: list[tuple[int, int]] = []
        self.orders = 0  # given so far
        self.hurried = False  # some have joined, and hear of runs only by reports

    def standing_order(self, asked: A) -> int | None:
        """Which standing order this is, counted from 0; None if it has to be decided on. Ask before it is submitted."""
        if not self._standing or not asked.lasting:
            return None
        return self._standing.get(self._numbers.get(asked.make_key(), -1))

    def begin_run(self, asked: A) -> None:
        """It is a standing order, and was started."""
        number = self._numbers[asked.make_key()]
        self._runs[number] = run = self._runs[number] + 1
        asked.run = number, run

    def report(self, asked: A) -> bool:
        """This run takes long. Whether that is news."""
        assert asked.run is not None
        if asked.run[0] not in self._standing or self.in_flight.get(asked.name) is asked:
            return False
        self.in_flight[asked.name] = asked
        self._late.append(asked.run)
        return True

    def withdraw(self, asked: A) -> bool:
        """It has ended after all. Whether it had been reported."""
        if asked.run is None or self.in_flight.get(asked.name) is not asked:
            return False
        del self.in_flight[asked.name]
        self._ended.append(asked.run)
        return True

    def runs_missed(self, number: int, run: int) -> list[tuple[int, Settled]]:
        """On a rank that has joined: the order, and what it is, for each run that the others are ahead."""
        if number not in self._standing:
            return []
        missed = max(0, run - self._runs[number])
        self._runs[number] += missed
        return [(self._standing[number], self._entries[number])] * missed

    def submit(self, asked: A) -> None:
        self.in_flight[asked.name] = asked
        self._new.append(asked)

    def drop(self) -> None:
        """What is in flight never comes: its world is over."""
        self.in_flight.clear()
        self._new.clear()

    def offer(self) -> Offer | None:
        """Everything submitted since the last one."""
        new, self._new = self._new, []
        late, self._late = self._late, []
        ended, self._ended = self._ended, []
        if not (new or late or ended):
            return None
        known = bytearray((len(self._entries) + 7) // 8)
        requests = []
        for asked in new:
            key = asked.make_key() if asked.lasting else None
            number = self._numbers.get(key)
            if number is None:
                asked.key = key
                requests.append(self._after_runs(asked.request()))
            else:
                known[number >> 3] |= 1 << (number & 7)
        bits_of_known = bytes(known.rstrip(b"\0"))
        return Offer(
            self.members, self._epoch, bits_of_known, tuple(requests), tuple(late), tuple(ended)
        )

    def _after_runs(self, request: Request) -> Request:
        """Where the name is a standing order, which this request is not."""
        number = self._numbers.get(self._keys.get(request.name), -1)
        if number not in self._standing:
            return request
        return msgspec.structs.replace(request, after=self._runs[number])

    def take(self, decision: Decision) -> Iterator[tuple[Settled, A | None]]:
        """What runs now, in order, with what this rank submitted for it: None if it has joined.

        Go through all of it before anything else is submitted.
        """
        if decision.epoch != self._epoch:
            self._epoch = decision.epoch
            self._numbers, self._keys, self._entries = {}, {}, []
        known = int.from_bytes(decision.known, "little")
        for number in bits(known):
            found = self._entries[number]
            yield found, self.in_flight.pop(found.request.name, None)
        for settled in decision.settled:
            name = settled.request.name
            asked = self.in_flight.pop(name, None)
            for number in [n for n in self._standing if self._entries[n].request.name == name]:
                del self._standing[number]
            if not settled.error:
                self._learn(settled, asked)
            yield settled, asked
        if decision.standing >= 0:
            self._standing[decision.standing] = self.orders
            self._runs[decision.standing] = 0
            self.orders += 1

    def _learn(self, settled: Settled, asked: A | None) -> None:
        name = settled.request.name
        key = self._keys.pop(name, None)
        if key is not None:
            del self._numbers[key]
        if settled.number < 0:
            return
        assert settled.number == len(self._entries), "numbers are given in order"
        self._entries.append(settled)
        if asked is not None:
            # Offered by its old number, while another rank asked for something else.
            asked.key = asked.key or asked.make_key()
            self._keys[name] = asked.key
            self._numbers[asked.key] = settled.number
