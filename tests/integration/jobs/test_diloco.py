"""DiLoCo on real processes: a worker dies in the middle of a round and another one joins."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.history import RETURN, SCRIPTS

pytestmark = pytest.mark.forked
HOSTS_IN_WEST = "west=localhost,127.0.0.4"


def islands(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a job with islands, which writes its records to a folder."""
    return {"RECORDS": str(folder), "ISLANDS": "1", "FULL": "4"} | variables


def islands_with_a_loss(folder: Path, who: str, **variables: str) -> dict[str, str]:
    loss = {"DIE": f"127.0.0.2 {who},16", "STEPS": "55", "WAIT": "25", "EVERY": "10"}
    return islands(folder, **(loss | variables))


def records_in(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the records of each worker."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    ]


def digests_of(workers: list[list[dict[str, Any]]]) -> dict[int, set[str]]:
    """Return the digests of the outer parameters after each merge, as last recorded by each worker that ended.

    If no survivor has committed a merge, sharded islands discard it with its step, and repeat it.
    """
    found = defaultdict(set)
    for records in workers:
        if records[-1]["what"] == "end":
            merges = {each["merged"]: each for each in records if each["what"] == "merge"}
            for number, each in merges.items():
                found[number].add(each["digest"])
    return found


@pytest.mark.parametrize(
    "env",
    [
        {"EVERY": "10", "FRAGMENTS": "2", "DELAY": "3", "DTYPE": "bfloat16", "AHEAD": "14"},
        pytest.param(
            {"EVERY": "10", "FRAGMENTS": "2", "DELAY": "3", "DTYPE": "int4"},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"EVERY": "10"}, marks=pytest.mark.nightly),
    ],
    ids=["streaming", "streaming in 4 bits", "whole rounds"],
)
def test_survivors_repeat_no_inner_step_and_all_have_equal_outer_parameters(job, tmp_path, env):
    training = job(
        f"-np 3 --min-np 1 {RETURN}",
        ["python", SCRIPTS / "diloco.py"],
        env={"RECORDS": str(tmp_path), "DIE": "1,16", "STEPS": "55", "WAIT": "25", "FULL": "3"}
        | env,
    )
    training.succeed()
    assert "script-checks#" not in training.output  # no mistake is reported
    workers = records_in(tmp_path)
    dead = [each for each in workers if each[-1]["what"] != "end"]
    survivors = [each for each in workers if each[0]["own"] == each[0]["position"] == 0]
    survivors = [each for each in survivors if each not in dead]
    joined = [each for each in workers if each not in dead and each not in survivors]
    assert [len(dead), len(survivors), len(joined)] == [1, 2, 1]

    # Steps of the lost worker that no survivor had reached are lost with it, and their samples are distributed again.
    (resumed,) = {[e for e in each if e["what"] == "enter"][1]["position"] for each in survivors}
    taken: dict[int, set[int]] = {}
    for number, records in enumerate(workers):
        steps = [each for each in records if each["what"] == "step"]
        assert [each["own"] for each in steps] == list(range(1, len(steps) + 1))
        positions = [each["position"] for each in steps]
        assert positions == sorted(set(positions))
        samples = [sample for each in steps for sample in each["samples"]]
        assert len(samples) == len(set(samples))
        taken[number] = {
            sample
            for each in steps
            if records not in dead or each["position"] <= resumed
            for sample in each["samples"]
        }
    for one in taken:
        for other in taken:
            assert one == other or not taken[one] & taken[other]  # no sample is trained on twice

    digests, sizes = defaultdict(set), defaultdict(set)
    for records in workers:
        for each in records:
            if each["what"] == "merge":
                digests[each["merged"]].add(each["digest"])
                sizes[each["merged"]].add(each["size"])
    assert all(len(found) == 1 for found in digests.values())
    assert sorted(digests) == list(range(1, max(digests) + 1))
    assert sizes[1] == {3} and sizes[max(sizes)] == {3}
    ends = [each[-1] for each in workers if each[-1]["what"] == "end"]
    assert {(each["position"], each["step"]) for each in ends} == {(55, 55)}
    (newcomer,) = joined
    assert newcomer[0]["own"] == 0 and newcomer[0]["position"] >= 16


