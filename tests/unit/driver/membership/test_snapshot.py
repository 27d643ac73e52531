"""A membership restored from a snapshot behaves like the original, in any state."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from math import inf
from typing import Any, get_args, get_type_hints

import pytest

from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.events import (
    Action,
    Event,
    HostsChanged,
    WorkerConnected,
    WorkerProgressed,
    WorkerReady,
    WorkerResumed,
)
from elastic.driver.journal.entries import Entry
from elastic.driver.membership import snapshot
from elastic.driver.membership.membership import Membership, Phase
from elastic.driver.membership.records.roster import Roster
from elastic.driver.membership.snapshot import SnapshotError, restore_snapshot, take_snapshot
from elastic.driver.reasons import as_sentence
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.protocol.messages import Address, Launches, Value, Worker
from harness.conversation import (
    MembershipConversation,
    exited,
    hosts,
    leaving,
    raised,
    running,
    worker,
)
from harness.golden import raises

EVERY = 15  # entries between two snapshots of a simulated job


def goes_on_alike(entries: list[Entry], settings: Settings, *, first: int = 0) -> int:
    """Restore the membership repeatedly and compare the answers of both. Return the number of restorations."""
    original = Membership(settings)
    twin, swaps = Membership(settings), 0
    for number, entry in enumerate(entries):
        if number % EVERY == first:
            data = take_snapshot(original)
            twin, swaps = restore_snapshot(data, settings), swaps + 1
            assert take_snapshot(twin) == data
        assert original.handle(entry.event, entry.at) == twin.handle(entry.event, entry.at)
        assert original.next_deadline() == twin.next_deadline(), f"after entry {number}"
        twin.check()
    assert take_snapshot(original) == take_snapshot(twin)
    return swaps


@pytest.mark.parametrize(
    "seed",
    [
        1,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3)),
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 8)),
    ],
)
def test_restored_membership_behaves_alike_at_any_point_of_a_simulated_job(seed):
    sim = Simulation(seed, workers=6, steps=80, faults=14, mild=seed % 3 > 0)
    sim.run()
    assert goes_on_alike(sim.driver.entries, sim.settings, first=seed % EVERY) > 6


def test_copy_is_independent_of_the_original():
    """No object is shared with the original."""
    talk = running(4)
    data = take_snapshot(talk.m)
    twin = restore_snapshot(data, talk.m.settings)
    talk.tell(exited("h:1"), leaving("h:2"))
    assert talk.m.phase is Phase.GATHERING and twin.phase is Phase.TRAINING
    assert take_snapshot(twin) == data and worker("h:1") in twin.roster


def test_shared_objects_stay_shared():
    twin = restore_snapshot(take_snapshot(running(3).m), running(3).m.settings)
    record = twin.roster[worker("h:1")]
    assert twin.roster.hosts["h"][worker("h:1")] is record
    record.leaving = as_sentence("told to")  # the roster indexes it
    assert twin.roster.leavers == {worker("h:1"): record}
    assert (
        twin.worlds.staff.actions is twin.worlds.actions
        and twin.worlds.give_up._staff is twin.worlds.staff
    )


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ("Worlds", "_cause_at"),
        ("Worlds", "exceptions"),
        ("Stuck", "_look_at"),
        ("Frozen", "_alone_said"),
        ("Membership", "story"),
    ],
)
def test_omitted_field_is_detected(part, field):
    """Any access to it fails, so completeness does not depend on luck."""
    talk = running(2)
    found = json.loads(take_snapshot(talk.m))
    [kind] = [n for n, (name, *_) in enumerate(found["kinds"]) if name == part]
    at = found["kinds"][kind].index(field)
    del found["kinds"][kind][at]
    for number, _, columns, *_ in found["blocks"]:
        if number == kind:
            del columns[at - 1]
    with raises(Invalid, part, field):
        restore_snapshot(json.dumps(found).encode(), talk.m.settings)


def test_field_of_an_unknown_kind_fails_when_a_snapshot_is_taken():
    for value in (
        object(),
        lambda: None,
        b"bytes",
        {"a": {1j}},
        running(2).m.handle,
        MembershipConversation,
    ):
        talk = running(2)
        talk.m._news = value  # type: ignore[attr-defined]
        with raises(SnapshotError):
            take_snapshot(talk.m)


def values_in(hint: Any) -> set[type[Value]]:
    """Return the values that a field with this annotation may hold."""
    found = {hint} if isinstance(hint, type) and issubclass(hint, Value) else set()
    return found.union(*map(values_in, get_args(hint)))


def test_snapshot_can_hold_all_values_of_events_and_actions():
    """The latest events are part of the state, so a snapshot must support every kind of value in them."""
    for kind in (*Event.__subclasses__(), *Action.__subclasses__()):
        for name, hint in get_type_hints(kind).items():
            unknown = values_in(hint) - {*snapshot.STRUCTS}
            assert not unknown, f"{kind.__name__}.{name} has {unknown}"


def test_new_field_of_a_known_kind_is_kept():
    talk = running(2)
    talk.m.roster[worker("h:1")].mood = {("h", 1): inf}  # type: ignore[attr-defined]
    assert b'"mood"' in take_snapshot(talk.m)
    talk.m.worlds.actions.mood = (-inf, frozenset({2, 1}))  # type: ignore[attr-defined]
    data = take_snapshot(talk.m)
    snapshot_fields = json.loads(data)["kinds"]
    assert any(name == "ActionList" and "mood" in names for name, *names in snapshot_fields)


def test_snapshot_contains_no_values_of_the_environment():
    talk = MembershipConversation(env={"TOKEN": "hunter2"})
    talk.tell(hosts(h=4))
    data = take_snapshot(talk.m)
    assert b"hunter2" not in data and b"TOKEN" not in data
    assert restore_snapshot(data, talk.m.settings).settings is talk.m.settings


def test_unusual_texts_of_workers_are_restored_unchanged():
    talk = running(2, workers_min=1)
    talk.tell(raised("h:1", 2, (2, 0), 'Err: "\\ \u2028 \x00 \n{"snapshot": [1]} [0] \U0001f600'))
    twin = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    assert take_snapshot(twin) == take_snapshot(talk.m) and list(twin.story) == list(talk.m.story)


def parts_of(column: list[Any], count: int) -> list[Any]:
    """Return the part of each object in a column."""
    match column:
        case [part]:
            return [part] * count
        case ["texts", texts, indexes]:
            return [texts[index] for index in indexes]
        case ["refs", places]:
            return [None if place is None else [place] for place in places]
        case ["runs", runs]:
            pairs = zip(runs[::2], runs[1::2], strict=True)
            return [[start + offset] for start, many in pairs for offset in range(many)]
    assert column[0] in ("plain", "parts"), column
    return column[1]  # type: ignore[no-any-return]


def with_rows(data: bytes) -> bytes:
    """Convert a snapshot to the format of earlier versions, in which each object of the table is a row."""
    found = json.loads(data)
    rows = []
    for kind, count, *rest in found.pop("blocks"):
        columns, sizes, items = [*rest, [], [], []][:3]
        own = [parts_of(column, count) for column in columns]
        sizes = parts_of(sizes, count) if sizes else [0] * count
        inside = [iter(parts_of(column, sum(sizes))) for column in items]
        for index, size in enumerate(sizes):
            row = [kind, *(column[index] for column in own)]
            for _ in range(size):
                row += [next(column) for column in inside]
            rows.append(row)
    return json.dumps(found | {"objects": rows}).encode()


def test_snapshot_of_an_earlier_version_is_restored():
    talk = running(6)
    talk.tell(exited("h:1"), leaving("h:2"))
    talk.m.worlds.completed = [inf, None, {("h", 1)}, "x"]  # type: ignore[list-item]
    for membership in (talk.m, trained(3, 4)):
        data = take_snapshot(membership)
        assert b'"blocks"' not in with_rows(data)
        assert take_snapshot(restore_snapshot(with_rows(data), membership.settings)) == data


class Tree(Value, frozen=True):
    """Value that contains values of its own kind."""

    number: int
    below: tuple[Tree, ...] = ()


def test_snapshot_when_objects_of_a_batch_contain_each_other_then_each_is_stored_once(monkeypatch):
    monkeypatch.setattr(snapshot, "STRUCTS", (*snapshot.STRUCTS, Tree))
    monkeypatch.setitem(snapshot._NAMED, "Tree", Tree)
    talk, leaf, shared = running(2), Tree(1), {"a": 1}
    row = (shared, "x")
    trees = [Tree(3, (leaf, Tree(2, (leaf,)))), leaf, Tree(2, (leaf,)), None, row, shared, -inf]
    talk.m.worlds.completed = trees  # type: ignore[assignment]
    data = take_snapshot(talk.m)
    kinds = [name for name, *_ in json.loads(data)["kinds"]]
    counts = [count for kind, count, *_ in json.loads(data)["blocks"] if kinds[kind] == "Tree"]
    twin = restore_snapshot(data, talk.m.settings)
    made: list[Any] = twin.worlds.completed
    assert made == trees and sum(counts) == 3
    assert made[0].below[0] is made[1] and made[4][0] is made[5]
    assert take_snapshot(twin) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"kinds": [], "objects": [], "root": [0]}',
        b'{"kinds": [["Popen", "args"]], "objects": [[0, "ls"]], "root": [0]}',
        b'{"kinds": [["list"]], "objects": [[0, 1]], "root": [0]}',
        b'{"kinds": [["tuple"]], "objects": [[0, [0]]], "root": [0]}',
        b'{"kinds": [["method"], ["Roster"]], "objects": [[0, "clear", [1]], [1]], "root": [0]}',
        b'{"kinds": [], "root": [0]}',
        b'{"kinds": [["Popen", "args"]], "blocks": [[0, 1, [["ls"]]]], "root": [0]}',
        b'{"kinds": [["list"]], "blocks": [[0, 1, [], [1]]], "root": [0]}',
        b'{"kinds": [["list"]], "blocks": [[0, 1, [], [2], [["plain", [1]]]]], "root": [0]}',
        b'{"kinds": [["list"]], "blocks": [[0, 1, [], [1], [["runs", [4, 1]]]]], "root": [0]}',
        b'{"kinds": [["tuple"]], "blocks": [[0, 1, [["runs", [0, 1]]]]], "root": [0]}',
        b'{"kinds": [["tuple"]], "blocks": [[0, 2, [["plain", [1]]]]], "root": [0]}',
        b'{"kinds": [["tuple"]], "blocks": [[0, 1, [["odd", [1]]]]], "root": [0]}',
        b'{"kinds": [["method"], ["Roster"]], "blocks": [[0, 1, [["clear"], [[1]]]], [1, 1]], "root": [0]}',
    ],
)
def test_invalid_snapshot_is_rejected_without_side_effects(data):
    with pytest.raises(Invalid):
        restore_snapshot(data, running(2).m.settings)


def test_only_known_methods_are_restored():
    assert {(Roster, "_file")} == snapshot.METHODS
    talk = running(2)
    data = take_snapshot(talk.m).replace(b'"_file"', b'"clear"')
    with raises(Invalid):
        restore_snapshot(data, talk.m.settings)


# ---- large jobs ----------------------------------------------------------------------------------------------------


def trained(hosts_: int, slots: int) -> Membership:
    """Train, and let all members wait in a collective, so that much is known of each."""
    size = hosts_ * slots
    m = Membership(Settings(np=size, workers_min=1, workers_max=size, elastic=True))
    workers = [Worker(f"host-{h:04d}", s) for h in range(hosts_) for s in range(slots)]
    events: list[Event] = [HostsChanged({f"host-{h:04d}": slots for h in range(hosts_)})]
    events += [WorkerConnected(w, 4711) for w in workers]
    events += [WorkerReady(w, 0, None, Address(w.host, 7000), "x" * 64) for w in workers]
    events += [WorkerResumed(w, 1, {"formed": 1.0, "copied": 2.0}) for w in workers]
    gpu = [Launches("gradients", size, 7, 7, 6, 0.5)]
    events += [WorkerProgressed(w, 1, 7, "loss", 1.0, "", gpu) for w in workers]
    for number, event in enumerate(events):
        m.handle(event, number * 1e-5)
    assert m.phase is Phase.TRAINING
    return m


def test_snapshot_cost_grows_at_most_linearly_with_the_workers():
    """Counts function calls."""

    def calls_of(work: Callable[[], Any]) -> int:
        count = itertools.count()
        sys.setprofile(lambda *_: next(count))
        try:
            work()
        finally:
            sys.setprofile(None)
        return next(count)

    few, many = trained(2, 8), trained(20, 8)
    assert take_snapshot(restore_snapshot(take_snapshot(many), many.settings)) == take_snapshot(
        many
    )
    assert calls_of(lambda: take_snapshot(many)) < 11 * calls_of(lambda: take_snapshot(few))
    few_data, many_data = take_snapshot(few), take_snapshot(many)
    assert calls_of(lambda: restore_snapshot(many_data, many.settings)) < 11 * calls_of(
        lambda: restore_snapshot(few_data, few.settings)
    )


def test_snapshot_when_all_members_have_resumed_then_contains_no_copy_of_their_reports():
    talk = running(6)
    assert b"copied_bytes" in take_snapshot(talk.m)  # in the story of the latest events
    talk.m.story.clear()
    assert b"copied_bytes" not in take_snapshot(talk.m)
