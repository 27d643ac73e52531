"""Serialization of the whole state of a Membership to JSON, and its restoration.

Pure: no I/O, no clock. Makes no decisions.

A snapshot is a table of objects in blocks of one kind, ``{"kinds": [[name, field, ...], ...], "root": [n], "blocks":
[[kind, count, columns, sizes, items], ...]}``. A column contains the values of one field of all objects of the block,
because fields of the workers of a large job often have equal values. See `Column`. A part is a plain value, ``[n]`` for
the n-th object of the table, or a float such as ``["inf"]``. This preserves references to shared objects, and
dictionaries may have keys of any type. All fields of an object are written, whether its class declares them or not. An
instance of a class that is not listed here raises an error when the snapshot is taken, so that no new field is lost
silently. The settings are not included, because the header of the journal contains them. Of additional environment
variables, the header contains only the names.

Snapshots of earlier versions have ``"objects": [[kind, part, ...], ...]`` instead of blocks.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, cast

import msgspec

from elastic.driver.events import (
    Action,
    Event,
    ExitCause,
    HealthOutcome,
    Member,
    Notice,
    ShardsDivided,
)
from elastic.driver.membership.bandwidth import HostBandwidth
from elastic.driver.membership.failure_detection.frozen import Frozen
from elastic.driver.membership.failure_detection.idle_world import IdleWorld
from elastic.driver.membership.failure_detection.stragglers import Stragglers
from elastic.driver.membership.failure_detection.stuck import Stuck
from elastic.driver.membership.failure_detection.suspicion import Suspicion, Suspicions, Verdict
from elastic.driver.membership.failure_detection.unresponsive_hosts import UnresponsiveHosts
from elastic.driver.membership.failures import Failures
from elastic.driver.membership.health_checks import HealthChecks
from elastic.driver.membership.membership import Membership
from elastic.driver.membership.preemption_notices import Departure, Notices
from elastic.driver.membership.reconnect import Reconnects
from elastic.driver.membership.records.actions import ActionList
from elastic.driver.membership.records.garbage_collection import uncollected
from elastic.driver.membership.records.roster import Roster, WorkerRecord, WorkerStage
from elastic.driver.membership.scheduling.cooldown import Cooldown, SlotRecord
from elastic.driver.membership.scheduling.slots import Slots
from elastic.driver.membership.scheduling.worker_pool import WorkerPool
from elastic.driver.membership.worker_reports import WorkerReports
from elastic.driver.membership.worlds.deadlines import Deadlines
from elastic.driver.membership.worlds.gathering import Gathering, Kind
from elastic.driver.membership.worlds.give_up import GiveUpRules
from elastic.driver.membership.worlds.liveness_probes import LivenessProbes
from elastic.driver.membership.worlds.planned_change import PlannedChange
from elastic.driver.membership.worlds.root_cause import Exceptions, Mismatches, RootCauseSearch
from elastic.driver.membership.worlds.script_failures import ScriptFailures
from elastic.driver.membership.worlds.spoilt_commits import SpoiltCommits
from elastic.driver.membership.worlds.stop import Stop
from elastic.driver.membership.worlds.world import World
from elastic.driver.membership.worlds.worlds import Phase, Worlds
from elastic.driver.reasons import Reason, ReasonKind
from elastic.driver.settings import Settings
from elastic.errors import ElasticError, Invalid
from elastic.protocol.calls import Called
from elastic.protocol.messages import (
    Address,
    Commit,
    HeldCommitShards,
    KeptCommit,
    Launches,
    OlderCommits,
    Place,
    RowBytes,
    ShardsHeld,
    ShardsPlaced,
    Times,
    Value,
    Worker,
)

# Instances of these classes may form cycles, so they are created empty and filled later. They are compared by identity.
OBJECTS: tuple[type, ...] = (
    *(
        Membership,
        Worlds,
        WorkerReports,
        Failures,
        Reconnects,
        Frozen,
        Stuck,
        Notices,
        Departure,
        Stop,
        Deadlines,
        HealthChecks,
        HostBandwidth,
        ActionList,
        WorkerPool,
        GiveUpRules,
        World,
        Gathering,
        PlannedChange,
        Exceptions,
        Mismatches,
        RootCauseSearch,
        ScriptFailures,
        SpoiltCommits,
        LivenessProbes,
    ),
    *(
        Slots,
        Cooldown,
        SlotRecord,
        Roster,
        WorkerRecord,
        Suspicions,
        Suspicion,
        IdleWorld,
        Stragglers,
        UnresponsiveHosts,
    ),
)
# Containers are also compared by identity.
CONTAINERS: tuple[type, ...] = (dict, OrderedDict, list, set, deque)
ENUMS: tuple[type[enum.Enum], ...] = (
    Phase,
    WorkerStage,
    Kind,
    Verdict,
    ReasonKind,
    ExitCause,
    HealthOutcome,
)
# Values of these classes are immutable and are created from their parts, as are enums and tuples.
STRUCTS: tuple[type[msgspec.Struct], ...] = (
    *(Worker, Commit, Address, Place, Launches, Times, Member, Notice, Reason, Called),
    *(KeptCommit, OlderCommits),
    *(HeldCommitShards, ShardsHeld, RowBytes, ShardsPlaced, ShardsDivided),
    *Event.__subclasses__(),
    *Action.__subclasses__(),
)
METHODS = {(Roster, "_file")}  # fields that hold bound methods
# Fields that are reset at each event. Between two events, the caller has already received their contents.
PASSING: dict[tuple[type, str], type] = {(ActionList, "decided"): list}

_NAMED: dict[str, type] = {
    cls.__name__: cls
    for cls in (*OBJECTS, *CONTAINERS, *ENUMS, *STRUCTS, tuple, frozenset, Settings)
}
_SCALARS = frozenset({str, int, bool, float, type(None)})
_METHOD = "method"
CHUNK = 500  # objects whose fields are read at once, which the processor's cache can hold

Part = str | int | float | bool | list[Any] | None
# Values of one field of all objects of a block, as lists:
#     [part]                      the same part for all objects
#     ["plain", [value, ...]]
#     ["texts", [text, ...], [index of the text, ...]]
#     ["refs", [n or null, ...]]  objects of the table, or None
#     ["runs", [n, count, ...]]   consecutive objects of the table
#     ["parts", [part, ...]]
Column = list[Any]


class SnapshotError(ElasticError, TypeError):
    """Error raised when the state contains an object of an unknown type. The job continues without this snapshot."""


class _Block(msgspec.Struct, array_like=True):
    """Consecutive objects of one kind."""

    kind: int
    count: int
    columns: list[Column] = []
    sizes: Column = []  # numbers of items, if the objects are containers
    # Items of all objects, one object after the other. For dicts, one column of keys and one of values.
    items: list[Column] = []


class _Snapshot(msgspec.Struct, omit_defaults=True):
    kinds: list[list[str]]
    root: list[int]
    blocks: list[_Block] = []
    objects: list[list[Any]] = []  # instead of blocks, in snapshots of earlier versions


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Snapshot).decode


def take_snapshot(membership: Membership) -> bytes:
    """Return a snapshot of a membership's whole state. Must be called between two events.

    Raises:
        SnapshotError: the state contains an object of an unknown type.
    """
    with uncollected():
        return _encode(_Taking(membership).snapshot)


def restore_snapshot(data: bytes, settings: Settings) -> Membership:
    """Return a Membership restored from a snapshot. It handles every event exactly as the original would.

    Raises:
        Invalid: the data are not a snapshot, or were written by another version of this program.
    """
    try:
        with uncollected():
            snapshot = _decode(data)
            _have_the_same_fields(snapshot.kinds, settings)
            found = _Making(snapshot, settings).root
    except Invalid:
        raise
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Invalid(
            f"the snapshot is invalid: {error!r}. Resume from an earlier journal, or start a new job with"
            " --fresh"
        ) from error
    if not isinstance(found, Membership):
        raise Invalid(
            f"the snapshot contains a {type(found).__name__} instead of a Membership: start a new job with"
            " --fresh"
        )
    return found


def _corrupted(what: str) -> Invalid:
    return Invalid(
        f"the snapshot is corrupted: {what}. Resume from an earlier journal, or start a new job with --fresh"
    )


# ---- writing -------------------------------------------------------------------------------------------------------


class _Taking:
    """Serializer that traverses all objects of a membership, in batches of objects of one kind.

    Work on a batch is done by functions written in C as far as possible, because a job may have 100,000 workers.
    Mutable objects are queued instead of being visited recursively, so a deep object graph cannot exceed the recursion
    limit.
    """

    def __init__(self, membership: Membership) -> None:
        self._settings = membership.settings
        # index of each object in the table, by object identity
        self._places: dict[int, int] = {}
        # Index of each immutable value in the table. Equal values are stored once.
        self._values: dict[Value, int] = {}
        self._methods: dict[tuple[int, str], int] = {}
        self._kinds: dict[tuple[str, ...], int] = {}
        self._blocks: list[_Block] = []
        self._count = 0
        self._unfilled: deque[tuple[_Block, list[Any]]] = deque()
        self._ways: dict[type, Callable[[type, list[Any]], None]] = {
            **dict.fromkeys(OBJECTS, self._objects),
            **dict.fromkeys(CONTAINERS, self._containers),
            **dict.fromkeys(STRUCTS, self._structs),
            **dict.fromkeys(ENUMS, self._enums),
            Settings: self._of_settings,
            tuple: self._rows,
            frozenset: self._rows,
            type(self._rows): self._bound_methods,
        }
        self._refer([membership])
        root = [self._places[id(membership)]]
        while self._unfilled:
            self._fill(*self._unfilled.popleft())
        kinds = [[*kind] for kind in self._kinds]
        self.snapshot = _Snapshot(kinds, root, self._blocks)

    def _column(self, values: Sequence[Any]) -> Column:
        """Encode a column. Adds the objects in it to the table."""
        kinds = set(map(type, values))
        if kinds <= _SCALARS:
            return self._scalars(values, kinds)
        if kinds & _SCALARS - {type(None)}:
            self._refer([value for value in values if type(value) not in _SCALARS])
            return ["parts", [*map(self._part, values)]]
        ids = [*map(id, values)]
        places: list[int | None] = [*map(self._places.get, ids)]
        if None in places:
            self._refer([value for value in values if value is not None])
            places = [*map(self._places.get, ids)]
        first = places[0]
        if places.count(first) == len(places):
            return [[first]]
        return ["refs", places] if None in places else _runs(cast("list[int]", places))

    def _scalars(self, values: Sequence[Any], kinds: set[type]) -> Column:
        if len(kinds) == 1 and values.count(values[0]) == len(values):
            return [self._part(values[0])]
        if float in kinds:
            floats = values if len(kinds) == 1 else [v for v in values if type(v) is float]
            if not all(map(math.isfinite, floats)):
                return ["parts", [*map(self._part, values)]]
        if kinds == {str}:
            texts = {text: index for index, text in enumerate(dict.fromkeys(values))}
            if len(texts) <= len(values) // 2:
                return ["texts", [*texts], [*map(texts.__getitem__, values)]]
        return ["plain", values]

    def _part(self, value: Any) -> Part:
        kind = type(value)
        if kind is float:
            return value if math.isfinite(value) else [str(value)]
        return value if kind in _SCALARS else [self._places[id(value)]]

    def _refer(self, values: Sequence[Any]) -> None:
        """Add these objects to the table, unless it contains them."""
        places = self._places
        unique = dict(zip(map(id, values), values, strict=True))
        if not places.keys().isdisjoint(unique):
            unique = {at: value for at, value in unique.items() if at not in places}
        new: dict[type, list[Any]] = {}
        for kind in dict.fromkeys(map(type, unique.values())):
            new[kind] = [value for value in unique.values() if type(value) is kind]
        for kind, found in new.items():
            if len(new) > 1:  # Objects of the other kinds may contain some of these.
                found = [value for value in found if id(value) not in places]
            way = self._ways.get(kind)
            if way is None:
                name = f"{kind.__module__}.{kind.__qualname__}"
                raise SnapshotError(
                    f"a snapshot can't contain {new[kind][0]!r:.200} of class {name}: add the class to OBJECTS"
                )
            if found:
                way(kind, found)

    def _add(self, found: Sequence[Any], columns: list[Column], *kind: str) -> _Block:
        """Append a block to the table."""
        block = _Block(self._kinds.setdefault(kind, len(self._kinds)), len(found), columns)
        self._blocks.append(block)
        self._places.update(zip(map(id, found), itertools.count(self._count), strict=False))
        self._count += len(found)
        return block

    # Restoring creates an immutable object from its parts, so the object must follow them in the table.

    def _add_immutable(
        self,
        found: list[Any],
        parts: Callable[[list[Any]], Iterable[list[Any]]],
        left: Callable[[list[Any]], list[Any]],
        *kind: str,
    ) -> list[Any]:
        """Add immutable objects after their parts, which may include some of these objects.

        Return the objects that were not added as such parts.

        Args:
            found: the objects.
            parts: function that returns the columns of objects.
            left: function that returns the objects that are not in the table.
            kind: name of the kind, and of the columns.
        """
        while found:
            before = self._count
            columns = [*map(self._column, parts(found))]
            new = found if self._count == before else left(found)
            if len(new) == len(found):
                self._add(found, columns, *kind)
                return found
            found = new
        return []

    def _left(self, found: list[Any]) -> list[Any]:
        return [value for value in found if id(value) not in self._places]

    def _structs(self, kind: type[msgspec.Struct], found: list[Any]) -> None:
        names = kind.__struct_fields__

        def parts(of: list[Any]) -> Iterable[list[Any]]:
            return ([*map(attrgetter(name), of)] for name in names)

        if not issubclass(kind, Value):
            self._add_immutable(found, parts, self._left, kind.__name__, *names)
            return
        values = self._values

        def left(of: list[Any]) -> list[Any]:
            return [value for value in of if value not in values]

        new = left([*dict.fromkeys(found)])
        added = self._add_immutable(new, parts, left, kind.__name__, *names)
        places = map(self._places.__getitem__, map(id, added))
        values.update(zip(added, places, strict=True))
        if len(added) < len(found):
            places = map(values.__getitem__, found)
            self._places.update(zip(map(id, found), places, strict=True))

    def _enums(self, kind: type, found: list[Any]) -> None:
        self._add(found, [self._column([value.value for value in found])], kind.__name__)

    def _rows(self, kind: type, found: list[Any]) -> None:
        of_length: dict[int, list[Any]] = {}
        for value in found:
            of_length.setdefault(len(value), []).append(value)

        def parts(of: list[Any]) -> Iterable[list[Any]]:
            rows = of if kind is tuple else map(sorted, of)
            return map(list, zip(*rows, strict=True))

        for rows in of_length.values():
            self._add_immutable(rows, parts, self._left, kind.__name__)

    def _bound_methods(self, _: type, found: list[Any]) -> None:
        owners = map(id, map(attrgetter("__self__"), found))
        keys = [*zip(owners, map(attrgetter("__name__"), found), strict=True)]
        for key, value in dict(zip(keys, found, strict=True)).items():
            owner, name = value.__self__, value.__name__
            if (type(owner), name) not in METHODS:
                raise SnapshotError(
                    f"a snapshot can't contain the method {value!r:.200}: add it to METHODS"
                )
            if key not in self._methods:
                self._add([value], [[name], self._column([owner])], _METHOD)
                self._methods[key] = self._places[id(value)]
        places = map(self._methods.__getitem__, keys)
        self._places.update(zip(map(id, found), places, strict=True))

    def _of_settings(self, _: type, found: list[Any]) -> None:
        if any(value is not self._settings for value in found):
            raise SnapshotError(
                "a snapshot can't contain more than one Settings object: refer to the settings of"
                " the job"
            )
        self._add(found, [], Settings.__name__)

    # Mutable objects may appear anywhere in the table and may form cycles.

    def _objects(self, kind: type, found: list[Any]) -> None:
        alike: dict[tuple[str, ...], list[Any]] = {}
        names = [*map(tuple, map(vars, found))]
        if names.count(names[0]) == len(names):
            alike = {names[0]: found}
        else:
            for each, value in zip(names, found, strict=True):
                alike.setdefault(each, []).append(value)
        for fields, values in alike.items():
            self._unfilled.append((self._add(values, [], kind.__name__, *fields), values))

    def _containers(self, kind: type, found: list[Any]) -> None:
        self._unfilled.append((self._add(found, [], kind.__name__), found))

    def _fill(self, block: _Block, values: list[Any]) -> None:
        kind = type(values[0])
        if kind is deque:
            block.columns = [self._column([value.maxlen for value in values])]
        elif kind not in CONTAINERS:
            for name, column in _columns_of(values).items():
                passes = (kind, name) in PASSING
                block.columns.append([None] if passes else self._column(column))
            if not issubclass(kind, dict):
                return
        block.sizes = self._column([*map(len, values)])
        if issubclass(kind, dict):
            keys = [*itertools.chain.from_iterable(values)]
            items = [*itertools.chain.from_iterable(value.values() for value in values)]
            block.items = [self._column(keys), self._column(items)] if keys else []
            return
        # Sets have no defined order, so their items are sorted for a reproducible snapshot.
        rows = map(sorted, values) if kind is set else values
        items = [*itertools.chain.from_iterable(rows)]
        block.items = [self._column(items)] if items else []


def _columns_of(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the values of each field of objects that have the same fields."""
    columns: dict[str, list[Any]] = {name: [] for name in vars(values[0])}
    for start in range(0, len(values), CHUNK):
        fields = (vars(value).values() for value in values[start : start + CHUNK])
        parts = [*itertools.chain.from_iterable(fields)]
        for index, column in enumerate(columns.values()):
            column += parts[index :: len(columns)]
    return columns


