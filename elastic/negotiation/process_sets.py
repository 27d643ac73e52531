"""Process sets: subsets of ranks that run collectives among themselves.

All ranks, members or not, register and remove the same sets in the same order: in ``init()``, or later if that is
enabled (``init(process_sets="dynamic")`` or HOROVOD_DYNAMIC_PROCESS_SETS=1). Only members use a set.

A set is a list of ranks, not of workers. After a change of the world, it consists of the workers that now have these
ranks. Ranks that do not exist in a smaller world are omitted until the world is large enough again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elastic import context
from elastic.collectives import object_exchange
from elastic.context import Context
from elastic.errors import Invalid
from elastic.negotiation import submission
from elastic.negotiation.process_set_table import (
    ADD,
    REMOVE,
    ProcessSetTable,
    Ranks,
    SetEntry,
    TableProposal,
    checked_ranks,
    present,
)
from elastic.protocol.messages import COPY

SETS = "process sets"  # name of the broadcast of the table

_table = ProcessSetTable()
_dynamic = False


class ProcessSet:
    """Subset of the ranks that run collectives among themselves.

    Register it with ``init(process_sets=[...])`` or `add_process_set`, then pass it to collectives.

    ``ranks_or_comm`` is a list of ranks in any order.

    Raises:
        Invalid: (a ValueError) ``ranks_or_comm`` is not a list of ranks. An MPI communicator is not accepted.
    """

    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        self._entry = SetEntry(checked_ranks(ranks_or_comm))

    @property
    def process_set_id(self) -> int | None:
        """ID of the set, equal on all ranks, or None while the set is not registered."""
        return self._entry.number or None

    @property
    def ranks(self) -> list[int]:
        """The given ranks in ascending order, including ranks that do not exist in the current world."""
        return list(self._entry.ranks)

    def size(self) -> int | None:
        """Number of the set's ranks that exist in the current world, or None if the set is not registered."""
        if not self._entry.number:
            return None
        return len(present(self._entry.ranks, context.current().place.size))

    def rank(self) -> int | None:
        """Return this worker's index in the set, or None if the set is not registered.

        Raises:
            Invalid: this rank is not in the set.
        """
        if not self._entry.number:
            return None
        return _members(self).index(context.current().place.rank)

    def included(self) -> bool:
        """Return whether this worker's rank is in the set. Raises NotInitialized before ``init()``."""
        return context.current().place.rank in self._entry.ranks

    def __reduce__(self) -> Any:
        # A copied or unpickled set resolves to the set that is registered in the receiving process.
        return _found, (self._entry.ranks,)

    def __repr__(self) -> str:
        number, ranks = self.process_set_id, self.ranks
        return f"ProcessSet(process_set_id={number}, ranks={ranks}, mpi_comm=None)"


class GlobalProcessSet(ProcessSet):
    """Process set of all workers in the current world."""

    def __init__(self) -> None:
        pass

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:
        """All ranks of the current world. Raises NotInitialized before ``init()``."""
        return list(range(self.size()))

    def size(self) -> int:
        return context.current().place.size

    def rank(self) -> int:
        return context.current().place.rank

    def included(self) -> bool:
        """Return True, because every worker is part of the world."""
        context.current()
        return True

    def __reduce__(self) -> str:
        return "global_process_set"  # Copying or unpickling this object returns the singleton.

    def __repr__(self) -> str:
        return "global_process_set"


global_process_set = GlobalProcessSet()

# first ProcessSet object of each registered table entry
_objects: dict[SetEntry, ProcessSet] = {}


# ---- ranks of collectives --------------------------------------------------------------------------------------------


def resolve(process_set: ProcessSet | None) -> Ranks | None:
    """Return the ranks that take part, in ascending order, or None for all ranks of the world.

    Raises Invalid (a ValueError) if the set is not registered, was removed, has no rank in the current world, or does
    not include this rank.
    """
    if process_set is None or process_set is global_process_set:
        return None
    return _members(process_set)


def resolve_or_alone(process_set: ProcessSet) -> Ranks | None:
    """Return the ranks of a set as `resolve` does, or only this rank if it is not in the set."""
    if process_set is not global_process_set and not process_set.included():
        return (context.current().place.rank,)
    return resolve(process_set)


