"""Serialization of the whole state of a Membership to JSON, and its restoration.

Pure: no I/O, no clock. Makes no decisions.

A snapshot is a table of objects, ``{"kinds": [[name, field, ...], ...], "objects": [[kind, part, ...], ...], "root":
[n]}``. A part is a plain value, ``[n]`` for the n-th object of the table, or a float such as ``["inf"]``. This
preserves references to shared objects, and dictionaries may have keys of any type. All fields of an object are written,
whether its class declares them or not. An instance of a class that is not listed here raises an error when the snapshot
is taken, so that no new field is lost silently. The settings are not included, because the header of the journal
contains them. Of additional environment variables, the header contains only the names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

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
_PLAIN = frozenset({str, int, bool, type(None)})
_METHOD = "method"

Part = str | int | float | bool | list[Any] | None


class SnapshotError(ElasticError, TypeError):
    """Error raised when the state contains an object of an unknown type. The job continues without this snapshot."""


class _Snapshot(msgspec.Struct):
    kinds: list[list[str]]
    objects: list[list[Any]]
    root: list[int]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Snapshot).decode


def take_snapshot(membership: Membership) -> bytes:
    """Return a snapshot of a membership's whole state. Must be called between two events.

    Raises:
        SnapshotError: the state contains an object of an unknown type.
    """
    with _nothing_collected():
        return _encode(_Taking(membership).snapshot)


def restore_snapshot(data: bytes, settings: Settings) -> Membership:
    """Return a Membership restored from a snapshot. It handles every event exactly as the original would.

    Raises:
        Invalid: the data are not a snapshot, or were written by another version of this program.
    """
    try:
        with _nothing_collected():
            snapshot = _decode(data)
            _have_the_same_fields(snapshot.kinds, settings)
            found = _Making(snapshot, settings).root
    except Invalid:
        raise
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise Invalid(f"the snapshot is invalid: {error!r}") from error
    if not isinstance(found, Membership):
        raise Invalid(f"the snapshot contains a {type(found).__name__} instead of a job")
    return found


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


# ---- writing -------------------------------------------------------------------------------------------------------


class _Taking:
    """Serializer that traverses all objects of a membership.

    Mutable objects are queued instead of being visited recursively, so a deep object graph cannot exceed the recursion
    limit.
    """

    def __init__(self, membership: Membership) -> None:
        self._settings = membership.settings
        # index of each object in the table, by object identity
        self._places: dict[int, list[int]] = {}
        # Index of each immutable value in the table. Equal values are stored once.
        self._values: dict[Value, list[int]] = {}
        self._methods: dict[tuple[int, str], list[int]] = {}
        self._kinds: dict[tuple[str, ...], int] = {}
        self._objects: list[list[Any]] = []
        self._unfilled: deque[tuple[list[Any], Any]] = deque()
        self._ways: dict[type, Callable[[Any], list[int]]] = {
            **dict.fromkeys((*OBJECTS, *CONTAINERS), self._later),
            **dict.fromkeys(STRUCTS, self._struct),
            **dict.fromkeys(ENUMS, self._enum),
            Settings: self._of_settings,
            tuple: self._row,
            frozenset: self._row,
            type(self._row): self._method,
        }
        root = self._later(membership)
        while self._unfilled:
            row, value = self._unfilled.popleft()
            self._fill(row, value)
        kinds = [[*kind] for kind in self._kinds]
        self.snapshot = _Snapshot(kinds, self._objects, root)

    def _part(self, value: Any) -> Part:
        kind = type(value)
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]
        if kind is float:
            return value if math.isfinite(value) else [str(value)]
        found = self._places.get(id(value))
        if found is not None:
            return found
        way = self._ways.get(kind)
        if way is None:
            raise SnapshotError(
                f"a snapshot can't contain {kind.__module__}.{kind.__qualname__}: {value!r:.200}"
            )
        return way(value)

    def _number(self, *kind: str) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))

    def _add(self, value: Any, row: list[Any]) -> list[int]:
        self._objects.append(row)
        place = self._places[id(value)] = [len(self._objects) - 1]
        return place

    # Restoring creates an immutable object from its parts, so the object must follow them in the table.

    def _struct(self, value: Any) -> list[int]:
        if isinstance(value, Value) and (same := self._values.get(value)) is not None:
            return same
        kind = type(value)
        number = self._number(kind.__name__, *kind.__struct_fields__)
        parts = [self._part(getattr(value, name)) for name in kind.__struct_fields__]
        place = self._add(value, [number, *parts])
        if isinstance(value, Value):
            self._values[value] = place
        return place

    def _enum(self, value: Any) -> list[int]:
        return self._add(value, [self._number(type(value).__name__), value.value])

    def _row(self, value: Any) -> list[int]:
        items = value if type(value) is tuple else sorted(value)
        return self._add(value, [self._number(type(value).__name__), *map(self._part, items)])

    def _method(self, value: Any) -> list[int]:
        owner, name = value.__self__, value.__name__
        if (type(owner), name) not in METHODS:
            raise SnapshotError(f"a snapshot can't contain the method {value!r:.200}")
        found = self._methods.get((id(owner), name))
        if found is None:
            row = [self._number(_METHOD), name, self._part(owner)]
            found = self._methods[id(owner), name] = self._add(value, row)
        return found

    def _of_settings(self, value: Any) -> list[int]:
        if value is not self._settings:
            raise SnapshotError("a snapshot can't contain more than one Settings object")
        return self._add(value, [self._number(Settings.__name__)])

    # Mutable objects may appear anywhere in the table and may form cycles.

    def _later(self, value: Any) -> list[int]:
        row: list[Any] = []
        self._unfilled.append((row, value))
        return self._add(value, row)

    def _fill(self, row: list[Any], value: Any) -> None:
        kind, part = type(value), self._part
        if kind in CONTAINERS:
            row.append(self._number(kind.__name__))
        else:
            fields = vars(value)
            row.append(self._number(kind.__name__, *fields))
            if kind is ActionList:
                fields = {n: None if (kind, n) in PASSING else v for n, v in fields.items()}
            row.extend(map(part, fields.values()))
        if isinstance(value, dict):
            for key, item in value.items():
                row += (part(key), part(item))
        elif kind is deque:
            row.append(value.maxlen)
            row.extend(map(part, value))
        elif kind is set:
            # Sets have no defined order, so their items are sorted for a reproducible snapshot.
            row.extend(map(part, sorted(value)))
        elif kind is list:
            row.extend(map(part, value))


# ---- reading -------------------------------------------------------------------------------------------------------


class _Making:
    def __init__(self, snapshot: _Snapshot, settings: Settings) -> None:
        kinds = [
            (_METHOD if name == _METHOD else _NAMED[name], names) for name, *names in snapshot.kinds
        ]
        rows = snapshot.objects
        self._made: list[Any] = [None] * len(rows)
        later: list[tuple[Any, type, list[str], list[Any]]] = []
        others: list[tuple[int, Any, list[Any]]] = []
        for index, (number, *parts) in enumerate(rows):
            kind, names = kinds[number]
            if kind is Settings:
                self._made[index] = settings
            elif kind is deque:
                self._made[index] = deque(maxlen=parts.pop(0))
                later.append((self._made[index], deque, names, parts))
            elif kind in OBJECTS or kind in CONTAINERS:
                self._made[index] = kind.__new__(kind)
                later.append((self._made[index], kind, names, parts))
            else:
                others.append((index, kind, parts))
        for index, kind, parts in others:
            self._made[index] = self._made_of(kind, [*map(self._value, parts)])
        for made, kind, names, parts in later:
            self._fill(made, kind, names, [*map(self._value, parts)])
        self.root = self._made[snapshot.root[0]]

    def _value(self, part: Part) -> Any:
        if type(part) is not list:
            return part
        [at] = part
        if type(at) is str:
            return float(at)
        found = self._made[at]
        if found is None:
            raise ValueError(f"object {at} is referenced before it is created")
        return found

    @staticmethod
    def _made_of(kind: Any, values: list[Any]) -> Any:
        if kind == _METHOD:
            name, owner = values
            if (type(owner), name) not in METHODS:
                raise ValueError(f"a snapshot can't contain the method {name}")
            return getattr(owner, name)
        return kind(values) if kind in (tuple, frozenset) else kind(*values)

    @staticmethod
    def _fill(made: Any, kind: type, names: list[str], values: list[Any]) -> None:
        if names:
            vars(made).update(zip(names, values, strict=False))
            for name in names:
                if (kind, name) in PASSING:
                    setattr(made, name, PASSING[kind, name]())
            del values[: len(names)]
        if isinstance(made, dict):
            # Bypass the method of `Roster`, because the indexes are restored separately.
            put: Callable[..., None] = (dict if kind in OBJECTS else type(made)).__setitem__
            for key, item in zip(values[::2], values[1::2], strict=True):
                put(made, key, item)
        elif isinstance(made, (list, deque)):
            made.extend(values)
        elif isinstance(made, set):
            made.update(values)


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
