"""Which shards are computed twice, and the vote about different results."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.exact import shard_assignment, verification_rules
from elastic.exact.verification_rules import Computed, VoteResult

divisions = st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(lambda sizes: sum(sizes) > 0)
shares = st.floats(0, 1) | st.sampled_from([1 / 64, 1 / 16, 0.25, 1.0])


@given(divisions, shares, st.integers(0, 1 << 40), st.integers(1, 99), st.integers(0, 10**6))
def test_checks_when_drawn_then_another_rank_computes_each_shard_at_most_once(
    sizes, share, seed, generation, step
):
    held = shard_assignment.place(sizes)
    found = verification_rules.checks(held, share, seed, generation, step)
    assert len({check.shard for check in found}) == len(found)
    for check in found:
        assert check.shard in held[check.owner]
        assert check.second != check.owner and 0 <= check.second < len(sizes)
    load = Counter(check.second for check in found)
    owners = sum(map(bool, sizes))
    assert not load or max(load.values()) <= -(-len(found) // (owners - 1 or 1)) + 1


@given(divisions.filter(lambda sizes: len(sizes) > 1), shares, st.integers(0, 1 << 40))
def test_checks_over_many_steps_are_the_configured_share(sizes, share, seed):
    held, steps = shard_assignment.place(sizes), 400
    found = [len(verification_rules.checks(held, share, seed, 3, step)) for step in range(steps)]
    unit = verification_rules.unit(held, share)
    assert abs(sum(found) - share * sum(sizes) * steps) <= unit + 1e-6


@pytest.mark.parametrize(
    ("count", "ranks", "share"), [(16, 4, 1 / 64), (8, 4, 1 / 16), (8, 3, 1.0)]
)
def test_checks_when_each_rank_is_due_then_gaps_are_within_the_bound(count, ranks, share):
    held = shard_assignment.assign(count, ranks)
    bound = verification_rules.steps_between(held, share)
    last = dict.fromkeys(range(ranks), -1)
    for step in range(500):
        for owner in {c.owner for c in verification_rules.checks(held, share, 5, 1, step)}:
            assert step - last[owner] <= bound + 1
            last[owner] = step
    assert min(last.values()) > 400


def test_checks_when_many_are_drawn_then_every_pair_of_worker_and_shard_occurs():
    held = shard_assignment.assign(8, 4)
    pairs = {
        (check.second, check.shard)
        for step in range(2000)
        for check in verification_rules.checks(held, 1 / 4, 9, 2, step)
    }
    assert pairs == {(rank, shard) for rank in range(4) for shard in range(8)} - {
        (rank, shard) for rank, own in enumerate(held) for shard in own
    }


def test_checks_when_the_world_has_one_rank_then_are_empty():
    assert verification_rules.checks([(0, 1, 2)], 1.0, 0, 1, 5) == ()
    assert verification_rules.steps_between([(0, 1, 2)], 1.0) == float("inf")


def vote(*pairs: tuple[int, int], ranks: int) -> VoteResult | None:
    return verification_rules.verdict([Computed(*each) for each in pairs], ranks)


def test_verdict_when_both_agree_then_no_rank_is_wrong():
    assert vote((0, 7), (1, 7), ranks=4) == VoteResult((), 7)


def test_verdict_when_two_ranks_differ_then_all_other_ranks_vote():
    differ = [Computed(0, 7), Computed(2, 8)]
    assert verification_rules.verdict(differ, 4) is None
    assert verification_rules.voters(differ, 4) == (1, 3)
    assert vote((0, 7), (1, 8), (2, 8), ranks=3) == VoteResult((0,), 8)
    assert vote((0, 7), (1, 8), (2, 7), ranks=3) == VoteResult((1,), 7)


def test_verdict_when_two_of_five_are_wrong_in_the_same_way_then_both_are_named():
    assert vote((0, 7), (1, 8), (2, 7), (3, 8), (4, 7), ranks=5) == VoteResult((1, 3), 7)


def test_verdict_when_two_of_four_are_wrong_in_different_ways_then_both_are_named():
    assert vote((0, 7), (1, 8), (2, 9), (3, 9), ranks=4) == VoteResult((0, 1), 9)


def test_verdict_when_the_votes_are_tied_then_is_unknown():
    assert vote((0, 7), (1, 8), (2, 7), (3, 8), ranks=4) == VoteResult((), None)
    assert vote((0, 7), (1, 8), (2, 9), ranks=3) == VoteResult((), None)


def test_verdict_when_a_rank_contradicts_its_first_digest_then_this_rank_is_wrong():
    assert vote((0, 7), (0, 8), ranks=3) is None
    assert verification_rules.voters([Computed(0, 7), Computed(0, 8)], 3) == (1, 2)
    assert vote((0, 7), (0, 8), (1, 8), (2, 8), ranks=3) == VoteResult((0,), 8)


def test_verdict_when_two_ranks_differ_then_each_computes_once_more():
    differ = [Computed(1, 7), Computed(0, 8)]
    assert verification_rules.verdict(differ, 2) is None
    assert verification_rules.voters(differ, 2) == (0, 1)
    assert vote((1, 7), (0, 8), (0, 8), (1, 8), ranks=2) == VoteResult((1,), 8)  # transient
    assert vote((1, 7), (0, 8), (0, 8), (1, 9), ranks=2) == VoteResult(
        (1,), 8
    )  # contradicts itself
    assert vote((1, 7), (0, 8), (0, 8), (1, 7), ranks=2) == VoteResult((), None)
    assert vote((1, 7), (0, 8), (0, 6), (1, 5), ranks=2) == VoteResult((), None)


@given(st.integers(3, 9), st.data())
def test_verdict_when_most_ranks_are_correct_then_only_faulty_ranks_are_blamed(ranks, data):
    """Even if all wrong ones have the same digest."""
    faulty = data.draw(st.sets(st.integers(0, ranks - 1), max_size=(ranks - 1) // 2))
    owner, second = data.draw(st.permutations(range(ranks)))[:2]
    digests = {
        rank: data.draw(st.integers(8, 10)) if rank in faulty else 7 for rank in range(ranks)
    }
    found = [Computed(rank, digests[rank]) for rank in (owner, second)]
    if digests[owner] == digests[second]:
        return  # not noticed this time
    found += [Computed(rank, digests[rank]) for rank in verification_rules.voters(found, ranks)]
    assert verification_rules.verdict(found, ranks) == VoteResult(tuple(sorted(faulty)), 7)


@pytest.mark.parametrize(
    ("held", "share", "steps"),
    [
        ([(0, 1), (2, 3), (4, 5), (6, 7)], 1 / 16, 64),
        ([(0, 1), (2, 3), (4, 5), (6, 7)], 0.25, 16),
        ([(0, 1), (2, 3), (4, 5), (6, 7)], 1.0, 0),
        ([(0, 1)], 0.5, 0),
        ([(0, 1), (2, 3)], 0.0, 0),
    ],
)
def test_window_when_steps_have_checks_then_contains_the_expected_number_of_steps(
    held, share, steps
):
    assert verification_rules.window(held, share) == steps


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_rechecks_when_shards_are_not_finite_then_each_has_another_rank_of_its_own(ranks):
    for step in range(20):
        found = [(rank, 10 + rank) for rank in range(ranks)]
        checks = verification_rules.rechecks(found, ranks, 3, 2, step)
        assert [(each.owner, each.shard) for each in checks] == found
        assert sorted(each.second for each in checks) == [*range(ranks)]
        assert all(each.owner != each.second for each in checks)
