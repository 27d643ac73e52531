"""Process sets as a script sees them, in a world whose other ranks request the same; see also `test_set_table`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from elastic.collectives.single_rank import LocalCollectives
from elastic.errors import Invalid, NotInitialized
from elastic.negotiation import process_sets, submission
from elastic.negotiation.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    process_set_by_id,
    remove_process_set,
    resolve,
)
from elastic.runtime import basics, lifecycle
from harness.golden import raises, recorded


class World(SimpleNamespace):
    """Required parts of the runtime. Other ranks are echoes of this one."""

    def change(self, rank: int, size: int) -> None:
        self.generation += 1
        self.place = SimpleNamespace(rank=rank, size=size)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Rank 1 of a world of four in an elastic job, where sets may be added."""
    world = World(
        generation=1,
        place=SimpleNamespace(rank=1, size=4),
        elastic=True,
        alone=False,
        provisional=False,
        env=SimpleNamespace(dynamic_process_sets=False),
    )
    monkeypatch.setattr(lifecycle, "current", lambda: world)
    monkeypatch.setattr(lifecycle, "active", lambda: world)
    monkeypatch.setattr(lifecycle, "init", lambda: None)
    monkeypatch.setattr(lifecycle, "shutdown", lambda: None)
    monkeypatch.setattr(submission, "agree", lambda kind, name, text: [text] * world.place.size)
    basics.init(process_sets="dynamic")
    yield world
    process_sets.unregister_all()


def refuses(sentence: str) -> Any:
    return pytest.raises(Invalid, match=sentence)


# ---- the object ----------------------------------------------------------------------------------


def test_a_set_that_is_not_registered_has_no_number(world):
    made = ProcessSet([3, 1])
    assert (made.process_set_id, made.ranks, made.mpi_comm) == (None, [1, 3], None)
    assert (made.size(), made.rank(), made.included()) == (None, None, True)
    assert repr(made) == "ProcessSet(process_set_id=None, ranks=[1, 3], mpi_comm=None)"
    with refuses(r"process set \[1, 3\] is not registered: call add_process_set\(\)"):
        resolve(made)


def test_registered_set_has_its_own_rank_and_size(world):
    added = add_process_set([1, 3])
    assert (added.process_set_id, added.size(), added.rank(), added.included()) == (1, 2, 0, True)
    assert resolve(added) == (1, 3)
    world.place.rank = 3
    assert added.rank() == 1
    world.place.rank = 0
    assert added.included() is False
    for ask in added.rank, lambda: resolve(added):
        with refuses(
            r"rank 0 is not in process set 1 with ranks \[1, 3\]: check process_set.included"
        ):
            ask()


def test_process_set_none_and_the_global_set_contain_all_ranks(world):
    assert resolve(None) is None and resolve(global_process_set) is None
    assert isinstance(global_process_set, ProcessSet)
    assert (global_process_set.process_set_id, global_process_set.ranks) == (0, [0, 1, 2, 3])
    assert (global_process_set.size(), global_process_set.rank()) == (4, 1)
    assert global_process_set.included()
    assert copy.deepcopy(global_process_set) is global_process_set
    with refuses("process_set is a list: pass a ProcessSet"):
        resolve([0, 1])  # type: ignore[arg-type]


def test_copies_of_a_registered_set_are_that_set(world):
    """A set may be an attribute of a state, which is copied at every commit and sent to newcomers."""
    added = add_process_set([0, 1])
    assert copy.deepcopy({"set": added})["set"] is added
    assert pickle.loads(cloudpickle.dumps(added)) is added
    sent = cloudpickle.dumps(ProcessSet([1, 2]))
    assert pickle.loads(sent).process_set_id is None
    second = add_process_set([1, 2])
    assert pickle.loads(sent) is second


# ---- registering ---------------------------------------------------------------------------------


def test_init_registers_a_list_of_sets(world):
    process_sets.unregister_all()
    one, two = ProcessSet([0, 1]), ProcessSet(range(1, 4))
    basics.init(process_sets=[one, two])
    assert (one.process_set_id, two.process_set_id) == (1, 2)
    basics.init(process_sets=[one, two])  # again: nothing to do
    assert get_process_set_ids_and_ranks() == {0: [0, 1, 2, 3], 1: [0, 1], 2: [1, 2, 3]}
    for change in lambda: add_process_set([0]), lambda: remove_process_set(one):
        with refuses(r'call init\(process_sets="dynamic"\), or set HOROVOD_DYNAMIC_PROCESS_SETS=1'):
            change()


def test_environment_variable_enables_dynamic_process_sets(world):
    process_sets.unregister_all()
    world.env.dynamic_process_sets = True
    basics.init()
    assert add_process_set([0]).process_set_id == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("static", 'pass "dynamic", or a list'),
        (3, "pass a list of ProcessSet objects"),
        (ProcessSet([0]), "pass a list of ProcessSet objects"),
        ([[0, 1]], r"contains \[0, 1\]: pass ProcessSet objects"),
        ([global_process_set], "Omit global_process_set"),
    ],
)
def test_init_lists_its_accepted_arguments(world, given, sentence):
    with refuses(sentence):
        basics.init(process_sets=given)


def test_process_set_can_be_removed_and_added_again(world):
    added = add_process_set(ProcessSet([0, 1]))
    assert process_set_by_id(1) is added
    assert process_sets.process_sets() == [global_process_set, added]
    assert remove_process_set(added) is True
    assert (added.process_set_id, added.ranks, added.size()) == (None, [0, 1], None)
    with refuses(r"process set \[0, 1\] was removed: register it again"):
        resolve(added)
    assert remove_process_set(added) is False
    with refuses("process set ID 1 is not registered"):
        process_set_by_id(1)
    assert add_process_set(added) is added
    assert added.process_set_id == 2 and resolve(added) == (0, 1)


