"""Names of process groups that an old worker and a new one agree on."""

from __future__ import annotations

import types

import pytest

from elastic.runtime import lifecycle
from elastic.torch_backend import group_names
from elastic.torch_backend.group_names import GroupNames
from harness.golden import recorded


def test_joining_worker_uses_the_same_group_names_as_survivors():
    survivor, newcomer = GroupNames(), GroupNames()
    survivor.enter(2)
    earlier = [survivor.next(), survivor.next(), survivor.next("of some")]
    for each in (survivor, newcomer):
        each.enter(3)
    now = [[each.next(), each.next("of some"), each.next()] for each in (survivor, newcomer)]
    assert now[0] == now[1]
    assert len({*earlier, *now[0]}) == 6


def test_groups_created_only_by_members_do_not_change_names_of_global_groups():
    member, other = GroupNames(), GroupNames()
    for each in (member, other):
        each.enter(1)
    assert member.next("pair") != member.next("pair")
    assert member.next() == other.next()


@pytest.fixture
def names(monkeypatch):
    found = GroupNames()
    monkeypatch.setattr(group_names, "names", found)
    monkeypatch.setattr(group_names, "_theirs", lambda ranks, use_hashed_name: "torch's own")
    return found


def in_a_job(monkeypatch, elastic: bool) -> None:
    place = types.SimpleNamespace(size=4)
    rt = types.SimpleNamespace(elastic=elastic, place=place)
    monkeypatch.setattr(lifecycle, "active", lambda: rt)


def test_groups_made_before_elastic_run_or_in_fixed_size_jobs_are_named_by_torch(
    monkeypatch, names
):
    in_a_job(monkeypatch, elastic=True)
    for ranks in ([], [0, 1, 2, 3], [0, 1]):
        recorded("messages", group_names.name(ranks, False))
    assert names.before == [(0, 1)]
    names.enter(2)
    assert group_names.name([0, 1], False) != "torch's own"
    in_a_job(monkeypatch, elastic=False)
    recorded("messages", group_names.name([0, 1], True))
    assert names.before == [(0, 1)]


def test_groups_with_different_members_are_distinguished(monkeypatch, names):
    in_a_job(monkeypatch, elastic=True)
    names.enter(2)
    found = [group_names.name(ranks, True) for ranks in ([0, 1], [2, 3], [0, 1])]
    assert len(set(found)) == 3
