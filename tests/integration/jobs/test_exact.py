"""Training in shards under faults: every commit has the digests of an undisturbed run."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from elastic.chaos.exact.digests import HeldCommit, difference, held
from elastic.driver.journal import journal
from elastic.protocol.messages import Worker
from harness import wording
from harness.forking import SPARE_WORKERS
from harness.history import RETURN, SCRIPTS, sizes
from harness.job import Job

pytestmark = pytest.mark.forked

SCRIPT = SCRIPTS / "exact.py"
STEPS = 12
ALL_SEEDS = 50  # of test_digests_are_unchanged_by_many_changes_of_the_world, each of which takes two to three minutes
SEEDS = int(os.environ.get("EXACT_SEEDS", "5"))  # a night: each seed is run every ten nights
CHANGES = int(os.environ.get("EXACT_CHANGES", "100"))
Digests = dict[str, int]


@functools.cache
def undisturbed(
    folder: Path, steps: int = STEPS, shards: int = 8
) -> tuple[dict[int, Digests], Any]:
    """By step: of one process, without elasticrun. And losses and weights at the end."""
    folder.mkdir()
    told = {"STEPS": str(steps), "SHARDS": str(shards), "OWN_DIGESTS": "own.jsonl"}
    env = {**os.environ, "OMP_NUM_THREADS": "1", **told}
    subprocess.run([sys.executable, SCRIPT], cwd=folder, env=env, check=True, timeout=120 + steps)
    lines = (folder / "own.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines), (folder / "final.json").read_text()


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    return lambda *of: undisturbed(folder / "-".join(map(str, of or ["run"])), *of)


def digests(training: Job) -> list[tuple[int, str, Digests]]:
    """Of every commit that any worker has reported: the step that follows, the worker, and what it committed."""
    return [
        (event["step"], ":".join(map(str, event["worker"])), event["tensors"])
        for event in training.events("WorkerDigested")
        if event.get("tensors")
    ]


def held_by(training: Job) -> list[HeldCommit]:
    _, entries = journal.read(training.folder / "journal.jsonl")
    return held(entry.event for entry in entries if entry.event is not None)


def differences(training: Job, wanted: dict[int, Digests]) -> list[tuple[int, str, str]]:
    """Step, worker and tensor, in that order."""
    return sorted(
        (step, worker, name)
        for step, worker, found in digests(training)
        for name in found
        if step and found[name] != wanted[step].get(name)
    )


def drawn(
    seed: int, steps: int, changes: int, largest: int, kinds: tuple[str, ...] = ("kill",)
) -> str:
    """Events for a world of at most ``largest``: ``kinds`` and leaves of any rank, anywhere in a step; and returns.

    Leaves, of which nobody comes back, are spread over the run, so that worlds have every size.
    """
    dice = random.Random(seed)
    leaves = set(dice.sample(range(changes), min(largest - 2, (changes + 2) // 3)))
    if "all" in kinds:  # then whoever has left comes back, too
        leaves = set()
    events, alive, alone = [], largest, False
    for number, step in enumerate(sorted(dice.sample(range(1, steps - 2, 2), changes))):
        place = dice.choice(["forward", "backward", "optimizer", "commit"])
        if alone:  # who has just come has the state for sure once it has sent gradients
            place = "optimizer"
        kind = "leave" if number in leaves else dice.choice(kinds)
        events.append(f"{step}:{kind}:{dice.randrange(8)}:{place}")
        alive = 0 if kind == "all" else alive - 1
        largest -= kind == "leave"
        alone = False
        if alive < 2 or kind == "leave" or dice.random() < 0.5:
            # By then all know who is gone. One that leaves has left: killed before, it would come back.
            events.append(f"{step + 2}:hold:{largest}")
            alone, alive = alive == 1, largest
    return " ".join(events)


def train(job: Any, flags: str, events: str = "", **env: str) -> Job:
    told = {"EVENTS": events, "STEPS": str(STEPS), "OMP_NUM_THREADS": "1"} | env
    training: Job = job(f"{flags} --digests", ["python", SCRIPT], env=told)
    return training


SMALL = [
    (2, 4, "0"),
    *(pytest.param(*each, "", marks=pytest.mark.nightly) for each in ((1, 3), (3, 2))),
]


@pytest.mark.parametrize(("seed", "size", "native"), SMALL)
def test_commits_equal_an_undisturbed_run_for_drawn_events(job, reference, seed, size, native):
    events = drawn(seed, STEPS, 3, size)
    training = train(
        job,
        f"-np {size} --min-np 1 {RETURN}",
        events,
        **({"ELASTIC_NATIVE": native} if native else {}),
    )
    training.succeed(timeout=120)
    wanted, final = reference()
    assert len({step for step, _, _ in digests(training)}) >= STEPS, events
    assert differences(training, wanted) == [], events
    assert (training.folder / "final.json").read_text() == final
    assert len(set(sizes(training))) > 1, "nothing happened"


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.nightly)])
def test_slow_worker_gets_fewer_shards_without_changing_commits(job, reference, native):
    """Before a worker is killed and after another has replaced it."""
    training = train(
        job,
        f"-np 3 --min-np 3 {RETURN}",
        "12:kill:1:backward",
        SLOW="2:6",
        STEPS="26",
        ELASTIC_NATIVE=native,
    )
    training.succeed(timeout=180)
    wanted, final = reference(26)
    assert differences(training, wanted) == []
    assert (training.folder / "final.json").read_text() == final
    shares: dict[int, dict[str, int]] = {}
    for event in training.events("WorkerDigested"):
        if event.get("gradients"):
            own = len({key.split()[0] for key in event["gradients"]})
            shares.setdefault(event["step"], {})[":".join(map(str, event["worker"]))] = own
    assert sorted(shares[1].values()) == [2, 3, 3]
    for step in (11, 26):  # what each of the others gets depends on the machine's load, too
        assert min(shares[step].values()) == 1 and sum(shares[step].values()) == 8, shares[step]


def test_bug_is_located_by_step_tensor_and_shard(job, reference):
    """One ulp in one gradient of one rank, and a buffer that is not shard 0's."""
    training = train(job, "-np 2 --min-np 1", STEPS="5", PLANT="ulp,buffer")
    training.succeed()
    wanted, _ = reference()
    found = differences(training, wanted)
    assert found[0][0] == 4  # what step 3 made
    first = {name for step, _, name in found if step == 4}
    assert {"adamw.gpt.places.weight.exp_avg", "models.convnet.norm.running_mean"} <= first
    assert not any("mlp" in name or "convnet.first" in name for name in first)
    undisturbed = train(job, "-np 1 --min-np 1", STEPS="5")
    undisturbed.succeed()
    named = difference(held_by(undisturbed), held_by(training))
    assert named is not None and named.step == 3
    assert named.gradient is not None
    assert (named.gradient.shard, named.gradient.parameter) == (4, "gpt.places.weight")
    assert named.gradient.worker == Worker("localhost", 1, 1)
    assert named.gradient.others == 3  # of the shards that rank 1 has


