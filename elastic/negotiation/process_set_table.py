"""Table of process sets with their IDs and ranks. Pure: no I/O, no clock.

Every worker keeps its own table, and all tables must be equal. All ranks request a change together: each sends a
`TableProposal` with its request and the relevant contents of its table. The result is a function of the list of
requests alone, so all ranks reach the same result or all raise.

Tables may differ temporarily, because a world can fail when only some ranks have made a change. After the rollback to a
commit, those ranks request the change again. Adding a set that was registered in an earlier generation is therefore not
an error: all ranks register the set under one number. A worker that lacks the newest commit adopts the whole table of
rank 0 (`adopt`), as it adopts the model: a newly started worker ran the script with a provisional rank and world size,
so the world's sets replace its own.

Ranks are positions in the world, not workers. See docs/decisions/0007-a-process-set-is-a-list-of-ranks.md.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from elastic.errors import Invalid

Ranks = tuple[int, ...]
ADD, REMOVE = "add", "remove"


def checked_ranks(values: object) -> Ranks:
    """Return the ranks in ascending order. Raises Invalid unless ``values`` is a list of distinct ranks."""
    if hasattr(values, "Get_rank"):
        raise Invalid(
            "a process set can't be created from an MPI communicator, because MPI is not used: pass a list of"
            " ranks, as in ProcessSet([0, 1])"
        )
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise Invalid(
            f"the ranks of a process set are {values!r}: pass a list of ranks, as in ProcessSet([0, 1])"
        )
    ranks = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise Invalid(f"rank {value!r} in a process set is invalid: pass whole numbers from 0")
        ranks.append(operator.index(value))
    ranks.sort()
    if not ranks:
        raise Invalid("the process set is empty: pass at least one rank")
    if ranks[0] < 0:
        raise Invalid(f"rank {ranks[0]} in a process set is invalid: pass whole numbers from 0")
    twice = sorted({rank for rank, after in itertools.pairwise(ranks) if rank == after})
    if twice:
        raise Invalid(f"process set {ranks} contains rank {twice[0]} twice: list each rank once")
    return tuple(ranks)


def present(ranks: Ranks, size: int) -> Ranks:
    """Return the given ranks that exist in a world of ``size`` ranks."""
    return ranks if not ranks or ranks[-1] < size else tuple(rank for rank in ranks if rank < size)


@dataclass(eq=False)
class SetEntry:
    """Table entry of one process set.

    The same object is updated when the set is registered, renumbered or removed.
    """

    ranks: Ranks
    number: int = 0  # ID of the process set; 0 means not registered
    since: int = 0  # generation in which the set was last added
    removed: bool = False


class TableProposal(msgspec.Struct, frozen=True):
    """One rank's request to change the table, with the parts of its table that affect the result."""

    do: str  # ADD or REMOVE
    sets: list[Ranks]
    numbers: list[int]  # ID of each set in this rank's table; 0 means not registered
    fresh: list[bool]  # whether each set was added in the current generation
    next_number: int
    largest: int  # size of the largest world that this rank has seen; 0 means none yet

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> TableProposal:
        return msgspec.json.decode(text, type=cls)


class _Table(msgspec.Struct):
    sets: list[tuple[int, Ranks]]
    next_number: int
    largest: int