@pytest.mark.parametrize("who", ["leader", "island"])
@pytest.mark.parametrize(
    "env",
    [
        {"FRAGMENTS": "2", "DELAY": "3", "DTYPE": "bfloat16", "AHEAD": "14"},
        pytest.param(
            {"FRAGMENTS": "2", "DELAY": "3", "DTYPE": "int4", "TOKENS": "1"},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"ELASTIC_ISLANDS": HOSTS_IN_WEST}, marks=pytest.mark.nightly),
    ],
    ids=["streaming", "weighted in 4 bits", "of several hosts"],
)
def test_islands_repeat_no_inner_step_after_the_loss_of_a_leader_or_an_island(
    job, tmp_path, who, env
):
    west = "localhost:1,127.0.0.4:1" if "ELASTIC_ISLANDS" in env else "localhost:2"
    training = job(
        f"-np 4 --min-np 1 -H {west},127.0.0.2:2 {RETURN}",
        ["python", SCRIPTS / "diloco.py"],
        env=islands_with_a_loss(tmp_path, who) | env,
    )
    training.succeed()
    assert "script-checks#" not in training.output
    workers = records_in(tmp_path)
    dead = [each for each in workers if each[-1]["what"] != "end"]
    live = [each for each in workers if each not in dead]
    assert [len(dead), len(live)] == {"leader": [1, 4], "island": [2, 4]}[who]
    assert {each[0]["host"] for each in dead} == {"127.0.0.2"}

    inner, digests = defaultdict(set), defaultdict(set)
    for records in workers:
        steps = [each for each in records if each["what"] == "step"]
        own = [each["own"] for each in steps]
        # A worker may receive one step that only another worker of its island had completed.
        assert all(1 <= b - a <= 2 for a, b in pairwise(own))
        positions = [each["position"] for each in steps]
        assert positions == sorted(set(positions))
        for each in records:
            if each["what"] == "merge":
                digests[each["merged"]].add(each["digest"])
            elif each["what"] == "step" and records in live:
                inner[each["island"], each["position"], each["merged"]].add(each["inner"])
    assert [where for where, found in inner.items() if len(found) > 1] == []  # differ in an island
    assert all(len(found) == 1 for found in digests.values())
    assert sorted(digests) == list(range(1, max(digests) + 1))
    assert len({island for island, _, _ in inner}) == 2
    # They train on their own, here between two merges.
    assert len({bits for (_, at, _), found in inner.items() if at == 49 for bits in found}) == 2
    ends = [each[-1] for each in live]
    assert {(each["position"], each["step"]) for each in ends} == {(55, 55)}