@pytest.mark.nightly
@pytest.mark.parametrize("bug", ["seed", "position", "order", "partial"])
def test_bug_active_from_step_3_is_found_at_step_3(job, reference, bug):
    """Ranks that draw or read by rank compute other gradients; if sums are wrong, the gradients of all shards are
    equal.
    """
    training = train(job, "-np 3 --min-np 1", STEPS="5", PLANT=bug)
    training.succeed()
    wanted, _ = reference()
    found = differences(training, wanted)
    assert found[0][0] == 4
    assert bug != "seed" or not any("mlp" in name for _, _, name in found)  # it draws nothing
    undisturbed = train(job, "-np 1 --min-np 1", STEPS="5")
    undisturbed.succeed()
    named = difference(held_by(undisturbed), held_by(training))
    assert named is not None and named.step == 3
    assert (named.gradient is None) == (bug in ("order", "partial"))


@pytest.mark.nightly
def test_changed_thread_count_at_step_3_ends_the_job(job):
    training = train(job, "-np 2 --min-np 1", STEPS="5", PLANT="threads")
    training.wait_for(wording.TORCH_COMPUTES_THREADS_STEP, 60)


@pytest.mark.nightly
@pytest.mark.timeout(120 + 20 * CHANGES)
@pytest.mark.parametrize(
    "seed", [(date.today().toordinal() * SEEDS + n) % ALL_SEEDS for n in range(SEEDS)]
)
def test_digests_are_unchanged_by_many_changes_of_the_world(job, reference, tmp_path, seed):
    """Worlds of 1 to 8, of every size, in shared memory, over Gloo, and on two hosts of unequal size."""
    dice, steps = random.Random(seed), 2 * CHANGES + 6
    size, shards = dice.randint(2, 8), dice.choice([5, 6, 8])
    env = dice.choice([{}, {"ELASTIC_NATIVE": "0"}])
    env[SPARE_WORKERS] = str(3 * CHANGES // 2)  # else most of the time goes into imports
    second = dice.randrange(size)  # slots of another host, which has fewer or more of them
    hosts = f"localhost:{size - second}" + (f",127.0.0.2:{second}" if second else "")
    kinds, checkpoints = [*["kill"] * 12, "freeze"], ""
    if seed % 2:
        kinds.append("all")
        checkpoints = f"--checkpoint-dir {tmp_path}/checkpoints --checkpoint-every 1commits"
        checkpoints += (
            f" --restarts {CHANGES}"  # all may be killed again before a checkpoint is written
        )
    training = train(
        job,
        # One slot may be struck many times in a row.
        f"-np {size} --min-np 1 -H {hosts} {RETURN} --slot-attempts {CHANGES + 1} {checkpoints}",
        drawn(seed, steps, CHANGES, size, tuple(kinds)),
        HOLD_S="180",
        STEPS=str(steps),
        SHARDS=str(shards),
        **env,
    )
    training.succeed(timeout=20.0 + 20 * CHANGES)
    wanted, final = reference(steps, shards)
    assert len({step for step, _, _ in digests(training)}) >= steps
    assert differences(training, wanted) == []
    assert (training.folder / "final.json").read_text() == final


@pytest.mark.nightly
def test_frozen_workers_and_a_resume_in_another_world_size_keep_all_digests(
    job, reference, tmp_path
):
    """From a checkpoint of a world of another size."""
    folder = f"--checkpoint-dir {tmp_path}/checkpoints --checkpoint-every 1commits"
    first = train(
        job, f"-np 3 --min-np 1 {RETURN} {folder}", "2:freeze:1:backward 4:hold:3", STEPS="8"
    )
    first.succeed(timeout=120)
    second = train(job, f"-np 2 --min-np 1 {RETURN} {folder}", "9:kill:0:optimizer")
    second.succeed(timeout=120)
    wanted, final = reference()
    assert min(step for step, _, _ in digests(second) if step) > 1, "it began anew"
    assert differences(first, wanted) == [] and differences(second, wanted) == []
    assert (second.folder / "final.json").read_text() == final


def test_joining_worker_with_another_thread_count_is_refused(job, reference):
    """Its script has set another number of threads; the others are not affected."""
    training = train(job, f"-np 2 --min-np 1 {RETURN}", "2:kill:1:commit", THREADS="2", STEPS="8")
    training.until(
        lambda: "shards.arithmetic.threads" in training.output, "a line about the threads", 60
    )
    Path(training.folder / "go").touch()
    training.succeed()
    wanted, _ = reference()
    assert differences(training, wanted) == []
    assert sizes(training)[-1] == 1
    assert "2 here, 1 in the world" in training.output


@pytest.mark.nightly
def test_inexact_worker_is_admitted_with_allow_inexact(job):
    training = train(
        job,
        f"-np 2 --min-np 1 {RETURN} --allow-inexact",
        "2:kill:1:commit 4:hold:2",
        THREADS="2",
        STEPS="8",
    )
    training.succeed()
    assert wording.SO_FROM_STEP_RUN in training.output


@pytest.mark.nightly
def test_exact_command_finds_a_run_with_faults_bitwise_equal(tmp_path):
    job = ["elasticrun", "-np", "2", "--min-np", "1", *RETURN.split(), sys.executable, str(SCRIPT)]
    told = {
        "STEPS": "300",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }
    words = [
        sys.executable,
        "-m",
        "elastic.chaos",
        "exact",
        "--mean-time-between-faults",
        "2",
        "--seed",
        "4",
    ]

    def run(**env: str) -> Any:
        environ = {**os.environ, **told, **env}
        return subprocess.run(
            [*words, "--faults", "kill", "--", *job],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=400,
        )

    equal = run()
    assert equal.returncode == 0, equal.stdout + equal.stderr
    assert wording.EACH_BIT_UNDISTURBED_RUN in equal.stdout
