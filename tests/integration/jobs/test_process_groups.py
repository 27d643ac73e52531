"""Process groups of some ranks, and sharded state, in elastic jobs that lose and gain workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from elastic.driver.reasons import ReasonKind
from elastic.errors import Fixed
from harness.history import SCRIPTS


@pytest.mark.forked
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_groups_made_in_each_world_have_names_that_newcomers_agree_on(job: Any, kills: int):
    flags = "-np 4 --min-np 2 --blacklist-cooldown-range 0.01 0.02 --slot-attempts 10"
    training = job(flags, ["python", SCRIPTS / "subgroups.py"], env={"KILLS": str(kills)})
    found = re.findall(r"rounds (\d+)$", training.succeed(120), re.MULTILINE)
    assert found == [str(kills + 1)] * 4


@pytest.mark.forked
@pytest.mark.parametrize(
    ("how", "held", "kind"),
    [
        ("group", False, Fixed.PROCESS_GROUP),
        ("tensor_parallel", False, Fixed.PARAMETERS),
        ("replica", False, Fixed.REPLICA),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("tensor_parallel", True, Fixed.PARAMETERS),
                ("fully_shard", False, Fixed.MODULE),
                ("teacher", True, Fixed.MODULE),
                ("hybrid", False, Fixed.MODULE),
                ("zero", False, Fixed.OPTIMIZER),
                ("zero_overlap", True, Fixed.OPTIMIZER),
            ]
        ),
    ],
)
def test_objects_bound_to_one_world_are_refused_before_an_update_in_another(
    job: Any, how: str, held: bool, kind: Fixed
):
    training = job(
        "-np 4 --min-np 2 --blacklist-cooldown-range 100 100",
        ["python", SCRIPTS / "not_elastic.py"],
        env={"SHARDS": how, "IN_STATE": str(int(held))},
    )
    assert training.wait(120) != 0
    refused = re.findall(r"refused: (\w+) after (\d+) updates", training.output)
    assert len(refused) >= 2, training.output
    assert set(refused) == {(kind.name, "0")}


@pytest.mark.forked
def test_replica_of_each_world_and_an_untrained_one_may_be_outside_of_the_state(job: Any):
    training = job(
        "-np 4 --min-np 2 --blacklist-cooldown-range 100 100",
        ["python", SCRIPTS / "not_elastic.py"],
        env={"SHARDS": "replica_inside", "IN_STATE": "1"},
    )
    assert training.succeed(120).count("done") == 3


DIFFER = """
import torch, torch.distributed as dist, elastic
dist.init_process_group()
try:
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(3), 0)
    else:
        dist.all_reduce(torch.ones(3))
except elastic.PeerLost:
    print("told to step back")
except RuntimeError as error:
    print("told:", error, flush=True)
    raise
"""


@pytest.mark.forked
def test_different_collectives_report_the_calls_of_all_ranks_on_all_ranks(job: Any, tmp_path: Path):
    script = tmp_path / "differ.py"
    script.write_text(DIFFER)
    training = job("-np 3", ["python", script])
    assert training.wait(60) != 0
    told = re.findall(r"told: (.*)$", training.output, re.MULTILINE)
    assert len(told) == 3 and len(set(told)) == 1
    for call in ("ranks 0, 2: allreduce at differ.py:8", "rank 1: broadcast at differ.py:6"):
        assert call in told[0]
    (end,) = training.actions("EndJob")
    assert end["reason"]["kind"] == ReasonKind.CALLS_DIFFER.value