def _runs(places: list[int]) -> Column:
    """Encode references to objects, by runs of consecutive objects if these take less space."""
    steps = [*map(operator.sub, places[1:], places)]
    if steps.count(1) < len(places) // 2:
        return ["refs", places]
    starts = [0, *(index for index, step in enumerate(steps, start=1) if step != 1)]
    counts = map(operator.sub, [*starts[1:], len(places)], starts)
    begins = map(places.__getitem__, starts)
    return ["runs", [*itertools.chain.from_iterable(zip(begins, counts, strict=True))]]


# ---- reading -------------------------------------------------------------------------------------------------------


class _Making:
    def __init__(self, snapshot: _Snapshot, settings: Settings) -> None:
        kinds = [
            (_METHOD if name == _METHOD else _NAMED[name], names) for name, *names in snapshot.kinds
        ]
        self._made: list[Any] = []
        later: list[tuple[_Block, Any, list[str], list[Any]]] = []
        others: list[tuple[_Block, Any, int]] = []
        for block in _blocks_of(snapshot):
            kind: Any
            new: list[Any]
            kind, names = kinds[block.kind]
            if kind is Settings:
                new = [settings] * block.count
            elif kind is deque:
                new = [deque(maxlen=most) for most in self._column(block.columns[0], block.count)]
                later.append((block, kind, [], new))
            elif kind in OBJECTS or kind in CONTAINERS:
                new = [kind.__new__(kind) for _ in range(block.count)]
                later.append((block, kind, names, new))
            else:
                others.append((block, kind, len(self._made)))
                new = [None] * block.count
            self._made += new
        for block, kind, start in others:
            self._made[start : start + block.count] = self._made_of(kind, block)
        for block, kind, names, made in later:
            if names:
                self._fill(block, kind, names, made)
            if issubclass(kind, (dict, list, set, deque)):
                self._put(block, kind, made)
        self.root = self._made[snapshot.root[0]]

    def _column(self, column: Column, count: int) -> list[Any]:
        """Return the values of a column.

        Raises:
            ValueError: the column is invalid, or has another number of values.
        """
        found: list[Any]
        match column:
            case [part]:
                return [self._value(part)] * count
            case ["plain", found]:
                pass
            case ["texts", texts, indexes]:
                found = [*map(texts.__getitem__, indexes)]
            case ["refs", places]:
                found = [None if place is None else self._at(place) for place in places]
            case ["runs", runs]:
                found = []
                for start, many in zip(runs[::2], runs[1::2], strict=True):
                    found += self._made[start : start + many]
                if None in found:
                    raise _corrupted("an object is referenced before it is created")
            case ["parts", parts]:
                found = [*map(self._value, parts)]
            case _:
                raise _corrupted(f"it contains the unknown column {str(column)[:80]}")
        if len(found) != count:
            raise _corrupted(f"a column has {len(found)} values instead of {count}")
        return found

    def _value(self, part: Part) -> Any:
        if type(part) is not list:
            return part
        [at] = part
        return float(at) if type(at) is str else self._at(at)

    def _at(self, place: int) -> Any:
        found = self._made[place]
        if found is None:
            raise _corrupted(f"object {place} is referenced before it is created")
        return found

    def _made_of(self, kind: Any, block: _Block) -> Iterable[Any]:
        columns = [self._column(column, block.count) for column in block.columns]
        if kind == _METHOD:
            names, owners = columns
            return [*map(self._method, names, owners)]
        if kind in (tuple, frozenset):
            return map(kind, zip(*columns, strict=True)) if columns else [kind()] * block.count
        return map(kind, *columns) if columns else [kind() for _ in range(block.count)]

    @staticmethod
    def _method(name: str, owner: Any) -> Any:
        if (type(owner), name) not in METHODS:
            raise _corrupted(f"it contains the unknown method {name}")
        return getattr(owner, name)

    def _fill(self, block: _Block, kind: type, names: list[str], made: list[Any]) -> None:
        columns = dict(zip(names, block.columns, strict=True))
        # Most fields have the same value in all workers.
        same = {n: self._value(c[0]) if len(c) == 1 else None for n, c in columns.items()}
        differing = {n: self._column(c, block.count) for n, c in columns.items() if len(c) != 1}
        passing = [(name, PASSING[kind, name]) for name in names if (kind, name) in PASSING]
        rows = zip(*differing.values(), strict=True) if differing else itertools.repeat(())
        for each, values in zip(made, rows, strict=False):
            fields = same.copy()
            fields.update(zip(differing, values, strict=True))
            for name, new in passing:
                fields[name] = new()
            each.__dict__ = fields

    def _put(self, block: _Block, kind: type, made: list[Any]) -> None:
        """Fill containers."""
        sizes = self._column(block.sizes, block.count)
        items = [iter(self._column(column, sum(sizes))) for column in block.items]
        if not items:
            if any(sizes):
                raise _corrupted("the items of containers are missing")
            return
        if issubclass(kind, dict):
            keys, values = items
            # Bypass the method of `Roster`, because the indexes are restored separately.
            update = OrderedDict.update if kind is OrderedDict else dict.update
            for each, size in zip(made, sizes, strict=True):
                update(each, zip(islice(keys, size), islice(values, size), strict=True))
            return
        [rest] = items
        for each, size in zip(made, sizes, strict=True):
            (each.update if kind is set else each.extend)(islice(rest, size))


