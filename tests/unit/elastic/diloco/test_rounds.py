"""Actions of a worker in an island, and the weight of the island. Losses are in tests/simulation."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.diloco.islands import Islands
from elastic.diloco.rounds import (
    ApplyMean,
    AwaitMean,
    CompareIsland,
    CompareReports,
    Decisions,
    Follow,
    MeanId,
    Rounds,
    ShareMean,
    StartMean,
    TakeInner,
    TakeMerges,
    TakePart,
    WorldId,
    WorldReport,
)
from elastic.diloco.schedule import RoundSchedule, Sent
from elastic.errors import Invalid, StateMismatch
from harness.golden import raises

NAMES = ("a", "b", "a")


def performed(actions, answers=()):
    """Perform actions, with answers by their types. Return all but comparisons of reports."""
    found: list[Any] = []
    answer: Any = None
    answers = dict(answers)
    while True:
        try:
            action = actions.send(answer)
        except StopIteration:
            return found
        answer = answers.get(type(action))
        if not isinstance(action, CompareReports):
            found.append(action)
        elif answer is None:
            answer = [action.report] * len(NAMES)


def stepped(rounds, rank, tokens, answers=()):
    return performed(rounds.step(WorldId(1), Islands(NAMES, rank), tokens), answers)


def test_leader_exchanges_the_mean_and_shares_the_result():
    sent = Sent(0, 1, 1)
    assert stepped(Rounds(RoundSchedule(1)), 0, None, {CompareIsland: [0.0, 0.0]}) == [
        CompareIsland(sent, 0.0),
        StartMean(sent, (0, 1), None),
        AwaitMean(0),
        ShareMean(0, 0),
        ApplyMean(0),
    ]


def test_merge_that_was_due_when_the_world_failed_is_awaited_a_delay_later():
    rounds = Rounds(RoundSchedule(8, 1, 3))
    for _ in range(10):
        performed(rounds.step(WorldId(1), Islands.apart(1, 0)), {})
    actions = rounds.step(WorldId(1), Islands.apart(1, 0))
    assert next(actions) == AwaitMean(0)
    rounds.interrupted()
    assert performed(
        rounds.enter(WorldId(2), Islands.apart(1, 0)), {CompareReports: [rounds.report()]}
    ) == [StartMean(Sent(0, 8, 14), (0,), None)]
    steps = [
        [*map(type, performed(rounds.step(WorldId(2), Islands.apart(1, 0)), {}))] for _ in range(3)
    ]
    assert steps == [[], [], [AwaitMean, ApplyMean]]


def test_fragment_due_during_a_repeated_merge_is_sent_after_that_merge():
    alone = Islands.apart(1, 0)
    rounds = Rounds(RoundSchedule(8, 2, 3))
    for _ in range(6):
        performed(rounds.step(WorldId(1), alone))
    assert rounds.pending == Sent(0, 4, 7)
    rounds.interrupted()
    performed(rounds.enter(WorldId(2), alone))
    assert rounds.pending == Sent(0, 4, 9)
    steps = [[*map(type, performed(rounds.step(WorldId(2), alone)))] for _ in range(6)]
    assert steps == [
        [],
        [],
        [AwaitMean, ApplyMean, StartMean],
        [],
        [],
        [AwaitMean, ApplyMean, StartMean],
    ]
    assert rounds.pending == Sent(0, 12, 15)


def awaits_mean(actions):
    """Perform actions until one waits for a mean. Return whether there is any."""
    answer = None
    with contextlib.suppress(StopIteration):
        while True:
            action = actions.send(answer)
            if isinstance(action, AwaitMean):
                return True
            answer = [action.report] if isinstance(action, CompareReports) else None
    return False


def test_fragment_due_during_a_merge_that_completes_as_a_world_begins_is_sent_in_the_next_step():
    alone = Islands.apart(1, 0)
    rounds = Rounds(RoundSchedule(6, 2, 2))
    for world in range(7):
        performed(rounds.step(WorldId(world), alone))
        if rounds.pending is not None:  # Losses postpone this merge to the end of the round.
            rounds.interrupted()
        performed(rounds.enter(WorldId(world + 1), alone))
    pending: Sent | None = rounds.pending
    assert pending == Sent(0, 3, 8)
    assert awaits_mean(rounds.step(WorldId(7), alone))
    rounds.interrupted()
    performed(rounds.enter(WorldId(8), alone))
    assert (rounds.position, rounds.merged, rounds.pending) == (8, [1, 0], None)
    performed(rounds.step(WorldId(8), alone))
    assert rounds.pending == Sent(1, 6, 11)


@given(st.integers(1, 12), st.integers(1, 4), st.floats(0, 1), st.sets(st.integers(1, 36)))
@example(every=6, fragments=3, overlap=1.0, losses={3, 4})
@example(every=12, fragments=2, overlap=0.75, losses={34})  # the last send waits for a merge
def test_waits_for_means_when_the_world_fails_then_all_fragments_are_sent_as_scheduled(
    every, fragments, overlap, losses
):
    fragments = min(fragments, every)
    schedule = RoundSchedule(every, fragments, round(overlap * (every // fragments - 1)))
    rounds, world, alone = Rounds(schedule), 0, Islands.apart(1, 0)
    for step in range(1, 3 * every + 1):
        if step in losses and awaits_mean(rounds.step(WorldId(world), alone)):
            rounds.interrupted()
            world += 1
            performed(rounds.enter(WorldId(world), alone))
        elif step not in losses:
            performed(rounds.step(WorldId(world), alone))
    # Fragments are sent in order, each after the merge of the previous one.
    until = 3 * every + 1 if rounds.pending is None else rounds.pending.step
    sent = [each.fragment for each in map(schedule.sent_at, range(1, until)) if each is not None]
    assert rounds.merged == [sent.count(fragment) for fragment in range(fragments)]


def test_other_member_receives_the_mean_from_the_leader():
    assert stepped(Rounds(RoundSchedule(1)), 2, None, {CompareIsland: [0.0, 0.0]}) == [
        CompareIsland(Sent(0, 1, 1), 0.0),
        ShareMean(0, 0),
        ApplyMean(0),
    ]


def test_single_worker_of_an_island_neither_compares_nor_shares():
    assert stepped(Rounds(RoundSchedule(1)), 1, None) == [
        StartMean(Sent(0, 1, 1), (0, 1), None),
        AwaitMean(0),
        ApplyMean(0),
    ]


def test_weight_is_the_sum_of_the_tokens_of_the_members_since_the_last_merge():
    rounds = Rounds(RoundSchedule(2))
    assert stepped(rounds, 0, 10) == []
    for own, others in ((15.0, 7.0), (9.0, 1.0)):
        compare, start, *_ = stepped(rounds, 0, 5, {CompareIsland: [own, others]})
        assert (compare.tokens, start.weight) == (own, own + others)
        assert stepped(rounds, 0, 4) == []


def test_tokens_after_a_send_count_for_the_next_merge():
    rounds = Rounds(RoundSchedule(4, delay=2))
    weights = []
    for step in range(1, 13):
        weights += [each.weight for each in stepped(rounds, 1, step) if type(each) is StartMean]
    assert weights == [1 + 2 + 3 + 4, 5 + 6 + 7 + 8, 9 + 10 + 11 + 12]


def test_joining_member_receives_the_inner_parameters_of_its_island():
    reports = [
        json.dumps([20, [3], None, origin, [], False]) for origin in ([17, 0], [20, 0], [0, 3])
    ]
    rounds = [Rounds(RoundSchedule(50)) for _ in NAMES]
    for each, own_steps in zip(rounds, (17, 20, 0), strict=True):
        each.take_own({"origin": (own_steps, 0), "tokens": [0.0]})
        each.take_shared({"position": 20, "merged": [3], "pending": None, "weighted": None})
    found = [
        performed(each.enter(WorldId(1), Islands(NAMES, rank)), {CompareReports: reports})
        for rank, each in enumerate(rounds)
    ]
    assert found == [[TakeInner(0, kept=True)], [], [TakeInner(0, kept=False)]]
    assert [(each.own_steps, each.position) for each in rounds] == [(17, 20), (20, 20), (17, 20)]


def survivor(rank, merges, received=None):
    """Return the rounds of a rank of two islands, and its report. The last merge was made in generation 5."""
    rounds = Rounds(RoundSchedule(50))
    rounds.take_own({"origin": (40, 0), "tokens": [0.0]})
    shared = {"position": 40, "merged": [merges], "pending": None, "weighted": None}
    rounds.take_shared(shared | {"applied": None if merges < 3 else (2, 5)})
    if received is not None:
        rounds._sent = MeanId(*received)
        rounds.mean_received()
    return rounds, rounds.report()


def caught_up(*survivors):
    """Return the actions with which ranks 0 and 2 of island a and 1 of b have the same merges, by rank."""
    rounds, reports = zip(*survivors, strict=True)
    found = [
        performed(each.enter(WorldId(6), Islands(NAMES, rank)), {CompareReports: reports})
        for rank, each in enumerate(rounds)
    ]
    assert [each.merged for each in rounds] == [[3]] * 3
    assert len({each.applied for each in rounds}) == 1
    return found


def test_rank_behind_takes_merges_from_its_own_island():
    take = TakeMerges(2, (0,), (), (0,), in_island=True)
    assert caught_up(survivor(0, 2), survivor(1, 3), survivor(2, 3)) == [
        [take],
        [],
        [TakeMerges(2, (), (), (0,), in_island=True)],
    ]


def test_island_behind_applies_the_mean_that_a_member_has_received():
    repeated = ApplyMean(0, repeated=True)
    assert caught_up(survivor(0, 2, (2, 5)), survivor(1, 3), survivor(2, 2)) == [
        [ShareMean(0, 0), repeated],
        [],
        [ShareMean(0, 0), repeated],
    ]
    assert caught_up(survivor(0, 3), survivor(1, 2, (2, 5)), survivor(2, 3)) == [[], [repeated], []]


@pytest.mark.parametrize("received", [None, (2, 4), (1, 5)])
def test_mean_of_another_world_or_merge_is_not_applied(received):
    found = caught_up(survivor(0, 2, received), survivor(1, 3), survivor(2, 2))
    take = TakeMerges(1, (0,), (), (0,))
    assert found == [[take], [TakeMerges(1, (), (), (0,))], [take]]


def test_island_behind_by_several_merges_takes_them_from_another_island():
    found = caught_up(survivor(0, 1, (2, 5)), survivor(1, 3), survivor(2, 2, (2, 5)))
    take = TakeMerges(1, (0,), (), (0,))
    assert found == [[take], [TakeMerges(1, (), (), (0,))], [take]]


def test_equally_many_merges_of_different_worlds_are_refused():
    rounds, report = survivor(0, 3)
    other = WorldReport.decoded(report)._replace(applied=MeanId(2, 4))
    with raises(StateMismatch):
        performed(
            rounds.enter(WorldId(6), Islands(NAMES, 0)),
            {CompareReports: [report, json.dumps(other), report]},
        )


def test_mean_is_not_applied_once_its_merge_is_repeated():
    rounds, report = survivor(1, 2, (2, 5))
    others = survivor(0, 2)[1]
    performed(
        rounds.enter(WorldId(6), Islands(NAMES, 1)), {CompareReports: [others, report, others]}
    )
    assert WorldReport.decoded(rounds.report()).received is None


@pytest.mark.parametrize("tokens", [-1, float("nan"), float("inf")])
def test_invalid_number_of_tokens_is_refused(tokens):
    with raises(Invalid):
        stepped(Rounds(RoundSchedule(2)), 1, tokens)


@pytest.mark.parametrize(("first", "second"), [(None, 3), (3, None)])
def test_tokens_of_some_steps_only_are_refused(first, second):
    rounds = Rounds(RoundSchedule(9))
    stepped(rounds, 1, first)
    with raises(Invalid):
        stepped(rounds, 1, second)


@pytest.mark.parametrize(("weighted", "tokens"), [(True, None), (False, 3)])
def test_resumed_script_decides_again_whether_to_report_tokens(weighted, tokens):
    rounds = Rounds(RoundSchedule(9))
    values = {"position": 4, "merged": [0], "pending": None, "weighted": weighted}
    rounds.take_shared(values)
    stepped(rounds, 1, tokens)
    assert rounds.weighted is not weighted


def follower(*, every=4, delay=0):
    """Return the rounds of an island of one worker, which is one of two islands with a quorum."""
    rounds = Rounds(RoundSchedule(every, delay=delay), quorum=True)
    assert followed(rounds.enter(WorldId(1), Islands(NAMES, 1))) == [TakePart(0, (0, 1))]
    return rounds


def followed(actions, decisions=(), absent=()):
    """Perform actions, with one answer for each `Follow`, and return them."""
    answers = iter(decisions)
    found: list[Any] = []
    answer: Any = None
    while True:
        try:
            action = actions.send(answer)
        except StopIteration:
            return found
        found.append(action)
        answer = None
        if isinstance(action, CompareReports):
            found.pop()
            answer = [action.report] * len(NAMES)
        elif isinstance(action, Follow):
            found.pop()
            answer = next(answers, Decisions(0, False))
        elif isinstance(action, AwaitMean):
            answer = absent


def step(rounds, *decisions, absent=(), tokens=None):
    return followed(rounds.step(WorldId(1), Islands(NAMES, 1), tokens), decisions, absent)


def test_slow_island_sends_its_change_once_another_has_sent():
    rounds = follower()
    assert step(rounds) == []
    assert step(rounds, Decisions(0, True)) == [
        StartMean(Sent(0, 4, 4), (0, 1), 1.0),
        AwaitMean(0),
        ApplyMean(0),
    ]
    assert (rounds.position, rounds.own_steps, rounds.merged) == (4, 2, [1])


def test_late_island_applies_missed_merges_and_keeps_its_tokens():
    rounds = follower()
    assert step(rounds, Decisions(2, False), Decisions(1, False), absent=["b"], tokens=3) == [
        AwaitMean(0),
        ApplyMean(0, missed=True),
        AwaitMean(0),
        ApplyMean(0, missed=True),
    ]
    assert (rounds.position, rounds.merged, rounds.tokens) == (8, [2], [3.0])
    assert rounds.absent == {0: ("b",), 1: ("b",)}
    start, *_ = step(rounds, Decisions(0, True), tokens=4)
    assert start == StartMean(Sent(0, 12, 12), (0, 1), 7.0)
    assert rounds.tokens == [0.0]


def test_missed_merge_with_a_delay_is_applied_at_its_step_or_before_the_next_merge():
    rounds = follower(delay=2)
    assert step(rounds, Decisions(1, False)) == []
    assert (rounds.position, rounds.pending) == (4, Sent(0, 4, 6))
    assert step(rounds, Decisions(1, False)) == []
    missed = [AwaitMean(0), ApplyMean(0, missed=True)]
    assert step(rounds, absent=["b"]) == missed
    assert step(rounds, Decisions(1, False)) == []
    start = StartMean(Sent(0, 12, 14), (0, 1), 1.0)
    assert step(rounds, Decisions(1, True), Decisions(0, True), absent=["b"]) == [*missed, start]


def test_member_whose_comparison_failed_subtracts_the_change_sent_by_its_leader():
    rounds = Rounds(RoundSchedule(1), quorum=True)
    actions = rounds.step(WorldId(1), Islands(("a", "b", "b"), 2), 5)
    assert isinstance(next(actions), CompareReports)
    report = json.dumps([1, [0], None, [1, 0], [], False])
    assert isinstance(actions.send([report] * 3), Follow)
    assert isinstance(actions.send(Decisions(0, False)), CompareIsland)
    rounds.interrupted()  # It completed on the leader.
    theirs = {"position": 1, "merged": [1], "pending": None, "weighted": True}
    assert rounds.take_shared(theirs | {"absent": [(0, ())]}) == {0: False}
    assert rounds.tokens == [0.0]


def test_island_subtracts_its_sent_change_after_a_merge_on_other_ranks_only():
    rounds = follower(every=1)
    actions = rounds.step(WorldId(1), Islands(NAMES, 1), 5)
    actions.send(None)
    assert isinstance(actions.send(Decisions(0, False)), StartMean)
    rounds.interrupted()
    theirs = {"position": 1, "merged": [1], "pending": None, "weighted": True}
    for absent, missed in (([(0, ("b",))], True), ([(0, ("a",))], False)):
        other = Rounds(RoundSchedule(1), quorum=True)
        other.take_shared(rounds.shared())
        other._sent_for, other._sent_tokens = rounds._sent_for, 5.0
        other.tokens = [5.0]
        assert other.take_shared(theirs | {"absent": absent}) == {0: missed}
        assert other.tokens == [5.0 if missed else 0.0]
