"""ZeroRedundancyOptimizer in real jobs: workers die at any place of a step, a commit or a recovery, others join."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.sharding import fsdp2
from harness.history import SCRIPTS
from harness.sharded_jobs import (
    AGAIN,
    APART,
    BACK,
    GONE,
    IMPORTS,
    PLACES,
    ends_without_two_shards,
    example_survives_a_kill,
    of_two_that_stayed,
    results,
    twenty,
    twice,
)

sys.path.append(str(SCRIPTS))
zero = pytest.importorskip("zero")

pytestmark = [
    pytest.mark.forked(*IMPORTS),
    pytest.mark.skipif(fsdp2.untested_version() is not None, reason="another version of torch"),
]
EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 10


def trained(
    job: Any, rules: str, flags: str = GONE, steps: int = STEPS, workers: int = 4, **env: Any
) -> list[dict[str, Any]]:
    """Return the final records of every worker."""
    training = job(
        f"-np {workers} --min-np 1 {flags}",
        ["python", SCRIPTS / "zero.py"],
        env={"STEPS": str(steps), "WORKERS": str(workers), "ELASTIC_FAILPOINTS": rules} | env,
    )
    training.succeed(250 + 4 * steps)  # of which each tenth may wait for a worker to start
    return results(training)


def check(found: list[dict[str, Any]], steps: int = STEPS, feature: str = "plain") -> None:
    """As one process that nothing happened to, with the objects that each worker began with."""
    assert len({each["digest"] for each in found}) == 1, "ranks have different parameters"
    for each in found:
        assert each["same"], "a parameter, the model or the optimizer was replaced"
        assert each["counted"] == steps, "a buffer is of another commit"
        assert len(each["sizes"]) == steps
        assert each["losses"] == pytest.approx(zero.alone(steps, feature), rel=1e-5)
    whole = found[0]["entries_of_all"]
    assert all(each["entries"] < whole for each in found if len(found) > 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ours", ["0", "1"])
def test_kill_in_backward_and_a_join_give_the_losses_of_one_process(job: Any, ours: str):
    rules = "backward kill slot=1 incarnation=1 step=5"
    found = trained(job, rules, BACK, 14, 3, FULL="10", OURS=ours)
    check(found, 14)
    if ours == "1":
        assert all(each["entries"] <= 1.2 / 3 * each["entries_of_all"] for each in found)
    assert len(found) == 3
    assert found[0]["sizes"][5] == 2
    assert found[0]["sizes"][10] == 3


@pytest.mark.nightly
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("place", PLACES)
def test_kill_of_any_rank_at_any_place_keeps_sharded_optimizer_training_correct(
    job: Any, place: str, rank: int
):
    found = trained(job, f"{place} kill rank={rank} step=5 size=4")
    check(found)
    assert len(found) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("place", [*PLACES, "optimizer-step", "zero-gather"])
def test_kill_at_any_place_when_each_rank_holds_elements_of_every_entry(
    job: Any, place: str, rank: int
):
    found = trained(job, f"{place} kill rank={rank} step=5 size=4", OURS="1")
    check(found)
    assert len(found) == 3


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("feature", zero.OF_OURS)
def test_features_of_a_distributed_optimizer_survive_a_kill_and_a_join(job: Any, feature: str):
    rules = "backward kill slot=1 incarnation=1 step=5"
    found = trained(job, rules, BACK, 14, FULL="10", FEATURE=feature, OURS="1")
    check(found, 14, feature)
    assert len(found) == 4


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["backward", "shard-copy", "shard-mirror", "shard-seal"])
def test_a_copy_on_another_host_survives_a_kill(job: Any, place: str):
    found = trained(job, f"{place} kill rank=2 step=5 size=4", **APART)
    check(found)
    assert len(found) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("place", AGAIN)
def test_second_kill_during_a_recovery(job: Any, place: str):
    """``state-copy`` only has a place where a worker has joined."""
    if place == "state-copy":
        rules = "backward kill slot=1 incarnation=1 step=5; state-copy kill slot=1 incarnation=2"
        found = trained(job, rules, BACK, 24, FULL="10")
        return check(found, 24)
    found = trained(job, twice(place), COPIES="2", **APART)
    check(found)
    assert len(found) == 2


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("feature", zero.FEATURES)
def test_optimizer_features_survive_a_kill_and_a_join(job: Any, feature: str):
    found = trained(
        job, "backward kill slot=1 incarnation=1 step=5", BACK, 14, FULL="10", FEATURE=feature
    )
    check(found, 14, feature)
    assert len(found) == 4


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("apart", [False, True])
def test_twenty_kills_and_joins(job: Any, apart: bool):
    rules, steps = twenty()
    found = trained(job, rules, BACK, steps, FULL="10", **(APART if apart else {}))
    check(found, steps)
    assert len(found) == 4


@pytest.mark.nightly
def test_zero_example_continues_after_a_kill(job: Any):
    example_survives_a_kill(job, EXAMPLES / "zero_elastic.py")


@pytest.mark.nightly
def test_entries_that_no_worker_holds_end_the_job(job: Any, tmp_path: Path):
    ends_without_two_shards(job, "zero.py", tmp_path)


@pytest.mark.nightly
def test_workers_that_leave_together_take_no_entry_along(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = of_two_that_stayed(job, "zero.py", tmp_path, monkeypatch, 300)
    check(found, 300)
    assert len(found) == 2
