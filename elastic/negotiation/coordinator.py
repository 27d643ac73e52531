"""Coordinator: decides which collectives can run, because every member has requested them, and in which order.

Pure: no I/O, no clock.

Each generation has one coordinator, on rank 0, for the world and all its process sets. Ranks request collectives in any
order. A collective runs as soon as all members have requested it. The order is the same on every rank. The coordinator
processes no tensors.

A name that is requested again gets a cache number. From then on a rank requests it with one bit, and the coordinator
only intersects bit masks: with 1,024 names, one `and` over 128 bytes per rank. A number represents the previous request
under the same name. A rank with a different request under the same name sends it in full, and the other ranks' bits are
expanded to the requests that they represent. The number of a name changes only with a decision of all its members,
never while a rank might still request the old number. When all numbers are in use, they are discarded together and a
new epoch starts. Bits of the previous epoch are accepted until every member has received the new epoch.

If a rank's only submitting thread has been blocked for a short time, the rank reports the collective for which it
waits. If ranks wait for each other in different collectives, none of these can ever run, and every rank receives the
list of calls.

A rank that called `join` has no more data, so reductions do not wait for it. When all ranks have joined, the
coordinator notifies all ranks.

A notification is sent to all members as soon as one rank requests it, and once more for each further request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from elastic.negotiation.message_table import MessageTable, bits
from elastic.negotiation.messages import (
    ALL,
    JOIN,
    LEAVE,
    NOTIFY,
    WAIT,
    Members,
    Request,
    RequestList,
    Response,
    ResponseList,
    ranks_in_words,
    settle,
)
from elastic.protocol.calls import distinct, sentence


class Coordinator:
    """Coordinator of the collectives among ``size`` ranks, with at most ``capacity`` numbered names in each set."""

    def __init__(self, size: int, capacity: int) -> None:
        self._size = size
        self._capacity = capacity
        self._sets: dict[Members, MessageTable] = {}
        self._joined: list[int] = []  # ranks in the order of joining
        self._gone: dict[int, str] = {}  # for each rank that left, the reason
        # last wait reported by each rank, which may have ended in the meantime
        self._waits: dict[int, tuple[Members, Request]] = {}
        # time at which the stall check first found a name pending, by name
        self._since: dict[tuple[Members, str], float] = {}
        self._warned: set[tuple[Members, str]] = set()

    # ---- offers ----------------------------------------------------------------------------------------------------

    def offer(self, rank: int, offer: RequestList) -> list[ResponseList]:
        """Record a rank's requests. Return the resulting decisions, each to be sent to all its members."""
        if offer.requests and offer.requests[0].kind == WAIT:
            self._waits[rank] = (offer.members, offer.requests[0])
            return self._deadlocked()
        self._waits.pop(rank, None)
        requests = tuple(r for r in offer.requests if r.kind not in (JOIN, LEAVE))
        leaving_kinds = {r.kind for r in offer.requests} - {r.kind for r in requests}
        made = self._offer(rank, offer, requests) if requests or offer.known else []
        if LEAVE in leaving_kinds:
            made += self.leave(rank, "shut down")
        elif JOIN in leaving_kinds:
            made += [*self._join(rank), *self._deadlocked()]
        return made

    def _offer(
        self, rank: int, offer: RequestList, requests: tuple[Request, ...]
    ) -> list[ResponseList]:
        each = self._set(offer.members)
        if rank not in each.offered:
            # A rank that is not a member is ignored: its call has already raised an error.
            return []
        known = int.from_bytes(offer.known, "little")
        if offer.epoch != each.epoch:
            requests = (*each.with_known_numbers(rank, known), *requests)
            known = 0
        else:
            each.unaware.discard(rank)
        by_name = known if self._lacks(each) else known & each.by_request
        if by_name:
            known &= ~by_name
            requests = (*(each.asked(n, rank) for n in bits(by_name)), *requests)
        each.offered[rank] |= known
        for request in requests:
            each.ask(rank, request)
        return self._decide(each, [request.name for request in requests])

    def _lacks(self, each: MessageTable) -> bool:
        return bool(self._gone) and any(rank in self._gone for rank in each.members)

    def named(self, offer: RequestList) -> list[str]:
        """Return the names of the collectives in a rank's message that was not passed to `offer` yet."""
        each = self._set(offer.members)
        entries = each.entries if offer.epoch == each.epoch else each.before
        known = bits(int.from_bytes(offer.known, "little"))
        return [entries[number].request.name for number in known] + [
            request.name for request in offer.requests if request.kind != WAIT
        ]

    def _set(self, members: Members) -> MessageTable:
        found = self._sets.get(members)
        if found is None:
            spelled = members or tuple(range(self._size))
            found = MessageTable(spelled, members, dict.fromkeys(spelled, 0))
            self._sets[members] = found
        return found

    # ---- decisions -------------------------------------------------------------------------------------------------

    def _decide(self, each: MessageTable, names: Iterable[str]) -> list[ResponseList]:
        made: list[ResponseList] = []
        responses: list[Response] = []
        ready = self._ready(each)
        for rank in each.offered if ready else ():
            each.offered[rank] &= ~ready
        for number in bits(ready & each.watched):
            self._waits_no_more(each, each.name_of(number))
        if self._joined and ready & ~each.reducible:
            active = self._active(each)
            for number in bits(ready & ~each.reducible):
                ready &= ~(1 << number)
                asked = {rank: each.asked(number, rank) for rank in active}
                responses.append(settle(asked, each.members))
        if ready:
            known = ready.to_bytes((ready.bit_length() + 7) // 8, "little")
            made.append(ResponseList(each.named_as, each.epoch, known))
        for name in dict.fromkeys(names):
            epoch = each.epoch
            found = self._settled(each, name)
            if found is None:
                continue
            # If the epoch has changed, all numbers assigned before are invalid.
            if each.epoch != epoch and responses:
                made.append(ResponseList(each.named_as, epoch, responses=tuple(responses)))
                responses = []
            responses.append(found)
        if responses and made and not made[-1].responses and made[-1].epoch == each.epoch:
            made[-1] = ResponseList(each.named_as, each.epoch, made[-1].known, tuple(responses))
        elif responses:
            made.append(ResponseList(each.named_as, each.epoch, responses=tuple(responses)))
        return made

    def _active(self, each: MessageTable) -> list[int]:
        if not self._joined:
            return list(each.members)
        return [rank for rank in each.members if rank not in self._joined]

    def _ready(self, each: MessageTable) -> int:
        offered = each.offered
        if not self._joined:
            lacking = offered.get(each.lacking, -1)
            if lacking == 0:
                return 0
        ready = -1
        for rank in self._active(each):
            ready &= offered[rank]
            if not ready:
                each.lacking = rank
                return 0
        return max(ready, 0)

    def _settled(self, each: MessageTable, name: str) -> Response | None:
        asked = each.waiting.get(name)
        if not asked:
            return None
        if self._lacks(each):
            gone = [rank for rank in each.members if rank in self._gone]
            self._take(each, name)
            why = self._gone[gone[0]]
            return Response(
                next(iter(asked.values())),
                error=f"{name} can't run: {ranks_in_words(gone)} {why}",
                refused=True,
                missing=tuple(gone),
            )
        first = next(iter(asked.values()))
        if first.kind == NOTIFY:
            self._take(each, name)
            return Response(first)
        if any(rank not in asked for rank in self._active(each)):
            return None
        self._take(each, name)
        return each.numbered(settle(asked, each.members), 0 if self._joined else self._capacity)

    # ---- joining and leaving ---------------------------------------------------------------------------------------

    def _join(self, rank: int) -> list[ResponseList]:
        if rank not in self._joined:
            self._joined.append(rank)
        if self._gone:
            return [self._no_join()]
        if len(self._joined) == self._size:
            made = self._what_is_left()
            self._joined.clear()
            return [*made, ResponseList(ALL, self._set(ALL).epoch, last_joined=rank)]
        made = [ResponseList(ALL, self._set(ALL).epoch, joined=rank)]
        for each in self._sets.values():
            if rank not in each.offered:
                continue
            made += self._decide(each, list(each.waiting))
        return made

    def _what_is_left(self) -> list[ResponseList]:
        made: list[ResponseList] = []
        for each in self._sets.values():
            for rank, offered in [*each.offered.items()]:
                for number in bits(offered):
                    each.ask(rank, each.asked(number, rank))
                each.offered[rank] = 0
            made += self._decide(each, list(each.waiting))
        return made

    def _no_join(self) -> ResponseList:
        """Fail the pending joins, because a rank that has left will never join."""
        rank, why = next(iter(self._gone.items()))
        error = f"join can't complete: rank {rank} {why}"
        refused = Response(Request(JOIN, JOIN), error=error, refused=True, missing=(rank,))
        return ResponseList(ALL, self._set(ALL).epoch, responses=(refused,))

    def leave(self, rank: int, why: str) -> list[ResponseList]:
        """Fail all pending and later collectives that need this rank, which has left for the reason ``why``."""
        if rank in self._gone:
            return []
        self._gone[rank] = f"has {why}"
        decisions: list[ResponseList] = [self._no_join()] if self._joined else []
        for each in self._sets.values():
            if rank not in each.offered:
                continue
            for other, offered in list(each.offered.items()):
                for number in bits(offered):
                    each.ask(other, each.asked(number, other))
                each.offered[other] = 0
            decisions += self._decide(each, list(each.waiting))
        return decisions

    # ---- deadlocks --------------------------------------------------------------------------------------------------

    def _deadlocked(self) -> list[ResponseList]:
        """Fail the collectives of ranks that wait for each other in a cycle, each in a different one."""
        waits = {
            rank: (members, wait)
            for rank, (members, wait) in self._waits.items()
            if rank in self._set(members).offers(wait.name)
        }
        lacking = {
            rank: set(self._active(self._set(members))) - self._set(members).offers(wait.name)
            for rank, (members, wait) in waits.items()
        }
        stuck = in_cycles(lacking)
        concerned = {rank for each in stuck for rank in self._active(self._set(waits[each][0]))}
        if not stuck or not concerned <= waits.keys():
            # Wait for the rank that has not called yet, so that all ranks receive all calls.
            return []
        asked = {
            rank: self._set(waits[rank][0]).asked_by_all(waits[rank][1].name)
            for rank in sorted(stuck)
        }
        called = [asked[rank][rank].called_by(rank, waits[rank][1].payload) for rank in asked]
        error, calls = sentence(called), distinct(called)
        made = []
        for members, name in dict.fromkeys((waits[r][0], waits[r][1].name) for r in asked):
            each = self._set(members)
            first = next(iter(each.waiting[name].values()))
            self._take(each, name)
            ended = Response(first, error=error, calls=calls)
            made.append(ResponseList(each.named_as, each.epoch, responses=(ended,)))
        return made

    # ---- stalled collectives ---------------------------------------------------------------------------------------

    def stalled(
        self, now: float, warn_s: float, end_s: float
    ) -> tuple[list[str], list[ResponseList]]:
        """Find collectives that make no progress.

        Call it about once a second. Times are on the caller's clock, and 0 disables a limit.

        Returns:
            One sentence per newly stalled group (waiting for ``warn_s`` seconds), and the decisions that fail
            collectives that have waited for ``end_s`` seconds.
        """
        waiting = {
            (each.named_as, name): ranks
            for each in self._sets.values()
            for name, ranks in each.names()
            # If all members take part, the collective is slow but not stalled.
            if not ranks.issuperset(self._active(each))
        }
        for key in self._since.keys() - waiting.keys():
            del self._since[key]
            self._warned.discard(key)
        for each in self._sets.values():
            each.watched = 0
        for members, name in waiting:
            self._sets[members].watch(name)
        late: dict[tuple[Members, tuple[int, ...]], list[str]] = {}
        over: dict[Members, list[str]] = {}
        for key, ranks in waiting.items():
            since = self._since.setdefault(key, now)
            members, name = key
            if end_s > 0 and now - since >= end_s:
                over.setdefault(members, []).append(name)
            if warn_s > 0 and now - since >= warn_s and key not in self._warned:
                self._warned.add(key)
                missing = [r for r in self._active(self._sets[members]) if r not in ranks]
                late.setdefault((members, tuple(missing)), []).append(name)
        sentences = [
            f"{_few(names)} {'has' if len(names) == 1 else 'have'} waited {warn_s:g} s for"
            f" {ranks_in_words(missing)}; the other ranks have submitted {'it' if len(names) == 1 else 'them'}"
            for (_, missing), names in late.items()
        ]
        decisions = []
        for members, names in over.items():
            each = self._sets[members]
            decisions.append(
                ResponseList(
                    members, each.epoch, responses=tuple(self._end(each, n, end_s) for n in names)
                )
            )
        return sentences, decisions

    def _take(self, each: MessageTable, name: str) -> None:
        each.take(name)
        self._waits_no_more(each, name)

    def _waits_no_more(self, each: MessageTable, name: str) -> None:
        self._since.pop((each.named_as, name), None)
        self._warned.discard((each.named_as, name))

    def _end(self, each: MessageTable, name: str, after_s: float) -> Response:
        asked = each.asked_by_all(name)
        missing = [rank for rank in self._active(each) if rank not in asked]
        self._take(each, name)
        return Response(
            next(iter(asked.values())),
            error=f"{name} failed after {after_s:g} s: {ranks_in_words(missing)} never submitted it",
            refused=True,
            missing=tuple(missing),
        )


def in_cycles(waits_for: Mapping[int, Set[int]]) -> set[int]:
    """Return the ranks in wait cycles, and the ranks that wait for them."""
    found = set(waits_for)
    while free := {rank for rank in found if found.isdisjoint(waits_for[rank])}:
        found -= free
    return found


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
