"""A running job is scaled up and down, a host is drained, a worker removed: by commands, and no step is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic.driver.network.secret import make_secret_file
from elastic.driver.reasons import ReasonKind, because
from harness import wording
from harness.certificates import make_certificates
from harness.etcd import one_etcd
from harness.history import RETURN, SCRIPTS, TRAINING, History, sizes
from harness.job import Job, elasticrun
from harness.program import stdout_of

# From the last newcomer that is ready, or from the request, to the new world. How soon it is on an idle machine,
# benchmarks/steering.py says.
WITHIN_S = 10.0
UNTIL_TOLD = {"ELASTIC_DIGESTS": "1", "ENDS": "end", "PACE": "0.01"}


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which no other job is found."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def command(*words: str) -> str:
    """Return elasticrun's output for an operator."""
    return stdout_of(elasticrun(), *words, timeout=60)


def effective_within(training: Job, size: int) -> float:
    """From when the newest world of this size could begin until it was published, by the journal."""
    records = training.records()
    worlds = [
        (index, record["at"])
        for index, record in enumerate(records)
        for action in record.get("actions") or []
        if action["type"] == "PublishWorld" and len(action["members"]) == size
    ]
    index, published = worlds[-1]
    before = [each for each in records[:index] if each.get("event")]
    members = {tuple(w) for w in old_members(records[:index])}
    asked = [e["at"] for e in before if e["event"]["type"].endswith("Requested")]
    joined = [
        each["at"]
        for each in before
        if each["event"]["type"] == "WorkerReady" and tuple(each["event"]["worker"]) not in members
    ]
    return float(published - max([asked[-1], *joined[-1:]]))


def old_members(records: list[dict[str, Any]]) -> list[list[Any]]:
    worlds = [
        action
        for record in records
        for action in record.get("actions") or []
        if action["type"] == "PublishWorld"
    ]
    return [member["worker"] for member in worlds[-1]["members"]]


def nothing_lost(training: Job, worker: str) -> None:
    """No worker recovered, and the initial workers did every step once."""
    assert training.actions("BreakWorld") == []
    steps = [r["step"] for r in History(training).by_worker[worker] if r["what"] == "step"]
    assert steps == sorted(set(steps)) and len(steps) > 5


@pytest.mark.forked
def test_job_on_one_machine_is_scaled_and_workers_are_removed_on_request(job, runtime):
    training = job(
        "-np 2 --min-np 1 --job bert --reset-limit 0",
        TRAINING,
        env={**UNTIL_TOLD, "XDG_RUNTIME_DIR": str(runtime)},
    )
    training.wait_for_world(2)
    training.until(lambda: len(sizes(training)) == 2, "a world of elastic.run")
    steered = elastic.Job()
    assert steered.name == "bert"
    assert steered.scale(4) == str(
        because(ReasonKind.SCALED, workers=4, before=2, leave=0, slots=4)
    )
    training.wait_for_world(4)
    assert effective_within(training, 4) < WITHIN_S
    assert wording.LEAVES_AT_NEXT_COMMIT in command("remove", "bert", "1")
    training.wait_for_world(3)
    assert effective_within(training, 3) < WITHIN_S
    assert wording.THEM_LEAVE in steered.scale(1)
    training.wait_for_world(1)
    assert effective_within(training, 1) < WITHIN_S
    with pytest.raises(elastic.RequestRefused, match="localhost"):
        steered.drain("elsewhere")
    assert "training.py" in steered.stacks(0)["localhost:0#1"]
    first, script, *_ = command("stacks", "bert", "0").splitlines()
    assert first == "---- localhost:0#1" and "training.py" in script, "the script's frames first"
    whole = command("stacks", "bert", "0", "--all-threads")
    assert "driver_connection.py" in whole and whole.count(wording.TRAINING_THREAD) == 1
    assert (
        "driver_connection.py" not in training.output
        and wording.TRAINING_THREAD not in training.output
    )
    state = json.loads(command("status", "bert", "--json"))
    assert state["set"]["job"]["size"] == 1 and state["set"]["job"]["most"] == 1
    assert "bert" in command("jobs") and "localhost:0#1" in command("status")
    assert "generation" in command("logs", "--lines", "500")
    (training.folder / "end").touch()
    training.succeed()
    nothing_lost(training, "localhost:0#1")
    History(training).check_commits_kept()
    assert command("jobs") == wording.NO_JOB_USER_RUNS