def _members(process_set: ProcessSet) -> Ranks:
    if not isinstance(process_set, ProcessSet):
        raise Invalid(
            f"process_set is a {type(process_set).__name__}: pass a ProcessSet that was registered with"
            " add_process_set() or init(process_sets=[...])"
        )
    entry, place = process_set._entry, context.current().place
    if not entry.number:
        if entry.removed:
            raise Invalid(
                f"process set {list(entry.ranks)} was removed: register it again with add_process_set()"
            )
        raise Invalid(
            f"process set {list(entry.ranks)} is not registered: call add_process_set() or"
            " init(process_sets=[...]) with it on all ranks"
        )
    members = present(entry.ranks, place.size)
    if place.rank not in members:
        if not members:
            raise Invalid(
                f"{_called(entry)} has no rank in the current world of size {place.size}: check process_set.size()"
                " before you use the set"
            )
        raise Invalid(
            f"rank {place.rank} is not in {_called(entry)}: check process_set.included() before you call a"
            " collective on the set"
        )
    return members


def _called(entry: SetEntry) -> str:
    return f"process set {entry.number} with ranks {list(entry.ranks)}"


# ---- registration and removal ----------------------------------------------------------------------------------------


def checked(process_sets: object) -> tuple[list[ProcessSet], bool]:
    """Validate the ``process_sets`` argument of ``init()``. Return its sets, and whether more can be registered later.

    Raises:
        Invalid: the argument is not "dynamic", None or a list of ProcessSet objects.
    """
    if process_sets is None:
        return [], False
    if isinstance(process_sets, str):
        if process_sets.lower() == "dynamic":
            return [], True
        raise Invalid(
            f'process_sets is {process_sets!r}: pass "dynamic", or a list of ProcessSet objects'
        )
    if isinstance(process_sets, ProcessSet) or not isinstance(process_sets, Iterable):
        raise Invalid(
            f"process_sets is {process_sets!r}: pass a list of ProcessSet objects, as in [ProcessSet([0, 1])]"
        )
    sets = list(process_sets)
    for each in sets:
        if not isinstance(each, ProcessSet) or each is global_process_set:
            raise Invalid(
                f"process_sets contains {each!r}: pass ProcessSet objects, as in [ProcessSet([0, 1])]. Omit"
                " global_process_set, which is always registered"
            )
    return sets, False


def begin(sets: Sequence[ProcessSet], dynamic: bool) -> None:
    """Register the sets passed to ``init()`` that are not registered yet. Collective over all ranks.

    Raises:
        Invalid: a set contains a rank outside the world, or the ranks passed different sets.
        PeerLost: a rank was lost.
    """
    global _dynamic
    rt = context.current()
    _dynamic = _dynamic or dynamic or rt.env.dynamic_process_sets
    new = [each for each in sets if not each._entry.number]
    _look_around(rt)
    if new:
        _add(rt, new)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set and return it. Collective over all ranks of the world.

    A set that was registered before the last change of the world is returned unchanged: training functions restart
    after a change, and survivors then repeat the call that a new worker makes for the first time.

    Args:
        process_set: a `ProcessSet`, or the ranks of a new one.

    Raises:
        Invalid: (a ValueError) dynamic process sets are not enabled (``init(process_sets="dynamic")``), a rank does not
            exist in this job, or the set is already registered. Raised on every rank if the ranks request different
            sets.
    """
    rt = context.current()
    _need_dynamic("added")
    if process_set is global_process_set:
        raise Invalid("global_process_set can't be added, because it is always registered: omit it")
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _add(rt, [added])
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, which then can't be used any more. Collective over all ranks of the world.

    Args:
        process_set: a set that `add_process_set` or ``init()`` has registered.

    Returns:
        True if the set was registered. False if it was not, and for ``global_process_set``, which cannot be removed.

    Raises:
        Invalid: (a ValueError) dynamic process sets are not enabled (see `add_process_set`). Raised on every rank if
            the ranks request different sets.
    """
    rt = context.current()
    if not isinstance(process_set, ProcessSet):
        raise Invalid(
            f"a {type(process_set).__name__} is not a process set: pass a ProcessSet that was registered with"
            " add_process_set()"
        )
    _need_dynamic("removed")
    if process_set is global_process_set:
        return False
    entry = process_set._entry
    if not (entry.number or entry.removed):
        return False  # The set was never registered on any rank.
    _look_around(rt)
    removed = _table.remove(_agree(rt, _table.wish(REMOVE, [entry.ranks], rt.generation)))
    _objects.pop(entry, None)
    return removed