def _blocks_of(snapshot: _Snapshot) -> Iterator[_Block]:
    """Return the blocks of a snapshot. In a snapshot of an earlier version, each object is a block."""
    yield from snapshot.blocks
    for number, *parts in snapshot.objects:
        name, *names = snapshot.kinds[number]
        kind = _NAMED.get(name)
        if kind is deque:
            names = ["maxlen"]
        elif kind not in OBJECTS and kind not in CONTAINERS:
            names = parts  # all parts of an immutable object are columns
        columns, items = [[part] for part in parts[: len(names)]], parts[len(names) :]
        block = _Block(number, 1, columns)
        if kind is not None and issubclass(kind, dict):
            keys, values = items[::2], items[1::2]
            block.sizes, block.items = [len(keys)], [["parts", keys], ["parts", values]]
        elif kind in CONTAINERS:
            block.sizes, block.items = [len(items)], [["parts", items]]
        yield block


def _have_the_same_fields(kinds: list[list[str]], settings: Settings) -> None:
    """Raise Invalid if the fields of the classes in the snapshot differ from those in this version of the program."""
    ours = _Taking(Membership(settings)).snapshot.kinds
    expected = {name: set(names) for name, *names in ours}
    for cls in (*OBJECTS, *STRUCTS):
        if dataclasses.is_dataclass(cls):
            expected[cls.__name__] = {field.name for field in dataclasses.fields(cls)}
        elif issubclass(cls, msgspec.Struct):
            expected[cls.__name__] = set(cls.__struct_fields__)
    for name, *names in kinds:
        odd = expected.get(name, set()) ^ set(names)
        if odd:
            raise Invalid(
                f"the snapshot was taken by another version, in which {name} has different fields"
                f" ({', '.join(sorted(odd))}): resume the job with the version that wrote the journal"
            )