@pytest.mark.forked
@pytest.mark.nightly
def test_the_log_of_a_job_fits_100_columns(job, runtime, tmp_path):
    """One worker is killed, others are added and removed, and the job is stopped with a last checkpoint."""
    folder = tmp_path / "checkpoints"
    training = job(
        f"-np 2 --min-np 1 -H localhost:4,127.0.0.2:1 --job bert --checkpoint-dir {folder}"
        " --checkpoint-every 10commits",
        ["python", SCRIPTS / "durable.py"],
        env={"XDG_RUNTIME_DIR": str(runtime)},
    )
    training.until(lambda: len(sizes(training)) == 2, "a world of elastic.run")
    steered = elastic.Job()
    training.kill(1)
    training.wait_for("recovered in")
    steered.scale(3)
    training.wait_for_world(3)
    command("drain", "bert", "127.0.0.2")
    with pytest.raises(elastic.RequestRefused, match="localhost"):
        steered.drain("localhost")
    command("drain", "bert", "127.0.0.2", "--off")
    steered.scale(2)
    training.wait_for_world(2)
    training.until(lambda: bool(training.events("CheckpointMade")), "a checkpoint")
    command("stop", "bert")
    training.wait(60)
    lines = [line for line in training.lines if line.startswith("elastic |")]
    assert len(lines) > 15
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.forked
@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_job_on_one_machine_scales_from_4_to_8_to_3_and_a_host_is_drained(job, runtime):
    training = job(
        "-H localhost:4,127.0.0.2:4 -np 4 --min-np 1 --max-np 4 --job bert --reset-limit 0",
        TRAINING,
        env={**UNTIL_TOLD, "XDG_RUNTIME_DIR": str(runtime)},
    )
    training.until(lambda: sizes(training)[-2:] == [4, 4], "a world of elastic.run", 60)
    go_through(training, other="127.0.0.2", steered=elastic.Job("bert"))
    (training.folder / "end").touch()
    training.succeed()
    History(training).check_commits_kept()


def go_through(training: Job, other: str, steered: elastic.Job) -> None:
    """4 -> 8 -> 3 workers; one is removed, and another takes its place; ``other`` is drained, and drained no more."""

    def becomes(size: int) -> set[str]:
        training.wait_for_world(size, 60)
        took = effective_within(training, size)
        print(f"{size} workers after {took:.3f} s")  # pytest -rP shows it
        assert took < WITHIN_S, (size, took)
        return {member["worker"][0] for member in training.worlds()[-1]["members"]}

    began = [member["worker"] for member in training.worlds()[-1]["members"]]
    assert steered.scale(8) == str(
        because(ReasonKind.SCALED, workers=8, before=4, leave=0, slots=8)
    )
    assert other in becomes(8)
    assert wording.THEM_LEAVE_2 in steered.scale(3)
    assert other not in becomes(3)
    steered.remove(2)
    becomes(2)
    becomes(3)  # in another slot
    steered.scale(5)
    assert other in becomes(5)
    assert "leave" in steered.drain(other)
    left = becomes(3)
    assert other not in left
    assert steered.status()["rows"]["hosts"][other]["state"] == "drained"
    steered.drain(other, off=True)
    assert other in becomes(5)
    host, slot, start = began[0]
    nothing_lost(training, f"{host}:{slot}#{start}")


@contextlib.contextmanager
def agents(folder: Path, common: list[str], env: dict[str, str]) -> Iterator[Callable[[str], None]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(host: str) -> None:
        words = [elasticrun(), "agent", *common, "--host", host, "--slots", "4"]
        with open(folder / f"agent-{host}.log", "a") as log:
            started.append(subprocess.Popen(words, env=env, cwd=folder, stderr=log))

    try:
        yield start
    finally:
        for agent in started:
            agent.terminate()
        for agent in started:
            assert agent.wait(20) == 143


@pytest.mark.etcd
@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_job_with_agents_and_etcd_is_steered_from_anywhere(runtime, tmp_path):
    """Over TLS, found by etcd: this machine's folder is another one for the driver."""
    make_secret_file(str(tmp_path / "secret"))
    tls = make_certificates(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "history").mkdir()
    path = f"{Path(elasticrun()).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"ELASTIC_DIGESTS": "1", "ENDS": "end", "PACE": "0.01", "PATH": path}
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(one_etcd(tmp_path / "etcd"))
        common = ["--etcd", etcd.access.endpoints[0], "--job", "bert"]
        common += ["--secret-file", str(tmp_path / "secret"), "--tls-ca", tls.ca]
        common += ["--tls-cert", tls.cert, "--tls-key", tls.key]
        agent = stack.enter_context(agents(tmp_path, common, {**os.environ, **env}))
        agent("a")
        agent("b")
        env |= {"XDG_RUNTIME_DIR": str(elsewhere)}
        flags = ["-np", "4", "--min-np", "1", "--max-np", "4", *RETURN.split(), *common]
        training = Job(flags, [*map(str, TRAINING)], folder=tmp_path, env=env)
        try:
            training.until(lambda: sizes(training)[-2:] == [4, 4], "a world of elastic.run", 60)
            # The hosts stand in the order in which their agents came.
            last = training.worlds()[-1]["members"][-1]["worker"][0]
            other = "b" if last == "a" else "a"
            go_through(training, other, elastic.Job(flags=common))
            assert "its 2 workers leave" in command("drain", *common, other)
            training.wait_for_world(3)
            assert "drained" in command("status", *common)
            assert (
                wording.NO_JOB_USER_RUNS_2
                in subprocess.run(
                    [elasticrun(), "status"], capture_output=True, text=True, timeout=60
                ).stderr
            )
            (tmp_path / "end").touch()
            training.succeed()
            assert training.actions("BreakWorld") == []
            History(training).check_commits_kept()
        finally:
            left = training.end()
        assert not left
        training.check_invariants()
