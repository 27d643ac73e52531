"""Which backward pass of a step is the last, decided from counts alone."""

from __future__ import annotations

import dataclasses

import pytest

from elastic.optimizer.gradients.step_progress import (
    PassEnd,
    PlanState,
    StepPhase,
    StepProgress,
    end_counts,
)


@dataclasses.dataclass
class Slot:
    passes_left: int


class Rank:
    """A rank with some parameters, which receive ``passes`` gradients each in a step."""

    def __init__(self, parameters: int, passes: int = 1) -> None:
        self.progress = StepProgress()
        self.passes = passes
        self.plan = PlanState.AGREED
        self.only_finish = False
        self.slots = [Slot(passes) for _ in range(parameters)]

    def backward(self, *parameters: int, inner: bool = False) -> PassEnd:
        """One backward pass with gradients of these parameters."""
        if self.progress.phase is StepPhase.IDLE:
            self.progress.begin()
        for number in parameters:
            self.progress.count(self.slots[number], self.passes)
        complete = self.progress.complete == len(self.slots)
        return self.progress.pass_ended(
            self.plan, inner=inner, complete=complete, only_finish=self.only_finish
        )

    def finish(self) -> None:
        self.progress.learn()
        self.progress.clear()
        for slot in self.slots:
            slot.passes_left = self.passes


def test_pass_is_the_last_when_no_gradient_is_missing():
    rank = Rank(parameters=2)
    assert rank.backward(0) is PassEnd.NOTHING
    assert rank.backward(1) is PassEnd.LAUNCH
    rank.progress.reduced()
    rank.finish()
    assert rank.progress.phase is StepPhase.IDLE and rank.progress.usual == 2


def test_last_pass_is_known_from_the_second_step_with_an_unused_parameter():
    rank = Rank(parameters=2)
    assert rank.backward(0) is PassEnd.NOTHING  # another loss may follow
    rank.finish()
    assert rank.backward(0) is PassEnd.LAUNCH
    end_counts(rank.slots)
    assert [slot.passes_left for slot in rank.slots] == [0, 0]


def test_step_with_fewer_passes_than_usual_is_reduced_in_finish():
    rank = Rank(parameters=3)
    rank.backward(0)
    rank.backward(1)
    rank.finish()
    assert rank.backward(0) is PassEnd.NOTHING
    rank.finish()
    assert rank.progress.usual == 2


def test_pass_with_partially_accumulated_parameters_is_not_the_last():
    rank = Rank(parameters=2, passes=2)
    rank.progress.usual = 1
    assert rank.backward(0, 1) is PassEnd.NOTHING and rank.progress.partial == 2
    assert rank.backward(0, 1) is PassEnd.LAUNCH and rank.progress.partial == 0


def test_inner_pass_counts_only_when_completing_the_step():
    rank = Rank(parameters=2)
    assert rank.backward(0, inner=True) is PassEnd.NOTHING and rank.progress.ended == 0
    assert rank.backward(1, inner=True) is PassEnd.LAUNCH
    assert rank.progress.ended == 1


@pytest.mark.parametrize(
    ("parameters", "end"), [([0], PassEnd.COMPARE), ([0, 1], PassEnd.COMPARE_LAST)]
)
def test_plans_are_compared_at_the_end_of_a_pass(parameters, end):
    rank = Rank(parameters=2)
    rank.plan = PlanState.UNCOMPARED
    assert rank.backward(*parameters) is end
    assert rank.progress.phase is StepPhase.RECEIVING


def test_pass_of_the_first_step_is_the_last_when_last_on_all_ranks():
    rank = Rank(parameters=2)
    rank.plan = PlanState.UNCOMPARED
    rank.backward(0, 1)
    rank.progress.compared(last=True)
    assert rank.progress.phase is StepPhase.COMPLETING


def test_disagreement_on_the_last_pass_defers_the_reduction_to_finish():
    rank = Rank(parameters=2)
    rank.plan = PlanState.UNCOMPARED
    rank.backward(0)
    rank.progress.compared(last=False)
    rank.plan = PlanState.AGREED
    assert rank.backward(1) is PassEnd.NOTHING and rank.progress.phase is StepPhase.LATE
    rank.finish()
    assert rank.progress.usual == 2
    assert rank.backward(0, 1) is PassEnd.LAUNCH


def test_optimizers_with_different_pass_orders_reduce_only_in_finish():
    rank = Rank(parameters=1)
    rank.only_finish = True
    assert rank.backward(0) is PassEnd.NOTHING


def test_a_changed_plan_is_replaced_at_the_usual_last_pass():
    rank = Rank(parameters=1)
    rank.backward(0)
    rank.finish()
    rank.plan = PlanState.CHANGED
    assert rank.backward(inner=True) is PassEnd.NOTHING
    assert rank.backward() is PassEnd.REPLACE_PLAN and rank.progress.phase is StepPhase.COMPLETING


def test_changed_plan_with_unknown_passes_defers_the_reduction_to_finish():
    rank = Rank(parameters=1)
    rank.plan = PlanState.CHANGED
    assert rank.backward() is PassEnd.NOTHING and rank.progress.phase is StepPhase.RECEIVING


def test_pass_after_the_reduction_has_no_effect():
    rank = Rank(parameters=1)
    rank.backward(0)
    rank.progress.reduced()
    assert rank.backward() is PassEnd.NOTHING and rank.progress.ended == 1
