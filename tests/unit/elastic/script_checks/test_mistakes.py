"""Mistakes that follow from the observations of the first steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.script_checks.mistakes import (
    CommitCall,
    Kind,
    Mistake,
    RestartingLoop,
    ScriptObservation,
    Trained,
    UsedLoader,
    UsedPart,
    found,
    unreported,
)

SGD = Trained("SGD", in_state=True, parameters=4, uncovered=0, smallest=10)
RIGHT = ScriptObservation(
    steps=20,
    world_size=2,
    commits=20,
    calls=(CommitCall.EACH_STEP,),
    restarts=None,
    recovered=False,
    collectives=20,
    largest_moved=100,
    keeps_members=True,
    optimizers=(SGD,),
    schedulers=(UsedPart("StepLR", in_state=True),),
    scalers=(UsedPart("GradScaler", in_state=True),),
    averages=(UsedPart("AveragedModel", in_state=True),),
    loaders=(UsedLoader("DataLoader", in_state=True, keeps_position=True),),
)


def kinds(**changes: object) -> list[Kind]:
    return [each.kind for each in found(replace(RIGHT, **changes))]  # type: ignore[arg-type]


def test_correct_script_is_not_reported():
    assert found(RIGHT) == []


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"commits": 0, "calls": ()}, Kind.NO_COMMIT),
        ({"commits": 0, "calls": (CommitCall.EACH_STEP,)}, Kind.NO_COMMIT),
        ({"commits": 0, "calls": (CommitCall.SOME_STEPS,), "recovered": True}, Kind.NO_COMMIT),
        ({"calls": (CommitCall.SOME_RANKS,)}, Kind.COMMIT_ON_SOME_RANKS),
        ({"calls": (CommitCall.SOME_RANKS,), "commits": 0}, Kind.COMMIT_ON_SOME_RANKS),
        ({"restarts": RestartingLoop("for epoch in range(10)", "train")}, Kind.LOOP_RESTARTS),
        ({"collectives": 0}, Kind.NEVER_REDUCED),
        ({"collectives": 1}, Kind.NEVER_REDUCED),
        ({"largest_moved": 0}, Kind.NEVER_REDUCED),
        ({"largest_moved": 1}, Kind.ONLY_LOSS_REDUCED),
        ({"largest_moved": 9}, Kind.ONLY_LOSS_REDUCED),
        ({"optimizers": (replace(SGD, uncovered=4),)}, Kind.MODEL_NOT_IN_STATE),
        ({"optimizers": (SGD, replace(SGD, uncovered=1))}, Kind.MODEL_NOT_IN_STATE),
        ({"optimizers": (SGD, replace(SGD, in_state=False))}, Kind.OPTIMIZER_NOT_IN_STATE),
        ({"schedulers": (UsedPart("StepLR", False),)}, Kind.SCHEDULER_NOT_IN_STATE),
        ({"scalers": (UsedPart("GradScaler", False),)}, Kind.SCALER_NOT_IN_STATE),
        ({"averages": (UsedPart("AveragedModel", False),)}, Kind.AVERAGE_NOT_IN_STATE),
        ({"loaders": (UsedLoader("DataLoader", False, True),)}, Kind.LOADER_NOT_IN_STATE),
        ({"loaders": (UsedLoader("DataLoader", False, False),)}, Kind.LOADER_WITHOUT_POSITION),
        ({"loaders": (UsedLoader("DataLoader", False, True, "Mine", "rank=1"),)}, Kind.RANK_KEPT),
    ],
)
def test_each_mistake_is_reported_without_further_mistakes(changes, kind):
    assert kinds(**changes) == [kind]


@pytest.mark.parametrize(
    "changes",
    [
        {"commits": 0, "calls": (CommitCall.SOME_STEPS,)},  # once per epoch
        {"commits": 1, "recovered": True},
        {"calls": (CommitCall.SOME_RANKS, CommitCall.SOME_STEPS)},
        {"world_size": 1, "collectives": 0},
        {"world_size": 1, "largest_moved": 0},
        {"largest_moved": 10},
        {"largest_moved": None},
        {"largest_moved": 1, "optimizers": (replace(SGD, smallest=0),)},
        {"optimizers": (), "collectives": 0},
    ],
)
def test_ambiguous_observations_are_no_mistakes(changes):
    assert kinds(**changes) == []


def test_members_saved_by_the_script_are_not_reported():
    outside = {"optimizers": (replace(SGD, uncovered=4, in_state=False),)}
    assert kinds(**outside) == [Kind.MODEL_NOT_IN_STATE, Kind.OPTIMIZER_NOT_IN_STATE]
    assert kinds(**outside, keeps_members=False) == []


@pytest.mark.parametrize("first", [Kind.NEVER_REDUCED, Kind.ONLY_LOSS_REDUCED])
@pytest.mark.parametrize("second", [Kind.NEVER_REDUCED, Kind.ONLY_LOSS_REDUCED])
def test_a_plain_optimizer_is_reported_once(first, second):
    made = [Mistake(second), Mistake(Kind.NO_COMMIT)]
    assert [each.kind for each in unreported(made, {first})] == [Kind.NO_COMMIT]
    assert unreported(made, set()) == made


@pytest.mark.parametrize("kind", Kind)
def test_sentence_of_every_kind_contains_its_anchor(kind):
    facts = dict.fromkeys(
        [
            *("steps", "workers", "optimizer", "which", "example", "name", "loader", "sampler"),
            *("kept", "largest", "member", "remedy", "loop", "function"),
        ],
        "x",
    )
    assert f"#{kind.value})" in Mistake(kind, tuple(facts.items())).sentence
