"""ZeroRedundancyOptimizer and ``zero=1`` in real jobs: workers die and others join. `test_sharded` has more tests."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.sharding import fsdp2
from harness.sharded_jobs import APART, BACK, IMPORTS, PLACES, sharded_script

ZERO = sharded_script("zero", least=1)

pytestmark = [
    pytest.mark.forked(*IMPORTS),
    pytest.mark.skipif(fsdp2.untested_version() is not None, reason="another version of torch"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ours", ["0", "1"])
def test_kill_in_backward_and_a_join_give_the_losses_of_one_process(job: Any, ours: str):
    rules = "backward kill slot=1 incarnation=1 step=5"
    found = ZERO.trained(job, rules, BACK, 14, 3, FULL="10", OURS=ours)
    ZERO.check(found, 14)
    if ours == "1":
        assert all(each["entries"] <= 1.2 / 3 * each["entries_of_all"] for each in found)
    assert len(found) == 3
    assert found[0]["sizes"][5] == 2
    assert found[0]["sizes"][10] == 3


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("place", [*PLACES, "optimizer-step", "zero-gather"])
def test_kill_at_any_place_when_each_rank_holds_elements_of_every_entry(
    job: Any, place: str, rank: int
):
    found = ZERO.trained(job, f"{place} kill rank={rank} step=5 size=4", OURS="1")
    ZERO.check(found)
    assert len(found) == 3


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("feature", ZERO.module.OF_OURS)
def test_features_of_a_distributed_optimizer_survive_a_kill_and_a_join(job: Any, feature: str):
    rules = "backward kill slot=1 incarnation=1 step=5"
    found = ZERO.trained(job, rules, BACK, 14, FULL="10", FEATURE=feature, OURS="1")
    ZERO.check(found, 14, feature)
    assert len(found) == 4


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["backward", "shard-copy", "shard-mirror", "shard-seal"])
def test_a_copy_on_another_host_survives_a_kill(job: Any, place: str):
    found = ZERO.trained(job, f"{place} kill rank=2 step=5 size=4", **APART)
    ZERO.check(found)
    assert len(found) == 3
