"""Pending requests of the ranks of one process set, by name and by cache number. Pure: no I/O, no clock.

`coordinator` decides when a collective runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic.negotiation.messages import ALLREDUCE, Members, Request, Response


@dataclass
class MessageTable:
    """Pending collectives of one process set."""

    members: Members  # world ranks of all members
    named_as: Members  # members as given in messages, which is empty for the whole world
    offered: dict[int, int]  # bit mask of the cache numbers that each rank has offered
    # requests without a decision, by name and rank
    waiting: dict[str, dict[int, Request]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # cache number of each name
    entries: list[Response] = field(default_factory=list)  # responses, indexed by cache number
    # names that were requested at least once; a name is cached from its second request on
    seen: set[str] = field(default_factory=set)
    # bit mask of the cache numbers of allreduces, to which joined ranks can contribute zeros
    reducible: int = 0
    # bit mask of the cache numbers whose collective some rank has requested in full, without the number
    by_request: int = 0
    watched: int = 0  # bit mask of the cache numbers that were pending at the last stall check
    epoch: int = 0
    before: list[Response] = field(default_factory=list)  # `entries` of the previous epoch
    # ranks that have not yet sent a message in the current epoch
    unaware: set[int] = field(default_factory=set)
    # rank that was found missing last; checked first, because it is probably still missing
    lacking: int = -1

    def name_of(self, number: int) -> str:
        return self.entries[number].request.name

    def with_known_numbers(self, rank: int, known: int) -> list[Request]:
        """Return the requests that the bits of ``known`` represent.

        The bits are cache numbers of the previous epoch.
        """
        position = self.members.index(rank)
        return [self.before[number].asked_by(position) for number in bits(known)]

    def asked(self, number: int, rank: int) -> Request:
        """Return the request that a cache number represents for a rank."""
        return self.entries[number].asked_by(self.members.index(rank))

    def ask(self, rank: int, request: Request) -> None:
        """Record a full request.

        Offers of the same name by cache number are converted to full requests.
        """
        asked = self.waiting.get(request.name)
        if asked is None:
            asked = self.waiting[request.name] = {}
            number = self.numbers.get(request.name)
            # Convert the other ranks' bits to full requests.
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
        """Return the requests of all ranks that have offered this name.

        Offers by cache number are converted to full requests.
        """
        number = self.numbers.get(name)
        if name not in self.waiting and number is not None:
            for rank, offered in self.offered.items():
                if offered >> number & 1:
                    self.ask(rank, self.asked(number, rank))
        return self.waiting[name]

    def take(self, name: str) -> None:
        """Remove a name after its collective was decided."""
        del self.waiting[name]
        number = self.numbers.get(name)
        if number is not None:
            self.by_request &= ~(1 << number)

    def numbered(self, found: Response, capacity: int) -> Response:
        """Return the response, with a cache number if the name was requested before and a number is free."""
        request = found.request
        if found.error:
            return found
        # The requests no longer match the cached response, so the name needs a new number.
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
        """Start a new epoch, which invalidates all cache numbers."""
        # Convert pending offers to full requests, because their numbers become invalid.
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
        """Mark this name's cache number.

        If it is still marked at the next stall check, the collective has not run since.
        """
        if name in self.numbers:
            self.watched |= 1 << self.numbers[name]

    def names(self) -> Iterator[tuple[str, set[int]]]:
        """Yield each name that at least one rank has offered, with the set of those ranks."""
        for name, asked in self.waiting.items():
            yield name, set(asked)
        union = 0
        for offered in self.offered.values():
            union |= offered
        for number in bits(union):
            ranks = {rank for rank, offered in self.offered.items() if offered >> number & 1}
            yield self.entries[number].request.name, ranks


def bits(mask: int) -> Iterator[int]:
    """Yield the indices of the set bits of an integer, in ascending order."""
    for index, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
        while byte:
            low = byte & -byte
            yield index * 8 + low.bit_length() - 1
            byte ^= low
