"""Actions of a worker in an island, and the weight of the island. Losses are in tests/simulation."""

import json
from typing import Any

import pytest

from elastic.diloco.islands import Islands
from elastic.diloco.rounds import (
    ApplyMean,
    AwaitMean,
    CompareIsland,
    CompareReports,
    Rounds,
    ShareMean,
    StartMean,
    TakeInner,
)
from elastic.diloco.schedule import RoundSchedule, Sent
from elastic.errors import Invalid
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
    return performed(rounds.step(1, Islands(NAMES, rank), tokens), answers)


def test_leader_exchanges_the_mean_and_shares_it():
    sent = Sent(0, 1, 1)
    assert stepped(Rounds(RoundSchedule(1)), 0, None, {CompareIsland: [0.0, 0.0]}) == [
        CompareIsland(sent, 0.0),
        StartMean(sent, (0, 1), None),
        AwaitMean(0),
        ShareMean(0, 0),
        ApplyMean(0),
    ]


def test_other_member_receives_the_mean_from_the_leader():
    assert stepped(Rounds(RoundSchedule(1)), 2, None, {CompareIsland: [0.0, 0.0]}) == [
        CompareIsland(Sent(0, 1, 1), 0.0),
        ShareMean(0, 0),
        ApplyMean(0),
    ]


def test_worker_alone_in_its_island_neither_compares_nor_shares():
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
    reports = [json.dumps([20, [3], None, origin]) for origin in ([17, 0], [20, 0], [0, 3])]
    rounds = [Rounds(RoundSchedule(50)) for _ in NAMES]
    for each, own_steps in zip(rounds, (17, 20, 0), strict=True):
        each.take_own({"origin": (own_steps, 0), "tokens": [0.0]})
        each.take_shared({"position": 20, "merged": [3], "pending": None, "weighted": None})
    found = [
        performed(each.enter(1, Islands(NAMES, rank)), {CompareReports: reports})
        for rank, each in enumerate(rounds)
    ]
    assert found == [[TakeInner(0, kept=True)], [], [TakeInner(0, kept=False)]]
    assert [(each.own_steps, each.position) for each in rounds] == [(17, 20), (20, 20), (17, 20)]


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