@pytest.mark.nightly
@pytest.mark.forked("torch.distributed.fsdp")
@pytest.mark.parametrize("who", ["leader", "island"])
@pytest.mark.parametrize(
    "env",
    [
        {"FRAGMENTS": "2", "DELAY": "3", "DTYPE": "bfloat16"},
        {"TOKENS": "1"},
        {"FRAGMENTS": "2", "DELAY": "3", "ELASTIC_NATIVE": "0", "ELASTIC_ISLANDS": HOSTS_IN_WEST},
    ],
    ids=["streaming", "weighted", "of several hosts"],
)
def test_sharded_islands_continue_after_the_loss_of_a_leader_or_an_island(job, tmp_path, who, env):
    west = "localhost:1,127.0.0.4:1" if "ELASTIC_ISLANDS" in env else "localhost:2"
    training = job(
        f"-np 4 --min-np 1 -H {west},127.0.0.2:2 {RETURN}",
        ["python", SCRIPTS / "diloco.py"],
        env=islands_with_a_loss(tmp_path, who, SHARDED="1") | env,
    )
    training.succeed(200)
    assert "script-checks#" not in training.output
    workers = records_in(tmp_path)
    dead = [each for each in workers if each[-1]["what"] != "end"]
    live = [each for each in workers if each not in dead]
    assert [len(dead), len(live)] == {"leader": [1, 4], "island": [2, 4]}[who]
    assert {each[0]["host"] for each in dead} == {"127.0.0.2"}

    inner, digests = defaultdict(set), digests_of(workers)
    for records in workers:
        steps = [each for each in records if each["what"] == "step"]
        # The interrupted step may be repeated, because its commit is a collective. Without shared memory, the newest
        # commit may lack a shard, and the step before it is repeated, too.
        most = 2 if "ELASTIC_NATIVE" in env else 1
        assert all(-most < b["own"] - a["own"] <= 2 for a, b in pairwise(steps))
        for each in records:
            if each["what"] == "step" and records in live:
                inner[each["island"], each["position"], each["merged"]].add(each["inner"])
    assert all(len(found) == 1 for found in digests.values())
    assert sorted(digests) == list(range(1, max(digests) + 1))
    assert len({island for island, _, _ in inner}) == 2
    assert len({bits for (_, at, _), found in inner.items() if at == 49 for bits in found}) == 2
    ends = [each[-1] for each in live]
    assert {(each["position"], each["step"]) for each in ends} == {(55, 55)}
    # A worker that joins an island has its inner parameters; the first workers of an island have the outer ones.
    joined = [each[0]["own"] for each in live if each[0]["position"] > 0]
    assert (min(joined) > 0) is (who == "leader")


@pytest.mark.nightly
@pytest.mark.forked("torch.distributed.fsdp")
def test_sharded_island_that_lost_a_shard_continues_from_the_outer_parameters(job, tmp_path):
    training = job(
        f"-np 4 --min-np 1 -H localhost:2,127.0.0.2:2 {RETURN}",
        ["python", SCRIPTS / "diloco.py"],
        env=islands_with_a_loss(
            tmp_path, "leader", SHARDED="1", COPIES="0", ELASTIC_NATIVE="0", STEPS="45"
        ),
    )
    training.succeed(200)
    workers = records_in(tmp_path)
    live = [each for each in workers if each[-1]["what"] == "end"]
    assert len(workers) == 5 and len(live) == 4
    assert all(len(found) == 1 for found in digests_of(workers).values())
    assert {tuple(each[-1]["merged"]) for each in live} == {(4,)}
    own = {
        each[0]["host"]: [step["own"] for step in each if step["what"] == "step"]
        for each in live
        if each[0]["position"] == 0
    }
    assert set(own) == {"localhost", "127.0.0.2"}
    # The other island keeps its steps, and this one counts them anew after it has received the outer parameters.
    assert own["localhost"][-1] >= 43
    assert own["127.0.0.2"].count(1) == 2 and own["127.0.0.2"][-1] <= 30


