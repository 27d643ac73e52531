"""What ranks tell each other about their plans, without tensors: marks, comparisons, numbers."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest

from elastic.collectives.interface import Op
from elastic.errors import StateMismatch
from elastic.optimizer.gradients import plan_agreement
from elastic.optimizer.gradients.plan_agreement import (
    BucketSpec,
    ComparisonPoint,
    PlanProposal,
    Plans,
    Sparse,
    StepFlag,
    StepPlan,
)
from harness.golden import raises

FOLDS: dict[Op, Any] = {Op.SUM: sum, Op.MAX: max, Op.MIN: min, Op.PRODUCT: math.prod}


class Optimizer:
    """Anything that can own a plan."""

    def __init__(self) -> None:
        self.replaced = 0

    def plan_replaced(self) -> None:
        self.replaced += 1


def layout(digest: int) -> StepPlan:
    return StepPlan(
        digest, (1,), int(Op.SUM), 0.5, 1, (0,), (BucketSpec(17, "float32", "cpu"),), ()
    )


def proposed(**fields: int) -> PlanProposal:
    usual = {"digest": 7, "parameters": 3, "replaces": -1, "anew": 0, "trains": 5, "sparse": 0}
    return PlanProposal(**{**usual, "rank": 0, **fields})


def reduced(*vectors: list[int]) -> plan_agreement.PlanVerdict:
    return plan_agreement.verdict([max(column) for column in zip(*vectors, strict=True)])


def compared(*proposals: PlanProposal | None) -> plan_agreement.PlanVerdict:
    """The verdict on these ranks' proposals; None: the rank has joined."""
    return reduced(*(plan_agreement.vector(each, Plans().taken()) for each in proposals))


# ---- marks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", FOLDS)
@pytest.mark.parametrize("joined", [0, 1, 5])
@pytest.mark.parametrize("mark", [StepFlag.STEP, StepFlag.CHANGE])
def test_flag_of_ranks_with_data_is_read_among_any_number_of_joined_ranks(op, joined, mark):
    for others in (1, 2, 30):
        sent = [plan_agreement.mark_value(op, StepFlag.JOINED)] * joined + [
            plan_agreement.mark_value(op, mark)
        ] * others
        assert plan_agreement.read_mark(op, FOLDS[op](sent)) is mark


@pytest.mark.parametrize("op", FOLDS)
def test_flag_of_all_joined_ranks_is_read_as_joined(op):
    sent = [plan_agreement.mark_value(op, StepFlag.JOINED)] * 7
    assert plan_agreement.read_mark(op, FOLDS[op](sent)) is StepFlag.JOINED


def test_flag_is_readable_after_the_scaling_of_an_average():
    for size in (2, 1000):
        for mark in (StepFlag.STEP, StepFlag.CHANGE):
            one = plan_agreement.mark_value(Op.SUM, mark) / size
            assert plan_agreement.read_mark(Op.SUM, one) is mark


def test_flag_is_readable_after_an_overflow():
    assert plan_agreement.read_mark(Op.SUM, math.inf) is StepFlag.STEP
    assert plan_agreement.read_mark(Op.SUM, -math.inf) is StepFlag.CHANGE
    assert plan_agreement.read_mark(Op.PRODUCT, math.inf) is StepFlag.STEP
    assert plan_agreement.read_mark(Op.PRODUCT, math.inf * 0.0) is StepFlag.CHANGE


@pytest.mark.parametrize("op", FOLDS)
def test_single_change_flag_is_read_among_any_number_of_steps(op):
    for others in (1, 2, 30, 300):
        sent = [
            plan_agreement.mark_value(op, mark)
            for mark in (StepFlag.CHANGE, *[StepFlag.STEP] * others)
        ]
        assert plan_agreement.read_mark(op, FOLDS[op](sent)) is StepFlag.CHANGE


# ---- comparing -----------------------------------------------------------------------------------


def test_joined_ranks_are_excluded_from_the_comparison_of_plans():
    verdict = compared(None, proposed(rank=1, sparse=1), proposed(rank=2, sparse=2))
    assert verdict.equal and verdict.alike and verdict.greatest.compared == proposed().compared
    assert verdict.joined and verdict.source == 1 and verdict.greatest.sparse == 2
    assert len(plan_agreement.vector(proposed(), Plans().taken())) == plan_agreement.VECTOR


@pytest.mark.parametrize("field", ["digest", "parameters", "replaces", "anew"])
def test_difference_of_plans_is_found_with_its_bounds(field):
    own = proposed()
    verdict = compared(own, own._replace(**{field: getattr(own, field) + 1}, rank=1))
    assert not verdict.equal and verdict.alike and not verdict.joined
    assert getattr(verdict.least, field) + 1 == getattr(verdict.greatest, field)


def test_different_numbers_of_trained_parameters_do_not_make_plans_unequal():
    verdict = compared(proposed(trains=5), proposed(trains=6, rank=1))
    assert verdict.equal and not verdict.alike and not verdict.same_order


def test_order_known_to_all_ranks_is_not_sent():
    first, same, other = (
        proposed(rank=rank + 1, order=plan_agreement.order_digest(order))
        for rank, order in enumerate([(2, 1, 0), (2, 1, 0), (0, 1, 2)])
    )
    assert compared(None, first, same).same_order
    verdict = compared(None, first, same, other)
    assert not verdict.same_order and verdict.equal  # it is told, and nothing is wrong