def test_invalid_sets_cannot_be_added_or_removed(world):
    with refuses("is always registered"):
        add_process_set(global_process_set)
    assert remove_process_set(global_process_set) is False
    assert remove_process_set(ProcessSet([0])) is False
    with refuses("pass a ProcessSet that was registered"):
        remove_process_set([0])  # type: ignore[arg-type]
    with refuses("contains rank 4, but the ranks of this job are 0 to 3"):
        add_process_set([1, 4])
    add_process_set([0])
    with refuses("already registered"):
        add_process_set([0])


def test_all_ranks_are_a_separate_set_only_when_the_world_may_change(world):
    assert add_process_set(range(4)).process_set_id == 1
    world.elastic = False
    remove_process_set(process_set_by_id(1))
    with refuses("use global_process_set"):
        add_process_set(range(4))


def test_process_set_calls_before_init_raise_not_initialized():
    for ask in lambda: add_process_set([0]), lambda: remove_process_set(ProcessSet([0])):
        with raises(NotInitialized):
            ask()


def test_shutdown_unregisters_all_sets(world):
    added = add_process_set([0])
    basics.shutdown()
    assert added.process_set_id is None
    assert process_sets.process_sets() == [global_process_set]


# ---- when the world changes ----------------------------------------------------------------------


def test_process_set_contains_the_present_workers_with_their_ranks(world):
    added = add_process_set([0, 1, 3])
    world.change(rank=0, size=3)
    assert resolve(added) == (0, 1)
    assert (added.ranks, added.size(), added.rank()) == ([0, 1, 3], 2, 0)
    world.change(rank=3, size=5)
    assert (resolve(added), added.size(), added.rank()) == ((0, 1, 3), 3, 2)


def test_process_set_without_a_remaining_rank_raises_an_error(world):
    added = add_process_set([2, 3])
    world.change(rank=0, size=2)
    assert (added.size(), added.included()) == (0, False)
    with refuses(r"\[2, 3\] has no rank in the current world of size 2"):
        resolve(added)


def test_a_restarted_training_function_finds_its_set(world):
    first = add_process_set([0, 1])
    world.change(rank=1, size=3)
    again = add_process_set([0, 1])
    assert (again.process_set_id, resolve(again)) == (1, (0, 1))
    assert remove_process_set(first) and again.process_set_id is None


def test_joining_rank_may_register_any_set_before_its_world(world, monkeypatch):
    process_sets.unregister_all()
    world.provisional, world.generation = True, 0
    world.place.size = 2
    monkeypatch.delattr(submission, "agree")  # the others train: no rank would answer
    basics.init(comm=[0, 1, 2], process_sets="dynamic")
    assert add_process_set([0, 7]).process_set_id == 1


class Link(LocalCollectives):
    """Rank 0's broadcasts, kept for joining ranks."""

    def __init__(self, sent: list[torch.Tensor], rank: int) -> None:
        super().__init__()
        self.rank, self.sent = rank, sent

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        if self.rank == root:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))
        return super().broadcast(tensor, root)


@pytest.mark.parametrize("sets", [1, 120], ids=["short", "long"])
def test_a_rank_without_the_newest_commit_adopts_the_sets_of_rank_0(world, sets):
    """A long table takes a second broadcast."""
    sent: list[torch.Tensor] = []
    world.guard = lambda name: pytest.MonkeyPatch.context()
    world.place = SimpleNamespace(rank=0, size=200)
    world.generation = 2
    for first in range(sets):
        add_process_set(range(first, first + 30))
    told = get_process_set_ids_and_ranks()
    world.copy_group = lambda *_: Link(sent, 0)
    assert process_sets.start_copy(world, (0, 1))() == []
    assert len(sent) == (1 if sets == 1 else 2)

    process_sets.unregister_all()
    world.provisional = True
    basics.init(process_sets="dynamic")
    mine = add_process_set([0, 99])
    world.provisional = False
    world.place.rank = 1
    world.copy_group = lambda *_: Link(sent, 1)
    (news,) = process_sets.start_copy(world, (0, 1))()
    recorded("messages", news)
    assert get_process_set_ids_and_ranks() == told
    assert (mine.process_set_id, mine.ranks) == (1, list(range(30)))
    assert not sent


def test_a_rank_with_the_newest_commit_continues_immediately(world):
    world.place.rank = 1
    added = add_process_set([1])
    assert process_sets.start_copy(world, ())() == []
    assert added.process_set_id == 1


# ---- init(comm=...) ------------------------------------------------------------------------------


def test_init_accepts_a_list_of_all_ranks(world):
    basics.init(comm=[0, 1, 2, 3])
    basics.init(comm=[])
    basics.init(comm=range(4))


@pytest.mark.parametrize(
    ("comm", "sentence"),
    [
        ([0, 2], r"selects some of the ranks \[0, 1, 2, 3\].*start another job \(-np 2\)"),
        ([3, 2, 1, 0], "selects some of the ranks"),
        (object(), "MPI is not used"),
        ([object()], "MPI is not used"),
    ],
)
def test_init_with_a_part_of_the_ranks_is_refused(world, comm, sentence):
    with refuses(sentence):
        basics.init(comm=comm)
