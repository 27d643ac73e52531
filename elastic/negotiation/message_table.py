"""Keeps what the ranks of one set have offered, by name and by number, and which numbers stand for what. Pure.

See `coordinator`, which decides when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic.negotiation.messages import ALLREDUCE, Members, Request, Response


@dataclass
class MessageTable:
    """The collectives of one set of ranks."""

    members: Members  # spelled out
    named_as: Members  # as in messages
    offered: dict[int, int]  # by rank: the bits of what it offered by number
    waiting: dict[str, dict[int, Request]] = field(default_factory=dict)  # by name, by rank
    numbers: dict[str, int] = field(default_factory=dict)  # of names
    entries: list[Response] = field(default_factory=list)  # by number
    seen: set[str] = field(default_factory=set)  # names that have come once
    reducible: int = 0  # bits of the entries that joined ranks can add zeros to
    by_request: int = 0  # bits of the names that somebody waits for by a whole request
    watched: int = 0  # bits of the names that were waited for at the last look
    epoch: int = 0
    before: list[Response] = field(default_factory=list)  # the entries of the epoch before
    unaware: set[int] = field(default_factory=set)  # ranks that have not taken notice of this epoch
    lacking: int = -1  # a rank that lacked something the last time

    def name_of(self, number: int) -> str:
        return self.entries[number].request.name

    def in_old_words(self, rank: int, known: int) -> list[Request]:
        """What bits of the epoch before stand for."""
        position = self.members.index(rank)
        return [self.before[number].asked_by(position) for number in bits(known)]

    def asked(self, number: int, rank: int) -> Request:
        """What this rank says with a number."""
        return self.entries[number].asked_by(self.members.index(rank))

    def ask(self, rank: int, request: Request) -> None:
        """By name: who has offered the same by its number now waits by name too."""
        asked = self.waiting.get(request.name)
        if asked is None:
            asked = self.waiting[request.name] = {}
            number = self.numbers.get(request.name)
            if number is not None:  # the bits of others now count as what they stand for
                bit = 1 << number
                self.by_request |= bit
                for other, offered in self.offered.items():
                    if offered & bit:
                        self.offered[other] = offered & ~bit
                        asked[other] = self.asked(number, other)
        asked[rank] = request

    def offers(self, name: str) -> set[int]:
        """The ranks that have offered it."""
        ranks = set(self.waiting.get(name, ()))
        number = self.numbers.get(name)
        if number is not None:
            ranks |= {rank for rank, offered in self.offered.items() if offered >> number & 1}
        return ranks

    def asked_by_all(self, name: str) -> dict[int, Request]:
        """What each rank that has offered it asks for; from here on it waits by name."""
        number = self.numbers.get(name)
        if name not in self.waiting and number is not None:
            for rank, offered in self.offered.items():
                if offered >> number & 1:
                    self.ask(rank, self.asked(number, rank))
        return self.waiting[name]

    def take(self, name: str) -> None:
        """Nobody waits for it any more."""
        del self.waiting[name]
        number = self.numbers.get(name)
        if number is not None:
            self.by_request &= ~(1 << number)

    def numbered(self, found: Response, capacity: int) -> Response:
        """With the number by which it is known from now on, if it came before and there is room."""
        request = found.request
        if found.error:
            return found
        # It asked for something else: the old number is used up.
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
        """Another epoch begins."""
        # What was offered by number is asked for by name from here on.
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
        """Until the next look: that it has a number and runs by it is to be noticed."""
        if name in self.numbers:
            self.watched |= 1 << self.numbers[name]

    def names(self) -> Iterator[tuple[str, set[int]]]:
        """Everything that some have offered and some have not, with those that have."""
        for name, asked in self.waiting.items():
            yield name, set(asked)
        union = 0
        for offered in self.offered.values():
            union |= offered
        for number in bits(union):
            who = {rank for rank, offered in self.offered.items() if offered >> number & 1}
            yield self.entries[number].request.name, who


def bits(mask: int) -> Iterator[int]:
    """The numbers whose bits are set, in ascending order."""
    for index, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
        while byte:
            low = byte & -byte
            yield index * 8 + low.bit_length() - 1
            byte ^= low
