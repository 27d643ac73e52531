"""Table of the requests of one set's ranks, by name and by cache number. Pure: no I/O, no clock.

`coordinator` decides when a collective runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic.negotiation.messages import ALLREDUCE, Members, Request, Response


@dataclass
class MessageTable:
    """The pending collectives of one set of ranks."""

    members: Members  # all ranks of the process set
    named_as: Members  # members as in messages: empty for the whole world
    offered: dict[int, int]  # bit mask of the numbers that each rank has offered
    # requests, by name and rank
    waiting: dict[str, dict[int, Request]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # number of each name
    entries: list[Response] = field(default_factory=list)  # responses by number
    seen: set[str] = field(default_factory=set)  # names that were requested at least once
    # bit mask of the numbers of collectives to which joined ranks can contribute zeros
    reducible: int = 0
    # bit mask of the numbers whose collective a rank has requested by a full request
    by_request: int = 0
    watched: int = 0  # bit mask of the names that were pending at the last stall check
    epoch: int = 0
    before: list[Response] = field(default_factory=list)  # the entries of the previous epoch
    unaware: set[int] = field(default_factory=set)  # ranks that have not seen the current epoch yet
    lacking: int = -1  # the rank that was missing last, which is checked first

    def name_of(self, number: int) -> str:
        return self.entries[number].request.name

    def with_known_numbers(self, rank: int, known: int) -> list[Request]:
        """Return the requests that these bits of the previous epoch stand for."""
        position = self.members.index(rank)
        return [self.before[number].asked_by(position) for number in bits(known)]

    def asked(self, number: int, rank: int) -> Request:
        """Return the request that a number represents for a rank."""
        return self.entries[number].asked_by(self.members.index(rank))

    def ask(self, rank: int, request: Request) -> None:
        """Record a full request.

        If ranks have offered the same name by number, their offers are converted to full requests.
        """
        asked = self.waiting.get(request.name)
        if asked is None:
            asked = self.waiting[request.name] = {}
            number = self.numbers.get(request.name)
            # Expand the bits of the other ranks to requests.
            if number is not None:
                bit = 1 << number
                self.by_request |= bit
                for other, offered in self.offered.items():
                    if offered & bit:
                        self.offered[other] = offered & ~bit
                        asked[other] = self.asked(number, other)
        asked[rank] = request

    def offers(self, name: str) -> set[int]:
        """Return the ranks that have offered this name."""
        ranks = set(self.waiting.get(name, ()))
        number = self.numbers.get(name)
        if number is not None:
            ranks |= {rank for rank, offered in self.offered.items() if offered >> number & 1}
        return ranks

    def asked_by_all(self, name: str) -> dict[int, Request]:
        """Return the request of each rank that has offered this name, converted to full requests."""
        number = self.numbers.get(name)
        if name not in self.waiting and number is not None:
            for rank, offered in self.offered.items():
                if offered >> number & 1:
                    self.ask(rank, self.asked(number, rank))
        return self.waiting[name]

    def take(self, name: str) -> None:
        """Remove a name whose collective was decided."""
        del self.waiting[name]
        number = self.numbers.get(name)
        if number is not None:
            self.by_request &= ~(1 << number)

    def numbered(self, found: Response, capacity: int) -> Response:
        """Return the response, with a number if the name was seen before and a number is free."""
        request = found.request
        if found.error:
            return found
        # The request has changed, so its name gets a new number.
        self.numbers.pop(request.name, None)
        if not request.lasting or capacity == 0:
            return found
        if request.name not in self.seen:
            self.seen.add(request.name)
            if len(self.seen) > 64 * capacity:
                self.seen.clear()
            return found
        if len(self.entries) >= capacity:
            if self.unaware:
                return found
            self.forget_numbers()
        number = len(self.entries)
        found = Response(found.request, found.rows, found.payloads, number)
        self.entries.append(found)
        self.numbers[request.name] = number
        if request.kind == ALLREDUCE:
            self.reducible |= 1 << number
        return found

    def forget_numbers(self) -> None:
        """Start a new epoch, in which all numbers are void."""
        # The offers of the previous epoch are repeated as full requests, because their numbers are void.
        for rank, offered in self.offered.items():
            for number in bits(offered):
                request = self.asked(number, rank)
                self.waiting.setdefault(request.name, {})[rank] = request
            self.offered[rank] = 0
        self.before, self.entries, self.numbers = self.entries, [], {}
        self.reducible = self.by_request = self.watched = 0
        self.epoch += 1
        self.unaware = set(self.members)

    def watch(self, name: str) -> None:
        """Mark the number of this name until the next stall check, which thereby detects whether the collective has run
        since.
        """
        if name in self.numbers:
            self.watched |= 1 << self.numbers[name]

    def names(self) -> Iterator[tuple[str, set[int]]]:
        """Yield each name that was offered by some ranks, with these ranks."""
        for name, asked in self.waiting.items():
            yield name, set(asked)
        union = 0
        for offered in self.offered.values():
            union |= offered
        for number in bits(union):
            ranks = {rank for rank, offered in self.offered.items() if offered >> number & 1}
            yield self.entries[number].request.name, ranks


def bits(mask: int) -> Iterator[int]:
    """Yield the indices of the set bits, in ascending order."""
    for index, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
        while byte:
            low = byte & -byte
            yield index * 8 + low.bit_length() - 1
            byte ^= low
