"""Fully sharded models in real jobs: workers die at any place of a step, a commit and a recovery, and others join.

Some tests also train with ZeroRedundancyOptimizer, of which `test_zero` has the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.driver.reasons import ReasonKind
from elastic.sharding import fsdp2
from harness.sharded_jobs import (
    AGAIN,
    APART,
    BACK,
    GONE,
    IMPORTS,
    PLACES,
    ShardedScript,
    at_once,
    ends_without_two_shards,
    example_ends_alike,
    example_survives_a_kill,
    of_two_that_stayed,
    sharded_script,
    twenty,
    twice,
)

FSDP = sharded_script("fsdp", least=2)
ZERO = sharded_script("zero", least=1)

pytestmark = [
    pytest.mark.forked(*IMPORTS),
    pytest.mark.skipif(fsdp2.untested_version() is not None, reason="another version of torch"),
]
EXAMPLES = Path(__file__).parents[3] / "examples"
of_each_script = pytest.mark.parametrize("script", [FSDP, ZERO], ids=lambda it: it.module.__name__)


@pytest.mark.timeout(300)
def test_kills_of_rank_0_and_another_worker_with_joins(job: Any):
    rules = (
        "backward kill slot=0 incarnation=1 step=5; shard-mirror kill slot=2 incarnation=1 step=15"
    )
    found = FSDP.trained(job, rules, BACK, 24, FULL="10")
    FSDP.check(found, 24)
    assert len(found) == 4
    assert found[0]["sizes"][5] == found[0]["sizes"][15] == 3
    assert found[0]["sizes"][20] == 4


@pytest.mark.timeout(300)
def test_replicas_become_shards_after_a_kill_and_replicas_again_after_a_join(job: Any):
    rules = "backward kill slot=1 incarnation=1 step=5"
    found = FSDP.trained(
        job, rules, BACK, 14, FULL="10", FEATURE="hybrid_mesh", ELASTIC_DIGESTS="1"
    )
    FSDP.check(found, 14)
    assert len(found) == 4
    assert [found[0]["meshes"][step] for step in (4, 5, 12)] == [[2, 2], [1, 3], [2, 2]]


@pytest.mark.nightly
@pytest.mark.parametrize("differs", [{"COPIES": "1,2"}, {"LEAST": "1,2"}])
def test_options_that_differ_between_ranks_end_the_job(job: Any, differs: dict[str, str]):
    env = {"STEPS": "5"} | differs
    training = job("-np 2 --min-np 2", ["python", FSDP.path], env=env)
    assert training.wait(120) == 1
    (end,) = training.actions("EndJob")
    assert end["reason"]["kind"] == ReasonKind.LAYOUTS_DIFFER.value


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_example_with_six_kills_and_joins_ends_with_the_loss_of_an_undisturbed_run(job: Any):
    example_ends_alike(job, EXAMPLES / "fsdp_elastic.py", steps=1500, kills=6)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["backward", "shard-copy", "shard-seal"])
def test_all_workers_of_one_host_but_one_can_be_lost_at_once(job: Any, place: str, tmp_path: Path):
    rule = at_once(tmp_path, f"{place} kill slot=0,1,2 step=5 victims=3")
    found = FSDP.trained(job, rule, f"{GONE} --min-np 1")
    FSDP.check(found)
    assert len(found) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("slots", ["0,1", "1,2", "1,3"])
def test_two_copies_survive_the_loss_of_any_two_at_once(job: Any, slots: str, tmp_path: Path):
    rule = at_once(tmp_path, f"backward kill slot={slots} step=5 victims=2")
    found = FSDP.trained(job, rule, COPIES="2", **APART)
    FSDP.check(found)
    assert len(found) == 2


# ---- each kind of sharding -----------------------------------------------------------------------


@pytest.mark.nightly
@of_each_script
def test_shards_that_no_worker_holds_end_the_job(job: Any, script: ShardedScript, tmp_path: Path):
    ends_without_two_shards(job, script, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["fsdp_elastic.py", "zero_elastic.py"])
def test_example_continues_after_a_kill(job: Any, example: str):
    example_survives_a_kill(job, EXAMPLES / example)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("place", PLACES)
@of_each_script
def test_sharded_training_survives_a_kill_of_any_rank_at_any_place(
    job: Any, script: ShardedScript, place: str, rank: int
):
    found = script.trained(job, f"{place} kill rank={rank} step=5 size=4")
    script.check(found)
    assert len(found) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("place", AGAIN)
@of_each_script
def test_second_kill_during_a_recovery(job: Any, script: ShardedScript, place: str):
    """``state-copy`` is only reached if a worker has joined."""
    if place == "state-copy":
        rules = "backward kill slot=1 incarnation=1 step=5; state-copy kill slot=1 incarnation=2"
        found = script.trained(job, rules, BACK, 24, FULL="10")
        return script.check(found, 24)
    found = script.trained(job, twice(place), COPIES="2", **APART)
    script.check(found)
    assert len(found) == 2


@pytest.mark.nightly
@of_each_script
def test_workers_that_leave_together_take_no_shard_along(
    job: Any, script: ShardedScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = of_two_that_stayed(job, script, tmp_path, monkeypatch, 300)
    script.check(found, 300)
    assert len(found) == 2


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("apart", [False, True])
@of_each_script
def test_twenty_kills_and_joins(job: Any, script: ShardedScript, apart: bool):
    rules, steps = twenty()
    found = script.trained(job, rules, BACK, steps, FULL="10", **(APART if apart else {}))
    script.check(found, steps)
    assert len(found) == 4


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "feature"),
    [(script, each) for script in (FSDP, ZERO) for each in script.module.FEATURES],
    ids=lambda it: it.module.__name__ if isinstance(it, ShardedScript) else it,
)
def test_features_continue_after_a_kill_and_a_join(job: Any, script: ShardedScript, feature: str):
    place = "optimizer" if feature == "compiled" else "backward"  # which has no hooks of ours
    rules = f"{place} kill slot=1 incarnation=1 step=5"
    found = script.trained(job, rules, BACK, 14, FULL="10", FEATURE=feature)
    script.check(found, 14, feature)
    assert len(found) == 4


# ---- replicas ------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_replicated_shards_survive_a_kill_at_any_place_and_a_join(
    job: Any, place: str, apart: bool
):
    rules = f"{place} kill slot=1 incarnation=1 step=5; {place} kill slot=0 incarnation=1 step=15"
    env = {"LEAST": "2", "ELASTIC_DIGESTS": "1"} | (APART if apart else {})
    found = FSDP.trained(job, rules, BACK, 24, FULL="10", **env)
    FSDP.check(found, 24)
    assert len(found) == 4
    assert {*map(tuple, found[0]["meshes"])} == {(2, 2), (1, 3)}


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("place", ["rendezvous", "shard-moved", "shard-placed"])
def test_second_kill_during_a_recovery_with_replicas(job: Any, place: str):
    generation = " generation=2" if place == "rendezvous" else ""
    size = 4 if generation else 3
    rules = f"backward kill slot=1 step=5; {place} kill slot=3 size={size}{generation} step=5"
    found = FSDP.trained(job, rules, COPIES="2", LEAST="2", **APART)
    FSDP.check(found)
    assert len(found) == 2
    assert found[0]["meshes"][-1] == [1, 2]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_replica_holds_the_shard_of_a_lost_worker_without_copies(job: Any):
    """Each worker counts as a separate host, and none keeps a copy."""
    found = FSDP.trained(job, "backward kill slot=1 step=5", COPIES="0", LEAST="2", **APART)
    FSDP.check(found)
    assert len(found) == 3


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("least", ["1", "3", "4"])
def test_training_with_any_least_number_of_shards_survives_a_kill_and_a_join(job: Any, least: str):
    rules = "backward kill slot=0 incarnation=1 step=5"
    flags = f"{BACK} --min-np {least}"
    found = FSDP.trained(job, rules if least != "4" else "", flags, 14, FULL="10", LEAST=least)
    FSDP.check(found, 14)
    shapes = {"1": {(4, 1), (3, 1)}, "3": {(1, 4), (1, 3)}, "4": {(1, 4)}}
    assert {*map(tuple, found[0]["meshes"])} == shapes[least]


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("feature", FSDP.module.FEATURES)
def test_fsdp2_features_continue_with_replicas(job: Any, feature: str):
    place = "optimizer" if feature == "compiled" else "backward"
    rules = f"{place} kill slot=1 incarnation=1 step=5"
    found = FSDP.trained(job, rules, BACK, 14, FULL="10", FEATURE=feature, LEAST="2")
    FSDP.check(found, 14, feature)
    assert len(found) == 4


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("apart", [False, True])
def test_replicated_shards_survive_twelve_kills_and_joins(job: Any, apart: bool):
    places = [*PLACES, "backward", "shard-mirror", "forward", "shard-seal"]
    rules = [
        f"{place} kill slot={kill % 4} incarnation={kill // 4 + 1} step={10 * kill + 5}"
        for kill, place in enumerate(places)
    ]
    steps = 10 * len(places) + 5
    env = {"LEAST": "2"} | (APART if apart else {})
    found = FSDP.trained(job, "; ".join(rules), BACK, steps, FULL="10", **env)
    FSDP.check(found, steps)
    assert len(found) == 4
