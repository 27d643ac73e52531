"""Workers whose gradients are wrong: found by another worker, outvoted, and replaced; the weights stay the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from elastic.driver.reasons import ReasonKind
from elastic.exact import shard_assignment, verification_rules
from harness.history import RETURN
from integration.jobs.test_exact import differences, drawn, reference, train

pytestmark = pytest.mark.forked

__all__ = ["reference"]  # a fixture
SHARDS, SEED, WORKERS = 8, 5, 4
TRAINING = 2  # first generation that trains


def checked_steps(rank: int, share: float, after: int = 2, steps: int = 40) -> list[int]:
    """Return the steps of the first world after ``after`` in which a shard of the rank is checked."""
    held = shard_assignment.assign(SHARDS, WORKERS)
    return [
        step
        for step in range(after, steps)
        for check in verification_rules.checks(held, share, SEED, TRAINING, step)
        if check.owner == rank
    ]


def flip(rank: int, first: int, last: int, seed: int = 4711) -> str:
    """Flip a bit of each gradient that the rank computes in these steps of the first world."""
    steps = ",".join(map(str, range(first, last + 1)))
    where = f"rank={rank} generation={TRAINING} step={steps}"
    return f"shard-gradient flip=gradient:{seed} {where} every=1"


def fenced(training: Any) -> list[tuple[list[Any], dict[str, Any]]]:
    """Return the workers that were outvoted, and the evidence against each."""
    kills = training.actions("KillWorker")
    return [
        (each["worker"], each["reason"]["facts"])
        for each in kills
        if each["reason"]["kind"] == "miscomputed"
    ]


@pytest.mark.parametrize(
    ("last", "native"), [(30, "1"), pytest.param(0, "0", marks=pytest.mark.nightly)]
)
def test_worker_with_wrong_gradients_is_fenced_and_quarantined_and_no_bit_of_them_remains(
    job, reference, tmp_path, last, native
):
    """Wrong from a checked step on, or in that step only."""
    rank, share = 2, 1 / 4
    first = checked_steps(rank, share)[0]
    training = train(
        job,
        f"-np {WORKERS} --min-np 1 --keep-faulty {tmp_path / 'faulty'} {RETURN}",
        VERIFY=str(share),
        ELASTIC_NATIVE=native,
        ELASTIC_FAILPOINTS=flip(rank, first, last or first),
    )
    training.succeed(timeout=120)
    wanted, final = reference()
    assert differences(training, wanted) == []
    assert (training.folder / "final.json").read_text() == final
    ((worker, facts),) = fenced(training)
    assert worker == ["localhost", rank, 1] and facts["step"] == first
    assert facts["digest"] != facts["right"] and len(facts["witnesses"].split(", ")) == 3
    (broke,) = training.actions("BreakWorld")
    assert broke["reason"]["facts"]["killed_for"]["kind"] == "miscomputed"
    saved = [torch.load(each, weights_only=True) for each in (tmp_path / "faulty").iterdir()]
    assert {each["evidence"]["digest"] for each in saved} == {facts["digest"]}
    assert sorted(each["right"] for each in saved) == [False, True]
    later = [m["worker"] for world in training.worlds()[2:] for m in world["members"]]
    assert later and all(each[1] != rank for each in later), "its slot is quarantined"


def lasting(training: Any) -> dict[int, dict[str, int]]:
    """Return the tensors of each step's last commit: earlier ones may have been made with wrong gradients."""
    found: dict[int, tuple[int, dict[str, int]]] = {}
    for event in training.events("WorkerDigested"):
        if event.get("tensors") and event["step"]:
            generation = event["generation"]
            if generation >= found.get(event["step"], (0, {}))[0]:
                found[event["step"]] = generation, event["tensors"]
    return {step: tensors for step, (_, tensors) in sorted(found.items())}