class ProcessSetTable:
    """Table of one worker's process sets, except the global set, which always has ID 0."""

    def __init__(self) -> None:
        self._entries: dict[int, SetEntry] = {}
        # ID of the next new set. IDs are never reused, so that an old ID cannot refer to a new set.
        self._next_number = 1
        self.largest = 0  # size of the largest world so far; 0 means none yet
        self.joined = False  # whether this table's worker has joined a world

    def in_world(self, size: int) -> None:
        """Record that this worker is in a world of ``size`` ranks."""
        self.joined = True
        self.largest = max(self.largest, size)

    def entries(self) -> list[SetEntry]:
        """Return the entries of all registered sets, ordered by ID."""
        return [self._entries[number] for number in sorted(self._entries)]

    def find(self, ranks: Ranks) -> SetEntry | None:
        return next((entry for entry in self._entries.values() if entry.ranks == ranks), None)

    # ---- changes that all ranks agree on ---------------------------------------------------------

    def wish(self, do: str, sets: Sequence[Ranks], generation: int) -> TableProposal:
        held = [self.find(ranks) for ranks in sets]
        return TableProposal(
            do,
            list(sets),
            [entry.number if entry else 0 for entry in held],
            [entry is not None and entry.since == generation for entry in held],
            self._next_number,
            self.largest,
        )

    def add(
        self, wishes: Sequence[TableProposal], generation: int, fixed_size: int = 0
    ) -> list[SetEntry]:
        """Register the requested sets.

        Raises Invalid, and leaves the table unchanged, if the requests differ, a rank has never existed, or a set is
        already registered.

        Args:
            wishes: the requests of all ranks, in rank order.
            generation: the current generation.
            fixed_size: size of the world if it cannot change, otherwise 0.
        """
        _same(wishes)
        sets = wishes[0].sets
        largest = max(wish.largest for wish in wishes)
        for index, ranks in enumerate(sets):
            if largest and ranks[-1] >= largest:
                raise Invalid(
                    f"process set {list(ranks)} contains rank {ranks[-1]}, but the ranks of this job are 0 to"
                    f" {largest - 1}: omit rank {ranks[-1]}, or start more workers"
                )
            if ranks == tuple(range(fixed_size)):
                raise Invalid(
                    f"process set {list(ranks)} contains all ranks: use global_process_set instead"
                )
            if all(wish.fresh[index] for wish in wishes) or ranks in sets[:index]:
                raise Invalid(
                    f"process set {list(ranks)} is already registered: use the registered ProcessSet, or remove"
                    " it first"
                )
        next_number = max(wish.next_number for wish in wishes)
        added = []
        for index, ranks in enumerate(sets):
            number = _common(wishes, index)
            if not number:
                number, next_number = next_number, next_number + 1
            added.append(self._enter(ranks, number, generation))
        self._next_number = max(self._next_number, next_number, *(e.number + 1 for e in added))
        return added

    def remove(self, wishes: Sequence[TableProposal]) -> bool:
        """Remove the requested set. Return whether it was registered on any rank.

        Raises Invalid if the requests differ.
        """
        _same(wishes)
        for ranks in wishes[0].sets:
            self._drop(self.find(ranks))
        self._next_number = max(wish.next_number for wish in wishes)
        return any(any(wish.numbers) for wish in wishes)

    def _enter(self, ranks: Ranks, number: int, generation: int) -> SetEntry:
        entry = self.find(ranks) or SetEntry(ranks)
        self._entries.pop(entry.number, None)
        assert number not in self._entries, f"process set {number} already exists"
        entry.number, entry.since = number, generation
        self._entries[number] = entry
        return entry

    def _drop(self, entry: SetEntry | None) -> None:
        if entry is not None:
            del self._entries[entry.number]
            entry.number, entry.removed = 0, True

    def clear(self) -> None:
        """Unregister all sets. This method is called after this worker has left the job."""
        for entry in self.entries():
            self._drop(entry)
        self._next_number, self.largest, self.joined = 1, 0, False

    # ---- adoption of another worker's table ------------------------------------------------------

    def text(self) -> str:
        """Serialize the table for `adopt`."""
        sets = [(entry.number, entry.ranks) for entry in self.entries()]
        return msgspec.json.encode(_Table(sets, self._next_number, self.largest)).decode()

    def adopt(self, text: str) -> list[str]:
        """Replace the contents of this table with those of another worker's table, serialized with `text`.

        Return a log message for each change that users should know about.

        A new worker has run the script with a provisional world size, so it may have registered a set with other ranks
        than the world's set of the same ID. Its set then gets the ranks of the world's set.
        """
        world = msgspec.json.decode(text, type=_Table)
        own = {entry.ranks: entry for entry in self.entries()}
        by_number = {} if self.joined else dict(self._entries)
        matched = {ranks for _, ranks in world.sets if ranks in own}
        news = []
        entries = {}
        for number, ranks in world.sets:
            entry = own.pop(ranks, None)
            if entry is None and number in by_number and by_number[number].ranks not in matched:
                entry = by_number[number]
                del own[entry.ranks]
                news.append(
                    f"process set {number} was registered with ranks {list(entry.ranks)} on this worker, but has"
                    f" ranks {list(ranks)} in the world that this worker joins; those of the world are used"
                )
            entry = entry or SetEntry(ranks)
            entry.ranks, entry.number = ranks, number
            entries[number] = entry
        for entry in own.values():
            if not self.joined:
                news.append(
                    f"process set {entry.number} with ranks {list(entry.ranks)} is not registered in the world that"
                    " this worker joins, so it can't be used"
                )
            entry.number, entry.removed = 0, True
        self._entries = entries
        self._next_number = max(self._next_number, world.next_number)
        self.largest = max(self.largest, world.largest)
        return news


def _common(wishes: Sequence[TableProposal], index: int) -> int:
    known = {wish.numbers[index] for wish in wishes} - {0}
    if len(known) != 1:
        return 0
    (number,) = known
    free = all(wish.numbers[index] or wish.next_number <= number for wish in wishes)
    return number if free else 0


def _same(wishes: Sequence[TableProposal]) -> None:
    """Raise Invalid unless the requests of all ranks are equal. The error message lists each rank's request."""
    asked: dict[str, list[int]] = {}
    for rank, wish in enumerate(wishes):
        sets = ", ".join(str(list(ranks)) for ranks in wish.sets)
        asked.setdefault(f"to {wish.do} {sets}", []).append(rank)
    if len(asked) > 1:
        differing = "; ".join(f"{_named(ranks)} asked {what}" for what, ranks in asked.items())
        raise Invalid(
            f"process sets differ between ranks: {differing}. Add and remove the same process sets in the same"
            " order on all ranks"
        )


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
