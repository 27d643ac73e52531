"""ZeroRedundancyOptimizer in real jobs: workers die at any place of a step, a commit or a recovery, others join."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic.driver.reasons import Why
from harness.history import SCRIPTS

sys.path.append(str(SCRIPTS))
zero = pytest.importorskip("zero")

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 10
GONE = "--blacklist-cooldown-range 100 100"  # a killed worker does not return
BACK = "--blacklist-cooldown-range 0.01 0.02 --slot-attempts 50"
APART: dict[str, Any] = {
    "ELASTIC_NATIVE": "0"
}  # no memory of a worker outlives it, as on different hosts
PLACES = (
    "forward", "backward", "optimizer", "commit", "snapshot", "shard-copy", "shard-mirror", "shard-seal",
)  # fmt: skip


def trained(
    job: Any, rules: str, flags: str = GONE, steps: int = STEPS, workers: int = 4, **env: Any
) -> list[dict[str, Any]]:
    """What every worker found at the end."""
    training = job(
        f"-np {workers} --min-np 1 {flags}",
        ["python", SCRIPTS / "zero.py"],
        env={"STEPS": str(steps), "WORKERS": str(workers), "ELASTIC_FAILPOINTS": rules} | env,
    )
    training.succeed(250 + 4 * steps)  # of which each tenth may wait for a worker to start
    return [json.loads(file.read_text()) for file in sorted(training.folder.glob("out/*.json"))]


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
def test_a_kill_in_backward_and_a_join_leave_the_losses_of_one_process(job: Any, ours: str):
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
def test_a_kill_of_any_rank_at_any_place(job: Any, place: str, rank: int):
    found = trained(job, f"{place} kill rank={rank} step=5 size=4")
    check(found)
    assert len(found) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("place", [*PLACES, "optimizer-step", "zero-gather"])
def test_a_kill_where_each_rank_has_elements_of_every_entry(job: Any, place: str, rank: int):
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
@pytest.mark.parametrize("place", ["rendezvous", "state-copy", "shard-moved", "shard-placed"])
def test_a_second_kill_while_the_others_recover(job: Any, place: str):
    """``state-copy`` only has a place where a worker has joined."""
    if place == "state-copy":
        rules = "backward kill slot=1 incarnation=1 step=5; state-copy kill slot=1 incarnation=2"
        found = trained(job, rules, BACK, 24, FULL="10")
        return check(found, 24)
    generation = " generation=2" if place == "rendezvous" else ""
    rules = f"backward kill slot=1 step=5; {place} kill slot=3 size={4 if generation else 3}{generation} step=5"
    found = trained(job, rules, COPIES="2", **APART)
    check(found)
    assert len(found) == 2


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("feature", zero.FEATURES)
def test_features_survive_a_kill_and_a_join(job: Any, feature: str):
    found = trained(
        job, "backward kill slot=1 incarnation=1 step=5", BACK, 14, FULL="10", FEATURE=feature
    )
    check(found, 14, feature)
    assert len(found) == 4


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("apart", [False, True])
def test_twenty_kills_and_joins(job: Any, apart: bool):
    places = [*PLACES, "backward", "shard-mirror"] * 2
    rules = [
        f"{place} kill slot={kill % 4} incarnation={kill // 4 + 1} step={10 * kill + 5}"
        for kill, place in enumerate(places)
    ]
    steps = 10 * len(places) + 5
    found = trained(job, "; ".join(rules), BACK, steps, FULL="10", **(APART if apart else {}))
    check(found, steps)
    assert len(found) == 4


@pytest.mark.nightly
def test_the_example_goes_on_after_a_kill(job: Any):
    training = job("-np 3 --min-np 2", ["python", EXAMPLES / "zero_elastic.py"])
    training.until(lambda: "step 50" in training.output, "step 50", 100)
    training.kill(0)
    assert "step 200" in training.succeed(200)


@pytest.mark.nightly
def test_entries_that_no_worker_holds_end_the_job(job: Any, tmp_path: Path):
    rules = tmp_path / "rules"
    rules.write_text("backward kill slot=1,2 step=5 victims=2")
    training = job(
        f"-np 4 --min-np 2 {GONE}",
        ["python", SCRIPTS / "zero.py"],
        env=APART | {"STEPS": "10", "ELASTIC_FAILPOINTS": f"@{rules}"},
    )
    assert training.wait(120) != 0
    (end,) = training.actions("EndJob")
    assert end["reason"]["kind"] == Why.SHARDS_LOST.value


@pytest.mark.nightly
def test_workers_that_leave_together_take_no_entry_along(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # in which no other job is found
    training = job(
        "-np 4 --min-np 1",
        ["python", SCRIPTS / "zero.py"],
        env={"STEPS": "300", "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    training.until(lambda: len(training.worlds()) >= 2, "a world of elastic.run", 90)
    elastic.Job().scale(2)
    training.wait_for_world(2, 60)
    training.succeed(250)
    found = [json.loads(file.read_text()) for file in training.folder.glob("out/*.json")]
    check(found, 300)
    assert len(found) == 2
