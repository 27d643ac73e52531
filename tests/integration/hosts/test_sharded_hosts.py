"""Fully sharded models on several hosts, each a network namespace, some of which lose their power together."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest

from harness import wording
from harness.history import SCRIPTS
from stress.hosts.cluster import DRIVER, ENDPOINT, HOSTS, HostCluster
from stress.hosts.namespaces import obstacle
from stress.hosts.programs import HostProgram

sys.path.append(str(SCRIPTS))
fsdp = pytest.importorskip("fsdp")
STEPS = 120


pytestmark = [
    pytest.mark.etcd,
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why := obstacle()), reason=why),
]


@pytest.mark.parametrize(
    ("copies", "lost", "least"),
    [(1, HOSTS[1:2], None), (2, HOSTS[1:3], None), (1, HOSTS[1:2], 4), (2, HOSTS[1:3], 2)],
)
def test_as_many_hosts_as_there_are_copies_can_be_lost_at_once(
    tmp_path: Path, copies: int, lost: tuple[str, ...], least: int | None
):
    """Each has two workers, which map each other's memory. ``least``: shards, of which there are replicas."""
    with HostCluster(tmp_path) as bench, contextlib.ExitStack() as stack:

        def start(host: str, name: str, words: list[str]) -> HostProgram:
            program = HostProgram(bench.network.hosts[host], name, words, tmp_path)
            stack.callback(program.end)
            return program

        bench.start_etcd()
        joined = ["--etcd", ENDPOINT, "--job", "sharded", "--secret-file", str(bench.secret)]
        for host in HOSTS:
            words = ["elasticrun", "agent", *joined, "--host", host, "--slots", "2"]
            start(host, f"agent-{host}", words)
        words = ["elasticrun", "-np", "8", "--min-np", str(least or 2), "--max-np", "8", *joined]
        words += ["env", f"STEPS={STEPS}", f"COPIES={copies}", "SLOW=0.1"]
        words += [] if least is None else [f"LEAST={least}"]
        words += [sys.executable, str(SCRIPTS / "fsdp.py")]
        driver = start(DRIVER, "driver", words)
        driver.wait_for(wording.TRAINING_STARTED, 150)
        driver.wait_for("at step 10", 60)
        for host in lost:
            bench.network.kill_host(host)
        assert driver.wait(150) == 0
    found = [json.loads(file.read_text()) for file in tmp_path.glob("**/out/*.json")]
    assert len(found) == 8 - 2 * len(lost)
    for each in found:
        assert each["same"]
        assert each["losses"] == pytest.approx(fsdp.alone(STEPS, "plain"), rel=1e-5)
        assert each["sizes"][-1] == len(found)