def process_sets() -> list[ProcessSet]:
    """Return all registered sets, ordered by ID. The first is ``global_process_set``."""
    return [global_process_set, *(_object(entry) for entry in _table.entries())]


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """Return the registered set with this ID. Raises Invalid (a ValueError) if it does not exist."""
    for each in process_sets():
        if each.process_set_id == process_set_id:
            return each
    raise Invalid(
        f"process set ID {process_set_id!r} is not registered: pass the process_set_id of a registered ProcessSet"
    )


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the ranks of every registered process set, as a dictionary keyed by ID. ID 0 is the whole world."""
    ranks = {entry.number: list(entry.ranks) for entry in _table.entries()}
    return {0: global_process_set.ranks} | ranks


def _need_dynamic(done: str) -> None:
    if not _dynamic:
        raise Invalid(
            f"process sets can't be {done} after init(), because dynamic process sets are disabled: call"
            ' init(process_sets="dynamic"), or set HOROVOD_DYNAMIC_PROCESS_SETS=1'
        )


def _add(rt: Context, sets: Sequence[ProcessSet]) -> None:
    _look_around(rt)
    wish = _table.wish(ADD, [each._entry.ranks for each in sets], rt.generation)
    # In an elastic job the world may grow, so a list of all current ranks is not the global set.
    fixed_size = 0 if rt.elastic else rt.place.size
    entries = _table.add(_agree(rt, wish), rt.generation, fixed_size)
    for each, entry in zip(sets, entries, strict=True):
        each._entry = entry
        _objects.setdefault(entry, each)


def _agree(rt: Context, wish: TableProposal) -> list[TableProposal]:
    if rt.provisional:
        return [wish]  # A new worker does not negotiate before it joins the world.
    # All changes are exchanged under one name, so that different requests from the ranks are detected.
    texts = submission.agree("process sets", "change", wish.text())
    return [TableProposal.parse(text) for text in texts]


def _look_around(rt: Context) -> None:
    """Record the current world size in the table, unless this worker has not joined and the size is provisional."""
    if rt.alone or not rt.provisional:
        _table.in_world(rt.place.size)


def _object(entry: SetEntry) -> ProcessSet:
    if entry not in _objects:
        made = ProcessSet(entry.ranks)
        made._entry = entry
        _objects[entry] = made
    return _objects[entry]


def _found(ranks: Ranks) -> ProcessSet:
    entry = _table.find(ranks)
    return ProcessSet(ranks) if entry is None else _object(entry)


# ---- changes of the world --------------------------------------------------------------------------------------------


def start_copy(rt: Context, ranks: tuple[int, ...]) -> Callable[[], list[str]]:
    """Start to send the table of process sets to workers without the newest commit.

    Collective over ``ranks``. Other ranks pass ().

    Args:
        rt: the context.
        ranks: the sender, which holds the newest commit, followed by the receivers.

    Returns:
        A function that completes the copy and returns messages to log. Call it before any message refers to a set. It
        may raise PeerLost.
    """
    if not ranks:
        _look_around(rt)
        return list
    with rt.guard(COPY):
        group = rt.copy_group(SETS, ranks)
        receive = object_exchange.start_broadcast(group, _table.text().encode(), 0)

    def complete() -> list[str]:
        with rt.guard(COPY):
            text = receive().decode()
        news = _table.adopt(text) if rt.place.rank != ranks[0] else []
        _look_around(rt)
        return news

    return complete


def source() -> dict[str, bytes]:
    """Return what this worker broadcasts in `start_copy` if it is the sender. See `WorkerRuntime.copy_group`."""
    return {SETS: _table.text().encode()}


def unregister_all() -> None:
    """Unregister all sets. This function is called after ``shutdown()``."""
    global _dynamic
    _table.clear()
    _objects.clear()
    _dynamic = False


def require_global(process_set: object) -> None:
    """Raise Invalid (a ValueError) unless the set is the global one, which some functions require."""
    if process_set is not global_process_set and process_set is not None:
        raise Invalid(
            "this call requires a process set of all workers: omit process_set, or pass global_process_set"
        )