@pytest.mark.parametrize("durable", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_steps_between_a_wrong_gradient_and_its_check_are_repeated_without_the_worker(
    job, reference, durable
):
    """Its gradients are in the weights of several commits."""
    rank, share = 2, 1 / 8
    first = next(
        step
        for step in range(3, 40)
        if not any(step <= checked <= step + 2 for checked in checked_steps(rank, share, step))
    )
    found_in = checked_steps(rank, share, first)[0]
    steps = found_in + 6
    training = train(
        job,
        f"-np {WORKERS} --min-np 1 {RETURN}"
        + (" --checkpoint-dir checkpoints --checkpoint-every 1commits" if durable else ""),
        VERIFY=str(share),
        STEPS=str(steps),
        ELASTIC_FAILPOINTS=flip(rank, first, steps),
    )
    training.succeed(timeout=120)
    wanted, final = reference(steps)
    assert (training.folder / "final.json").read_text() == final
    kept = lasting(training)
    assert [*kept] == [*range(1, steps + 1)]
    assert all(tensors == wanted[step] for step, tensors in kept.items())
    assert any(
        event["tensors"] != wanted[event["step"]]
        for event in training.events("WorkerDigested")
        if event.get("tensors") and event["step"]
    )
    ((worker, facts),) = fenced(training)
    assert worker == ["localhost", rank, 1] and first < facts["step"] <= found_in
    backs = [each["about"] for each in training.actions("Report") if each.get("about")]
    (back,) = [each["facts"] for each in backs if each["kind"] == ReasonKind.WENT_BACK.value]
    assert back["step"] <= first and back["whole"]


@pytest.mark.parametrize("seed", [1])
def test_commits_of_verified_shards_are_unchanged_when_workers_are_killed(job, reference, seed):
    step = checked_steps(1, 1 / 2, after=3)[0]
    # The killed worker returns before the next one is killed, so that one is always left.
    events = f"{drawn(seed, 12, 2, 3)} {step}:kill:1:second {step + 1}:hold:2"
    training = train(job, f"-np 3 --min-np 1 {RETURN}", events, VERIFY="0.5")
    training.succeed(timeout=120)
    wanted, final = reference()
    assert differences(training, wanted) == [], events
    assert (training.folder / "final.json").read_text() == final
    assert not fenced(training)


def test_two_workers_that_always_differ_end_the_job_with_gradients_differ(job):
    steps = ",".join(map(str, range(3, 30)))
    training = train(
        job,
        f"-np 2 --min-np 1 {RETURN}",
        VERIFY="1",
        ELASTIC_FAILPOINTS=f"shard-gradient flip=gradient:7 rank=1 step={steps} every=1",
    )
    assert training.wait(90) == 1
    raised = training.events("WorkerRaised")
    assert len(raised) >= 2 and {each["summary"] for each in raised} == {raised[0]["summary"]}
    assert raised[0]["summary"].startswith("GradientsDiffer")
    assert not fenced(training)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10))
def test_drawn_injections_are_found_in_time_and_no_correct_worker_is_named(job, reference, seed):
    """verify=1/16: from any step on, each gradient or only some are wrong."""
    dice = random.Random(seed)
    share, rank = 1 / 16, dice.randrange(WORKERS)
    first = dice.randrange(2, 12)
    held = shard_assignment.assign(SHARDS, WORKERS)
    found_by = next(s for s in checked_steps(rank, share, first, 80))
    steps = found_by + 4
    assert found_by - first <= verification_rules.steps_between(held, share)
    training = train(
        job,
        f"-np {WORKERS} --min-np 1 {RETURN}",
        VERIFY=str(share),
        STEPS=str(steps),
        ELASTIC_FAILPOINTS=flip(rank, first, steps, dice.randrange(1 << 20)),
    )
    training.succeed(timeout=200)
    ((worker, facts),) = fenced(training)
    assert worker == ["localhost", rank, 1]
    assert first <= facts["step"] <= found_by and facts["agreed"] < first
    if facts["step"] == first:
        wanted, _ = reference(steps)
        assert differences(training, wanted) == []
