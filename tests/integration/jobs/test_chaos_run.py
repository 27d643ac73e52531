"""`python -m elastic.chaos run` on real jobs: its faults, its report, and no leaks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic.chaos.inject import network_isolation
from elastic.chaos.inject.injector import MARK as CHAOS_MARK
from elastic.chaos.inject.injector import Injector, NotOurs
from elastic.chaos.inject.plan import Fault
from elastic.protocol.messages import Worker
from harness import wording
from harness.history import RETURN, SCRIPTS, STAY_AWAY
from harness.job import MARK, elasticrun
from harness.processes import clean_environment
from harness.program import Program
from harness.waiting import wait_until

KILL_AND_LEAVE = """
[[fault]]
after_commits = 10
kind = "kill"
victim = "rank 0"

[[fault]]
at_generation = 3
kind = "leave"
victim = "rank 1"
"""

nft = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("nft") is None,
    reason="dropping packets needs root and nft; apt-get install nftables",
)


class Chaos(Program):
    """The command under test, with a job of `scripts/training.py`."""

    def __init__(
        self, folder: Path, plan: str, flags: str, *words: str, forked: bool, **env: str
    ) -> None:
        self.folder = folder
        self.json = folder / "report.json"
        (folder / "plan.toml").write_text(plan)
        command = [sys.executable, "-m", "elastic.chaos", "run", "--plan", "plan.toml"]
        command += ["--json", str(self.json), *words, "--", elasticrun(), *flags.split()]
        command += ["--journal", "journal.jsonl", sys.executable, str(SCRIPTS / "training.py")]
        environ = clean_environment() | env
        super().__init__(command, folder=folder, env=environ, mark=MARK, forked=forked)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.json.read_text())
        return found


@pytest.fixture
def chaos(tmp_path, request):
    """In a test that is marked ``forked``, imports are not waited for."""
    forked = request.node.get_closest_marker("forked") is not None
    started: list[Chaos] = []

    def start(plan: str, flags: str, *words: str, **env: str) -> Chaos:
        started.append(Chaos(tmp_path, plan, flags, *words, forked=forked, **env))
        return started[-1]

    yield start
    left = [process for each in started for process in each.end()]
    assert not left, f"these processes outlived their job: {left}"


@pytest.mark.forked
def test_kill_and_leave_by_plan_are_executed_and_reported(chaos):
    run = chaos(KILL_AND_LEAVE, f"-np 3 --min-np 1 {STAY_AWAY}", HOLD="5:size=1")
    assert run.wait() == 0, run.output
    found = run.report()
    killed, left = found["faults"]
    assert (killed["what"], killed["rank"], killed["size"]) == ("kill", 0, 3)
    assert killed["outcome"].startswith("lost; ")
    assert killed["back_ms"] > 0
    assert left["what"] == "leave"
    assert left["outcome"].startswith(wording.LEFT_WORKER_TRAINED)
    kinds = [recovery["kind"] for recovery in found["recoveries"]]
    assert "recovery" in kinds
    assert all("gathered" in recovery["phases_ms"] for recovery in found["recoveries"])
    assert found["steps"]["lost"] == 0
    assert found["steps"]["kept"] >= 10
    assert found["digests"]["compared"] > 0
    assert found["digests"]["differing"] == 0
    assert found["broken"] == []
    assert 0 < found["goodput"]["share"] <= 1
    assert 0 < found["goodput"]["full_share"] < found["goodput"]["share"]
    for word in (wording.RECOVERIES_MS, "commits lost", "goodput", "replicas", wording.ALL_HOLD):
        assert word in run.output


@pytest.mark.nightly  # the others end with 0, 2, 130 and 143
def test_the_exit_code_is_that_of_the_job(chaos):
    plan = '[[fault]]\nafter_commits = 3\nkind = "kill"\nvictim = "all"\n'
    run = chaos(plan, f"-np 2 --min-np 1 {STAY_AWAY}", HOLD="5:file=never")
    assert run.wait() == 1, run.output
    found = run.report()
    assert [fate["what"] for fate in found["faults"]] == ["kill", "kill"]
    assert all(wording.NO_WORLD_TRAINED_AFTERWARDS in fate["outcome"] for fate in found["faults"])
    assert found["broken"] == []


@pytest.mark.forked
def test_a_short_freeze_and_a_slow_worker_lose_no_worker(chaos):
    plan = """
        [[fault]]
        after_commits = 5
        kind = "freeze"
        victim = "rank 1"
        for_s = 0.5
        [[fault]]
        after_commits = 5
        kind = "slow"
        victim = "rank 0"
        for_s = 2
        factor = 3
    """
    run = chaos(plan, f"-np 2 --min-np 1 {STAY_AWAY}", HOLD="5:file=go")
    run.wait_for(wording.FREEZE_OVER)
    run.wait_for(wording.SLOW_OVER)
    (run.folder / "go").touch()
    assert run.wait() == 0, run.output
    found = run.report()
    assert [fate["back_ms"] for fate in found["faults"]] == [None, None]
    assert wording.WENT_AFTERWARDS in found["faults"][0]["outcome"]
    assert found["faults"][1]["outcome"] == wording.TRAINING_WENT_SLOWER
    assert found["recoveries"] == []


@pytest.mark.forked
def test_ctrl_c_ends_job_and_faults_and_still_reports(chaos):
    """As a terminal does it: the whole foreground process group gets the signal."""
    plan = '[[fault]]\nafter_commits = 3\nkind = "freeze"\nfor_s = 1.5\nvictim = "rank 1"\n'
    run = chaos(plan, f"-np 2 --min-np 1 {STAY_AWAY}", HOLD="5:file=never")
    run.wait_for("freeze for 1.5 s: ")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(30) == 130, run.output
    run.wait_for(wording.FREEZE_OVER)
    assert run.report()["code"] == 130
    assert wording.CHAOS_REPORT in run.output


@pytest.mark.nightly  # Ctrl-C ends it in every run
def test_sigterm_to_the_chaos_tool_ends_the_job_with_143(chaos):
    run = chaos(KILL_AND_LEAVE, f"-np 2 --min-np 1 {RETURN}", HOLD="5:file=never")
    run.wait_for("chaos .* kill: ")
    run.process.terminate()
    assert run.wait(30) == 143, run.output


@pytest.mark.forked
def test_a_job_that_ends_at_once_has_its_exit_code_and_pending_faults_are_reported(chaos):
    plan = '[[fault]]\nat_s = 900\nkind = "kill"\n'
    run = chaos(plan, f"-np 2 --min-np 1 {STAY_AWAY}", STEPS="2")
    assert run.wait() == 0, run.output
    run.wait_for(wording.DID_NOT_COME_AFTER)
    assert run.report()["faults"] == []


def test_chaos_run_reports_a_job_that_cannot_start(chaos, tmp_path):
    """The discovery script is only run when the job is."""
    (script := tmp_path / "hosts.sh").write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    plan = '[[fault]]\nat_s = 1\nkind = "kill"\n'
    run = chaos(plan, f"--min-np 1 --host-discovery-script {script}")
    assert run.wait() == 2, run.output
    run.wait_for(wording.JOB_ENDED_EXIT_CODE_2)


@pytest.mark.nightly  # the comparison that is left runs with the others, too
def test_without_digests_only_copies_of_the_state_are_compared(chaos):
    plan = '[[fault]]\nat_s = 0\nkind = "kill"\nvictim = "newest"\n'
    flags = f"-np 2 --min-np 1 {STAY_AWAY}"
    run = chaos(plan, flags, "--no-digests", HOLD="5:size=1")
    assert run.wait() == 0, run.output
    assert run.report()["digests"]["of_commits"] is False
    assert run.report()["steps"]["kept"] == 0
    assert re.search(wording.REPLICAS_COPIES_STATE_COMPARED, run.output)


# ---- the network -----------------------------------------------------------------------------------


def tables() -> str:
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, timeout=10)
    return listed.stdout


PARTITION = '[[fault]]\nafter_commits = 3\nkind = "partition"\nfor_s = 60\nvictim = "rank 1"\n'


@nft
@pytest.mark.nightly
def test_a_partition_is_removed_after_ctrl_c(chaos):
    run = chaos(PARTITION, f"-np 2 --min-np 1 {STAY_AWAY}", HOLD="5:file=never")
    pid = run.wait_for(r"partition for 60 s: .*\(process (\d+)\)")[1]
    assert f"elastic_chaos_{pid}" in tables()
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(30) == 130, run.output
    assert f"elastic_chaos_{pid}" not in tables()


@nft
@pytest.mark.nightly  # the filter itself is tested below
def test_a_partition_ends_with_the_tool_however_that_ends(chaos):
    run = chaos(PARTITION, f"-np 2 --min-np 1 {STAY_AWAY}", HOLD="5:file=never")
    pid = run.wait_for(r"partition for 60 s: .*\(process (\d+)\)")[1]
    assert f"elastic_chaos_{pid}" in tables()
    driver = [p.pid for p in run.processes() if "elasticrun" in " ".join(p.info["cmdline"])]
    run.process.kill()
    wait_until(lambda: f"elastic_chaos_{pid}" not in tables(), "the end of its table", 5.0)
    for each in driver:  # the job goes on without the tool
        os.kill(each, signal.SIGTERM)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ss") is None,
    reason="closing others' connections needs root and ss; apt-get install iproute2",
)
@pytest.mark.forked
def test_a_cut_makes_the_same_workers_form_a_new_ring(chaos):
    plan = '[[fault]]\nafter_commits = 5\nkind = "cut"\nvictim = "rank 1"\n'
    flags = f"-np 3 --min-np 1 {STAY_AWAY}"
    # Workers of one host that share memory have no connections that their collectives need.
    # The first file is there: while they hold they meet in a group that has been made before the cut.
    run = chaos(plan, flags, HOLD="2:file=.;5:file=go", ELASTIC_NATIVE="0")
    run.wait_for(wording.CUT_RANK_CONNECTIONS_CLOSED, 60.0)
    run.wait_for(wording.RECOVERED_WORKERS_2)
    (run.folder / "go").touch()
    assert run.wait() == 0, run.output
    (fate,) = run.report()["faults"]
    assert fate["outcome"] == wording.RING_BROKE_WORKERS_TRAINED


# ---- never anybody else ----------------------------------------------------------------------------


@pytest.fixture
def bystander():
    """A process that has a worker's name, but not this job's mark."""
    worker = Worker("localhost", 0)
    env = {**os.environ, CHAOS_MARK: "another job", "ELASTIC_WORKER": str(worker)}
    process = subprocess.Popen(["sleep", "60"], env=env)
    yield worker, process
    process.kill()
    process.wait()


@pytest.mark.parametrize("kind", ["kill", "leave", "freeze", "slow", "partition", "cut"])
def test_a_process_that_is_not_a_worker_of_this_job_is_not_touched(bystander, kind):
    worker, process = bystander
    said: list[str] = []
    injector = Injector("this job", said.append)
    fault = Fault(kind, at_s=0.0, for_s=60.0, factor=2.0)
    with pytest.raises(NotOurs, match=wording.NOT_LOCALHOST_JOB):
        injector.inject(fault, worker, {worker: process.pid}, (0, 1), 0.0)
    assert process.poll() is None
    assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    assert (injector.done, said, injector.next_at()) == ([], [], None)


def test_an_exited_process_is_not_touched():
    process = subprocess.Popen(["true"])
    process.wait()
    worker = Worker("localhost", 0)
    injector = Injector("this job", lambda text: None)
    with pytest.raises(NotOurs, match="has already exited"):
        injector.inject(Fault("kill", at_s=0.0), worker, {worker: process.pid}, (0, 1), 0.0)


@nft
def test_only_packets_of_the_filtered_connection_are_dropped_while_the_filter_is_open():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        answering, _ = server.accept()
        others = socket.create_connection(server.getsockname())
        other_answering, _ = server.accept()
        with ours, answering, others, other_answering:
            found = network_isolation.Socket(ours.getsockname(), ours.getpeername())
            answering.settimeout(0.3)
            other_answering.settimeout(5.0)
            packets = network_isolation.PacketFilter(os.getpid())
            try:
                packets.drop([found])
                until = time.monotonic() + 5.0
                while str(found.own[1]) not in listed(packets.table):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                ours.send(b"lost")
                others.send(b"through")
                assert other_answering.recv(16) == b"through"
                with pytest.raises(TimeoutError):
                    answering.recv(16)
            finally:
                packets.close()
            answering.settimeout(10.0)
            assert answering.recv(16) == b"lost"  # sent again


def listed(table: str) -> str:
    words = ["nft", "list", "table", *table.split()]
    return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout
