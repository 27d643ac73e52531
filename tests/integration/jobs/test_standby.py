"""Hosts from etcd, everything over TLS, and a stopped driver: another takes over, and only one acts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elastic.driver.network.credentials import TlsFiles
from elastic.driver.network.secret import make_secret_file
from harness import wording
from harness.certificates import make_certificates
from harness.etcd import one_etcd
from harness.forking import SPARE_WORKERS
from harness.history import RETURN, TRAINING, History, sizes
from harness.job import MARK, Job, elasticrun
from harness.processes import clean_environment
from harness.program import Program

pytestmark = pytest.mark.etcd


class Cluster:
    """Two hosts of this machine, an etcd, and the drivers of one job."""

    def __init__(self, folder: Path, endpoint: str, tls: TlsFiles) -> None:
        self.folder = folder
        make_secret_file(str(folder / "secret"))
        self.common = [
            *("--etcd", endpoint, "--job", "test", "--secret-file", str(folder / "secret")),
            *("--etcd-ca", tls.ca, "--etcd-cert", tls.cert, "--etcd-key", tls.key),
            *("--tls-ca", tls.ca, "--tls-cert", tls.cert, "--tls-key", tls.key),
        ]
        self.agents: dict[str, Program] = {}
        self.drivers: list[Job] = []

    def agent(self, host: str) -> None:
        words = [elasticrun(), "agent", *self.common, "--host", host, "--slots", "1"]
        told = {"ELASTIC_DIGESTS": "1", "STEPS": "40", "HOLD": "30:file=go", SPARE_WORKERS: "2"}
        env = clean_environment() | told
        self.agents[host] = Program(words, folder=self.folder, env=env, mark=MARK, forked=True)

    def driver(self) -> Job:
        flags = ["-np", "2", "--min-np", "1", "--standby", *RETURN.split(), *self.common]
        self.drivers.append(_Driver(flags, self.folder, len(self.drivers)))
        return self.drivers[-1]

    def end(self) -> None:
        for agent in self.agents.values():
            agent.process.terminate()
        for agent in self.agents.values():
            assert agent.wait(20) == 143, agent.output
        programs: list[Program] = [*self.drivers, *self.agents.values()]
        left = [process for program in programs for process in program.end()]
        assert not left, f"these processes outlived their job: {left}"


class _Driver(Job):
    """Each has its own copy of the journal."""

    def __init__(self, flags: list[str], folder: Path, number: int) -> None:
        copy = folder / f"driver{number}"
        copy.mkdir()
        (copy / "history").symlink_to(folder / "history")
        env = {"OMP_NUM_THREADS": "1"}
        super().__init__(flags, [*map(str, TRAINING)], folder=copy, env=env, forked=True)


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "history").mkdir()
    tls = make_certificates(tmp_path)
    with one_etcd(tmp_path, tls=tls) as etcd:
        made = Cluster(tmp_path, etcd.access.endpoints[0], tls)
        try:
            yield made
        finally:
            made.end()


def test_stopped_driver_is_replaced_and_does_not_act_after_it_resumes(cluster):
    cluster.agent("a")
    first = cluster.driver()
    first.wait_for(wording.LEADS_JOB_TEST_TERM)
    cluster.agent("b")
    first.wait_for(wording.GENERATION_WORKERS_ENTERING_ELASTIC, 60)
    second = cluster.driver()
    second.wait_for(wording.STANDING_ANOTHER_DRIVER_LEADS)

    first.driver.send_signal(signal.SIGSTOP)
    second.wait_for(wording.LEADS_JOB_TEST_TERM_2)
    second.wait_for(wording.GOES_JOB_AT_GENERATION_2)
    second.until(lambda: len(second.events("WorkerReconnected")) == 2, "both workers")
    first.driver.send_signal(signal.SIGCONT)
    first.wait_for(wording.DRIVER_DOES_NOT_LEAD)
    assert first.wait() == 75

    (first.folder / "go").touch()  # workers are where the first driver was started
    second.succeed()
    assert second.actions("BreakWorld") == [], "not one step failed"
    assert not [size for size in sizes(second) if size != 2]
    History(second).check_commits_kept()
    secret = (cluster.folder / "secret").read_text().strip()
    assert secret not in first.output + second.output
