"""One rank's part in the negotiation within one process set: tracks pending requests and processes decisions.

Pure: no I/O, no clock.

Every member receives the same decisions in the same order, so the coordinator's cache numbers are the same on all of
them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from elastic.negotiation.message_table import bits
from elastic.negotiation.messages import Members, Request, RequestList, Response, ResponseList


class PendingRequest(Protocol):
    """Interface of a collective that this rank has submitted.

    Keys of two requests are equal iff the requests are equal.
    """

    key: Hashable  # cache key of the request, set when the request is offered in full or gets a cache number

    @property
    def name(self) -> str: ...

    @property
    def lasting(self) -> bool:
        """Return whether the request may be cached under a number."""

    def make_key(self) -> Hashable: ...

    def request(self) -> Request: ...


A = TypeVar("A", bound=PendingRequest)


class ResponseCache(Generic[A]):
    """Cached responses of one process set. The caller ensures that the names of in-flight requests are unique."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.in_flight: dict[str, A] = {}  # requests without a decision, offered or not
        self._new: list[A] = []  # requests not yet offered to the coordinator
        self._epoch = 0
        self._numbers: dict[Hashable, int] = {}  # cache number of each key
        self._keys: dict[str, Hashable] = {}  # cache key of each name that has a number
        self._entries: list[Response] = []  # responses, indexed by cache number

    def submit(self, asked: A) -> None:
        self.in_flight[asked.name] = asked
        self._new.append(asked)

    def drop(self) -> None:
        """Drop in-flight requests after their world has ended."""
        self.in_flight.clear()
        self._new.clear()

    def offer(self) -> RequestList | None:
        """Return a message with all requests submitted since the last offer, or None if there are none."""
        new, self._new = self._new, []
        if not new:
            return None
        known = bytearray((len(self._entries) + 7) // 8)
        requests = []
        for asked in new:
            key = asked.make_key() if asked.lasting else None
            number = self._numbers.get(key)
            if number is None:
                asked.key = key
                requests.append(asked.request())
            else:
                known[number >> 3] |= 1 << (number & 7)
        return RequestList(self.members, self._epoch, bytes(known.rstrip(b"\0")), tuple(requests))

    def take(self, decision: ResponseList) -> Iterator[tuple[Response, A | None]]:
        """Yield the collectives to run now, in order, each with this rank's submission (None if it has joined).

        If this rank has joined, None takes the place of the submission. Exhaust the iterator before the next
        submission.
        """
        if decision.epoch != self._epoch:
            self._epoch = decision.epoch
            self._numbers, self._keys, self._entries = {}, {}, []
        known = int.from_bytes(decision.known, "little")
        for number in bits(known):
            found = self._entries[number]
            yield found, self.in_flight.pop(found.request.name, None)
        for response in decision.responses:
            name = response.request.name
            asked = self.in_flight.pop(name, None)
            if not response.error:
                self._learn(response, asked)
            yield response, asked

    def _learn(self, response: Response, asked: A | None) -> None:
        name = response.request.name
        key = self._keys.pop(name, None)
        if key is not None:
            del self._numbers[key]
        if response.number < 0:
            return
        assert response.number == len(self._entries), "numbers are given in order"
        self._entries.append(response)
        if asked is not None:
            # The key is unset if this rank offered the request by number, while another rank's full request invalidated
            # that number.
            asked.key = asked.key or asked.make_key()
            self._keys[name] = asked.key
            self._numbers[asked.key] = response.number
