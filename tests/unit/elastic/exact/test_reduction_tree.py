"""The order of a sum over shards: one expression for any assignment of shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.exact import reduction_tree
from elastic.exact.reduction_tree import Node
from elastic.exact.shard_assignment import assign, balance
from harness.golden import raises


def expression(held: list[list[int]], shards: int) -> str:
    """Return the additions if each rank has these shards."""
    stacks, partials = [], []
    for own in held:
        merges, nodes = reduction_tree.schedule(own, shards)
        stack: list[str] = []
        for shard, place, count in merges:
            assert place == len(stack)
            stack.append(str(shard))
            for _ in range(count):
                right = stack.pop()
                stack[-1] = f"({stack[-1]}+{right})"
        assert len(stack) == len(nodes)
        stacks.append(stack)
        partials.append(nodes)
    found: list[str] = []
    for each in reduction_tree.program(partials, shards):
        if each is None:
            right = found.pop()
            found[-1] = f"({found[-1]}+{right})"
        else:
            found.append(stacks[each.rank][each.place])
    (root,) = found
    return root


@pytest.mark.parametrize(
    ("shards", "wanted"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_tree_has_the_documented_expression(shards, wanted):
    assert expression([list(range(shards))], shards) == wanted


@given(st.data())
def test_any_partition_gives_the_same_expression(data):
    shards = data.draw(st.integers(1, 40))
    owners = data.draw(st.lists(st.integers(0, 9), min_size=shards, max_size=shards))
    held = [[shard for shard in range(shards) if owners[shard] == rank] for rank in range(10)]
    assert expression(held, shards) == expression([list(range(shards))], shards)


@given(st.integers(1, 300))
def test_single_rank_ends_with_the_root_and_needs_one_buffer_per_level(shards):
    merges, partials = reduction_tree.schedule(range(shards), shards)
    assert partials == [Node(0, shards)]
    waiting = [each.place + 1 - each.merges for each in merges[:-1]]
    assert max(waiting, default=0) <= (shards - 1).bit_length()
    assert reduction_tree.completes(merges) == [False] * (shards - 1) + [True]


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_each_partial_is_complete_once_and_not_modified_afterwards(shards, some):
    held = sorted(shard for shard in some if shard < shards)
    merges, partials = reduction_tree.schedule(held, shards)
    complete = [
        (each.place - each.merges, each.shard + 1)
        for each, done in zip(merges, reduction_tree.completes(merges), strict=True)
        if done
    ]
    assert complete == [(place, node.stop) for place, node in enumerate(partials)]


@given(st.integers(1, 64), st.integers(1, 80))
def test_shards_are_assigned_to_one_rank_with_few_partials(shards, ranks):
    held = assign(shards, ranks)
    assert sorted(sum(held, ())) == list(range(shards))
    sizes = [len(each) for each in held]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)  # spares are the last ranks
    assert balance(shards, ranks) == pytest.approx(shards / (ranks * max(sizes)))
    for own in held:
        assert list(own) == sorted(own)
        _, partials = reduction_tree.schedule(own, shards)
        assert len(partials) <= len(own).bit_count()  # one for each power of two
    assert expression([list(each) for each in held], shards) == expression(
        [list(range(shards))], shards
    )


def test_missing_partial_is_an_error():
    _, nodes = reduction_tree.schedule((0, 1, 2), 4)
    with raises(ValueError):
        reduction_tree.program([nodes, []], 4)


@pytest.mark.parametrize(("shards", "ranks"), [(0, 1), (1, 0)])
def test_assignment_of_no_shards_or_ranks_is_refused(shards, ranks):
    with raises(ValueError):
        assign(shards, ranks)