@pytest.mark.parametrize(
    ("points", "last"),
    [
        ((ComparisonPoint.LAST_PASS, ComparisonPoint.LAST_PASS), True),
        ((ComparisonPoint.LAST_PASS, ComparisonPoint.PASS), False),
        ((ComparisonPoint.LAST_PASS, ComparisonPoint.STEP), False),
    ],
)
def test_pass_is_the_last_when_last_on_all_ranks_with_data(points, last):
    ranks = [proposed(rank=rank, point=point) for rank, point in enumerate(points)]
    assert compared(*ranks, None).last is last


def test_different_optimizers_in_backward_are_compared_again_in_step():
    passing = [proposed(rank=rank, digest=rank, point=ComparisonPoint.LAST_PASS) for rank in (0, 1)]
    assert compared(*passing).again
    stepping = [each._replace(point=ComparisonPoint.STEP) for each in passing]
    assert compared(stepping[0], passing[1]).again and not compared(*stepping).again


def test_optimizers_with_equal_parameters_are_distinguished_by_order_of_creation():
    ranks = [
        proposed(rank=rank, twin=rank, twins=2, point=ComparisonPoint.LAST_PASS) for rank in (0, 1)
    ]
    assert compared(*ranks).equal and compared(*ranks).again
    assert not compared(*(each._replace(twins=1) for each in ranks)).again


def test_comparison_without_proposals_has_no_source():
    verdict = compared(None, None, None)
    assert verdict.source is None and not verdict.again


def test_step_plan_survives_encoding():
    sent = StepPlan(
        1 << 61,
        (1, 0, 1),
        int(Op.SUM),
        1.0,
        3,
        (2, 0, 1),
        (BucketSpec(3, "bfloat16", "cuda"), BucketSpec(1, "float32", "cpu")),
        (Sparse(4, (50, 8), 1, "float32", "cpu"),),
    )
    assert StepPlan.decode(sent.encode()) == sent


# ---- numbers -------------------------------------------------------------------------------------


def agree(
    known: Plans, digest: int, owner: Optimizer, others_taken: list[int] | None = None
) -> int:
    before = known.find(owner)
    own = proposed(digest=digest, replaces=-1 if before is None else before.number)
    vectors = [plan_agreement.vector(own, known.taken())]
    if others_taken is not None:
        vectors.append(plan_agreement.vector(own._replace(rank=1), others_taken))
    number = known.number(reduced(*vectors))
    known.record(number, layout(digest), owner)
    return number


def test_each_optimizer_has_its_own_agreement_group():
    known, one, two = Plans(), Optimizer(), Optimizer()
    channels = [known.channel]
    assert agree(known, 1, one) == 0
    channels.append(known.channel)
    assert agree(known, 2, two) == 1
    assert channels == ["gradients", plan_agreement.CHANNEL] and known.channel_open
    assert [each.purpose for each in known.agreed] == ["gradients", "gradients 2"]


def test_a_plan_that_changes_keeps_its_number():
    known, one, two = Plans(), Optimizer(), Optimizer()
    agree(known, 1, one)
    agree(known, 2, two)
    assert agree(known, 3, one) == 0
    assert [each.layout.digest for each in known.agreed] == [3, 2]


def test_plan_number_is_reused_once_its_optimizer_is_gone_on_all_ranks():
    known, keep = Plans(), Optimizer()
    agree(known, 1, keep)
    gone = Optimizer()
    agree(known, 2, gone)
    del gone
    gc.collect()
    elsewhere = [1, 1] + [0] * (plan_agreement.MAX_PLANS - 2)  # another rank still holds it
    third = Optimizer()
    assert agree(known, 3, third, elsewhere) == 2
    assert agree(known, 4, fourth := Optimizer()) == 1
    assert fourth is not None


# ---- what happened while this rank had joined ----------------------------------------------------


def test_optimizer_adopts_a_plan_agreed_without_its_rank():
    known, own = Plans(), Optimizer()
    known.record(0, layout(5), None)
    assert known.taken()[0] == 1  # its owner may come yet
    agreed = known.adopt(own, 5, -1)
    assert agreed is known.agreed[0]
    assert known.adopt(own, 6, agreed.version) is None  # its own change has to be agreed
    assert known.adopt(Optimizer(), 5, -1) is None  # it has one


def test_optimizer_whose_plan_was_replaced_must_have_changed_equally():
    known, own = Plans(), Optimizer()
    agree(known, 5, own)
    known.record(0, layout(6), None)
    assert own.replaced == 1
    with raises(StateMismatch):
        known.adopt(own, 5, 0)
    agreed = known.adopt(own, 6, 0)
    assert agreed is known.agreed[0] and agreed.version == 1


def test_new_generation_has_no_agreed_plans():
    class Runtime:
        generation = 1

    runtime = Runtime()
    first = plan_agreement.of(runtime, None)
    first.record(0, layout(1), None)
    assert plan_agreement.of(runtime, None) is first
    assert plan_agreement.of(runtime, (0, 1)) is not first
    runtime.generation = 2
    assert plan_agreement.of(runtime, None).agreed == []