@pytest.mark.nightly
@pytest.mark.forked("torch.distributed.fsdp")
@pytest.mark.parametrize(
    ("rules", "lost"),
    [
        ("shard-seal kill host=127.0.0.2 slot=0 incarnation=1 hit=19", 1),
        ("shard-mirror kill host=localhost slot=1 incarnation=1 hit=23", 1),
        (
            "shard-copy kill host=127.0.0.2 slot=1 incarnation=1 hit=21;"
            " shard-placed kill host=localhost slot=0 incarnation=1 size=3",
            2,
        ),
    ],
    ids=["before a seal", "before a copy is sent", "while others recover"],
)
def test_sharded_islands_have_equal_outer_parameters_after_losses_in_commits(
    job, tmp_path, rules, lost
):
    training = job(
        f"-np 4 --min-np 1 -H localhost:2,127.0.0.2:2 {RETURN}",
        ["python", SCRIPTS / "diloco.py"],
        env=islands(
            tmp_path,
            SHARDED="1",
            ELASTIC_FAILPOINTS=rules,
            FRAGMENTS="2",
            DELAY="3",
            STEPS="45",
            WAIT="35",
        ),
    )
    training.succeed(200)
    workers = records_in(tmp_path)
    ends = [each[-1] for each in workers if each[-1]["what"] == "end"]
    assert len(ends) == 4 and len(workers) == 4 + lost
    assert {(each["position"], each["step"], *each["merged"]) for each in ends} == {(45, 45, 4, 4)}
    digests, own = digests_of(workers), defaultdict(list)
    for records in workers:
        for each in records:
            if each["what"] == "step":
                own[each["island"]].append(each["own"])
    assert all(len(found) == 1 for found in digests.values())
    assert sorted(digests) == list(range(1, 9))
    # No island starts anew. With each recovery, an island skips the few steps by which another one was ahead.
    assert min(map(max, own.values())) >= 45 - 8 * lost
    assert {each.count(1) for each in own.values()} == {2}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "env",
    [
        {"LATE": "1,14", "DIE": "2,41"},
        {
            "LATE": "1,14",
            "DIE": "2,41",
            "FRAGMENTS": "2",
            "DELAY": "3",
            "DTYPE": "int4",
            "AWAY": "6",
        },
        {"LATE": "127.0.0.2,14", "DIE": "127.0.0.2 leader,41", "ISLANDS": "1", "TOKENS": "1"},
    ],
    ids=["worker", "streaming in 4 bits", "island"],
)
def test_late_island_is_not_waited_for_and_takes_part_in_later_merges(job, tmp_path, env):
    islands = "ISLANDS" in env
    hosts = "-np 4 -H localhost:2,127.0.0.2:2" if islands else "-np 3"
    training = job(
        f"{hosts} --min-np 1 {RETURN}",
        ["python", SCRIPTS / "diloco.py"],
        env={
            "RECORDS": str(tmp_path),
            "GRACE": "0.3",
            "AWAY": "3",
            "EVERY": "10",
            "STEPS": "65",
            "WAIT": "55",
            "FULL": "4" if islands else "3",
        }
        | env,
    )
    training.succeed()
    assert "script-checks#" not in training.output
    workers = records_in(tmp_path)
    ends = [each[-1] for each in workers if each[-1]["what"] == "end"]
    assert len(ends) == (4 if islands else 3) and len(workers) == len(ends) + 1
    assert {(each["position"], tuple(each["merged"])) for each in ends} == {
        (65, tuple(ends[0]["merged"]))
    }

    digests, absent = defaultdict(set), defaultdict(set)
    inner = defaultdict(set)
    for records in workers:
        steps = [each for each in records if each["what"] == "step"]
        # A late worker repeats no step, and takes fewer than the others.
        assert all(1 <= b["own"] - a["own"] <= 2 for a, b in pairwise(steps))
        for each in records:
            if each["what"] == "merge":
                digests[each["merged"]].add(each["digest"])
                absent[each["merged"]].add(tuple(each["absent"] or ()))
            elif each["what"] == "step" and each["island"]:
                inner[each["island"], each["own"], each["merged"]].add(each["inner"])
    assert all(len(found) == 1 for found in digests.values())
    assert all(len(found) == 1 for found in inner.values())
    assert absent[int(env.get("AWAY", "3"))] != {()}  # the late worker or island
    assert {()} in absent.values() and absent[max(absent)] == {()}
    reported = training.events("WorkerMerged")
    assert any(each["absent"] for each in reported) and not reported[-1]["absent"]
    assert len(reported[0]["names"]) == reported[0]["islands"]
    assert sum(each["waited_s"] for each in reported) > 0
    late = env["LATE"].partition(",")[0]
    own = [
        max(each["own"] for each in records if each["what"] == "step")
        for records in workers
        if late in (str(records[0]["slot"]), records[0]["host"])
    ]
    assert own and max(own) < 65
