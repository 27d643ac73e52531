"""Without --min-np: a world of a fixed size, and one failure ends it with a line that names the worker."""

from __future__ import annotations

import json

import pytest

from harness import wording
from harness.history import SCRIPTS, TRAINING

PLACES = ["python", SCRIPTS / "ranks_and_places.py"]
PLAIN = ["python", SCRIPTS / "plain.py"]


def places(running) -> list[dict]:
    said = [line.partition("place ")[2] for line in running.lines if "place {" in line]
    return sorted((json.loads(text) for text in said), key=lambda place: place["seen"]["rank"])


@pytest.mark.forked
def test_every_rank_has_its_place(job):
    running = job("-np 3", PLACES)
    running.succeed()
    found = places(running)
    assert [place["seen"]["rank"] for place in found] == [0, 1, 2]
    for place in found:
        rank = place["seen"]["rank"]
        assert place["seen"] == place["told"]
        wanted = {"size": 3, "local_rank": rank, "local_size": 3, "cross_rank": 0, "cross_size": 1}
        assert wanted.items() <= place["seen"].items()
        assert place["sum"] == 3.0
        assert place["homogeneous"]
        assert not place["secret in arguments"]


@pytest.mark.forked
def test_ranks_on_two_hosts_have_their_places(job):
    # Under elasticrun nobody asks what another launcher has set.
    torchs = {"RANK": "8", "WORLD_SIZE": "9", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    running = job("-np 3 -H localhost:2,127.0.0.2:1", PLACES, env=torchs)
    running.succeed()
    found = places(running)
    assert [place["host"] for place in found] == ["localhost", "localhost", "127.0.0.2"]
    assert [place["seen"]["local_rank"] for place in found] == [0, 1, 0]
    assert [place["seen"]["local_size"] for place in found] == [2, 2, 1]
    assert [place["seen"]["cross_rank"] for place in found] == [0, 0, 1]
    assert [place["seen"]["cross_size"] for place in found] == [2, 1, 2]
    assert not any(place["homogeneous"] for place in found)
    assert all(place["seen"] == place["told"] for place in found)


@pytest.mark.forked
@pytest.mark.parametrize(
    ("rank", "how", "code", "words"),
    [
        (1, "3", 3, "exit code 3"),
        (0, "kill", 137, "signal 9 SIGKILL"),
        (2, "raise", 1, "exit code 1"),
        (1, "late", 4, "exit code 4"),
    ],
)
def test_a_rank_that_fails_fails_the_job(job, rank, how, code, words):
    """At once: the others don't wait for a timeout. The message names rank, host and exit code."""
    running = job("-np 3", [*PLAIN, str(rank), how])
    assert running.wait(40) == code
    running.wait_for(wording.EXIT_CODE_RANK_LOCALHOST % (code, rank, rank, words))
    if how == "raise":
        running.wait_for(r"^\[[\w:]+\] ValueError: this sample is damaged")
    if how != "late":
        assert "step 4" not in running.output


@pytest.mark.forked
def test_a_rank_that_ends_too_early_fails_the_job(job):
    """With exit code 0 in the middle of training: the others would wait for it for ever."""
    running = job("-np 2", [*PLAIN, "1", "0"])
    assert running.wait(40) == 1
    running.wait_for(wording.RANK_LOCALHOST_LOCALHOST_EXIT)


@pytest.mark.forked
def test_state_and_elastic_run_work_in_a_static_job(job):
    running = job("-np 2", TRAINING)
    running.succeed()
    assert len(running.worlds()) == 2, "that of init(), that of elastic.run"


@pytest.mark.forked
def test_a_static_job_with_elastic_run_ends_with_its_first_lost_worker(job):
    running = job("-np 2", TRAINING, env={"DIE": "slot=1,step=3,place=forward"})
    assert running.wait(40) == 137
    running.wait_for(r"rank 1 \(localhost:1#1 on localhost\).*signal 9 SIGKILL")


@pytest.mark.forked
def test_a_script_without_elastic_run_fails_plainly_under_an_elastic_launch(job):
    """At the first lost peer: it can't recover, and gets the requirements."""
    running = job("-np 3 --min-np 1", [*PLAIN, "1", "kill"])
    # That of whose word came first, the survivor's or the victim's.
    assert running.wait(40) in (1, 137)
    running.wait_for(wording.JOB_ENDS_EXIT_CODE_3)
    running.wait_for(wording.ELASTIC_RUN_SURVIVE_LOST)
    assert "step 4" not in running.output
    assert len(running.actions("StartWorker")) == 3, "nobody starts anew on its own"


@pytest.mark.forked
def test_all_workers_restart_when_one_is_killed_before_elastic_run_until_the_reset_limit(job):
    """It is killed each time, so that the limit ends the job."""
    running = job("-np 3 --min-np 1 --reset-limit 1", [*PLAIN, "1", "kill"])
    assert running.wait(60) == 1
    running.wait_for(wording.ALL_START_FROM_BEGINNING)
    running.wait_for("--reset-limit 1 is reached")
    assert "step 4" not in running.output


@pytest.mark.forked
def test_elastic_job_without_elastic_run_succeeds_when_no_worker_fails(job):
    job("-np 2 --min-np 1", [*PLAIN, "-1", "0"]).succeed()


@pytest.mark.parametrize("flags", ["-np 3", "-np 3 --min-np 1"])
def test_programs_without_init_run_once_in_each_slot(job, flags):
    """Also in an elastic job, where none is started again once it has done its work."""
    running = job(flags, ["sh", "-c", "echo slot $HOROVOD_RANK of $HOROVOD_SIZE"])
    running.succeed()
    said = sorted(line.partition("] ")[2] for line in running.lines if "slot" in line)
    assert [line for line in said if line.startswith("slot")] == [
        f"slot {r} of 3" for r in range(3)
    ]
    assert len(running.actions("StartWorker")) == 3


def test_a_program_without_init_that_fails_fails_a_static_job(job):
    running = job("-np 2", ["sh", "-c", 'test "$HOROVOD_RANK" = 0 && exec sleep 60; exit 7'])
    assert running.wait(20) == 7
    running.wait_for("localhost:1#1 .*exit code 7")
