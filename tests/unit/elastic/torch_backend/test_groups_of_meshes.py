"""Process groups of some ranks that were made before elastic.run, in later worlds: of followed meshes, and others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.errors import Fixed, NotElastic
from elastic.runtime import lifecycle
from elastic.sharding import unsupported_sharding
from elastic.torch_backend import following_group
from elastic.torch_backend.following_group import FollowingGroup
from elastic.torch_backend.group_names import GroupNames

ROWS, COLUMNS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


@pytest.fixture
def rt(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runtime of the groups: rank 1 of 4, before elastic.run."""
    names = GroupNames()
    names.before += [*ROWS, *COLUMNS]
    mesh = SimpleNamespace(mesh=torch.tensor([[0, 1], [2, 3]]), ndim=2)
    found = SimpleNamespace(
        elastic=True,
        generation=2,
        place=SimpleNamespace(rank=1, size=4),
        expect_messages=lambda *_: None,
        broken=False,
        provisional=False,
        before=names.before,
    )
    monkeypatch.setattr(following_group, "names", names)
    monkeypatch.setattr(unsupported_sharding, "_followed_meshes", [mesh])
    for ask in ("current", "active"):
        monkeypatch.setattr(lifecycle, ask, lambda: found)
    return found


def group(monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...] | None) -> FollowingGroup:
    made = FollowingGroup(None, "torch 1", ranks, None)
    known = SimpleNamespace(pg_map={made: None}, pg_group_ranks={})
    monkeypatch.setattr(following_group, "torchs_groups", known)
    return made


def test_groups_of_a_followed_mesh_end_with_the_first_world(rt, monkeypatch):
    made = group(monkeypatch, (0, 1))
    following_group.follow(rt, first=True)
    assert made.fits(4)
    rt.generation = 3
    following_group.follow(rt, first=False)
    assert not made.fits(4), "as many ranks, which are not the same workers"
    with pytest.raises(NotElastic) as refused:
        made._group(rt, torch.device("cpu"))
    assert refused.value.kind is Fixed.PROCESS_GROUP


def test_group_of_all_ranks_follows_the_world(rt, monkeypatch):
    made = group(monkeypatch, None)
    following_group.follow(rt, first=False)
    assert made.fits(3)


@pytest.mark.parametrize("more", [(0, 1), (1, 2), (0,)])
def test_groups_that_no_followed_mesh_has_are_refused_in_another_world(rt, more):
    rt.before.append(more)
    following_group.follow(rt, first=True)
    with pytest.raises(NotElastic) as refused:
        following_group.follow(rt, first=False)
    assert refused.value.kind is Fixed.PROCESS_GROUP


def test_group_not_registered_by_torch_gets_no_flight_recorder(rt, monkeypatch):
    made = group(monkeypatch, None)
    assert torch.device("cpu") in made._device_types
    monkeypatch.setattr(following_group, "torchs_groups", SimpleNamespace(pg_map={}))
    assert made._device_types == []
