"""The image is small and always the same, and its containers train, on a read-only root and without rights."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastic.version import __version__
from harness.program import Program
from images.conftest import ROOT, Image, Run, build, config, podman

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1200)]

DEMO = ROOT / "images/demo.py"
MOST_MB = 400
ENDLESS = "100000"
ALL_AGENTS = "agents"  # the name behind which the driver finds them


def test_a_node_fetches_at_most_400_mb(image: Image) -> None:
    assert image.packed_mb <= MOST_MB


def test_the_same_sources_give_the_same_digest(image: Image) -> None:
    again = build("again", FRESH="1")
    podman("image", "rm", "--force", again.name)
    assert again.digest == image.digest


def test_it_is_nobody_s_but_user_1000_s(image: Image, run: Run) -> None:
    assert config(image)["User"] == "1000:1000"
    assert run("id", "--user").succeed().split() == ["1000"]


def test_nothing_of_the_machine_that_built_it_is_left(run: Run) -> None:
    left = run(
        "sh", "-c", "find /mnt /root /build /wheel /etc/resolv.conf /var/log -type f -size +0; true"
    )
    assert left.succeed().split() in ([], ["/etc/resolv.conf"])  # a container's own


def test_the_command_says_its_version(run: Run) -> None:
    assert run("elasticrun", "--version").succeed().split() == [__version__]


def test_horovod_s_command_finds_the_library_and_torch(run: Run) -> None:
    assert "[X] PyTorch" in run("horovodrun", "--check-build").succeed()


def test_two_workers_train_in_one_container(run: Run) -> None:
    trained = run(
        *("elasticrun", "-np", "2", "--preemption", "off", "python", "/demo.py", "40"),
        flags=["--network=none", f"--volume={DEMO}:/demo.py:ro"],
    )
    assert "step 40, 2 workers" in trained.succeed()


def test_what_a_training_imports_is_compiled_already(image: Image) -> None:
    """As root on a root that can be written, where Python would keep what it has to compile."""
    name = "test-compiled"
    imports = "import elastic, horovod.torch, kubernetes.client, aetcd, torch, numpy"
    try:
        podman(
            "run", "--name", name, "--user=0", "--network=none", image.name, "python", "-c", imports
        )
        written = podman("diff", name)
    finally:
        podman("rm", "--force", name)
    assert ".pyc" not in written


class Hosts:
    """Agents and a driver, each in a container of its own, which find each other by name."""

    def __init__(self, run: Run, network: str, secret: Path) -> None:
        self._run = run
        self._network = network
        self._secret = secret
        self._names: list[str] = []

    def driver(self, *flags: str, steps: str) -> Program:
        discovery = ["--kubernetes-service", ALL_AGENTS, "--driver-port", "4711"]
        script = ["python", "/demo.py", steps]
        return self._start("driver", "elasticrun", "--job", "test", *discovery, *flags, *script)

    def agent(self, name: str) -> Program:
        """Listed by its address, as the name server tells it."""
        flags = "--job test --driver driver:4711 --slots 1 --grace 10 --ready-file /tmp/ready"
        command = f'exec elasticrun agent {flags} --host "$(hostname -i)"'
        return self._start(name, "sh", "-c", command, flags=[f"--network-alias={ALL_AGENTS}"])

    def full_name(self, name: str) -> str:
        return f"{self._network}-{name}"

    def _start(self, name: str, *command: str, flags: list[str] | None = None) -> Program:
        shared = [
            *(f"--network={self._network}", f"--network-alias={name}", "--shm-size=256m"),
            *("--env=ELASTIC_PREEMPTION=off", "--env=OMP_NUM_THREADS=1"),
            *("--env=ELASTIC_SECRET_FILE=/run/job.secret", f"--volume={DEMO}:/demo.py:ro"),
            f"--volume={self._secret}:/run/job.secret:ro",
        ]
        return self._run(*command, name=self.full_name(name), flags=[*shared, *(flags or [])])


@pytest.fixture
def secret(run: Run, tmp_path: Path) -> Path:
    """Made by the image, for its user."""
    folder = tmp_path / "secret"
    folder.mkdir()
    os.chown(folder, 1000, 1000)
    run("elasticrun", "secret", "/out/job", flags=[f"--volume={folder}:/out"]).succeed()
    return folder / "job"


@pytest.fixture
def hosts(run: Run, network: str, secret: Path) -> Hosts:
    return Hosts(run, network, secret)


def test_agents_and_a_driver_find_each_other_by_name_and_train(hosts: Hosts) -> None:
    agents = [hosts.agent(f"agent-{number}") for number in (1, 2)]
    driver = hosts.driver("-np", "2", steps="40")
    assert "step 40, 2 workers" in driver.succeed()
    assert all(agent.process.poll() is None for agent in agents)  # for the next job


def test_sigterm_to_an_agent_s_container_is_a_notice(hosts: Hosts) -> None:
    leaving, _ = hosts.agent("agent-1"), hosts.agent("agent-2")
    driver = hosts.driver("--min-np", "1", "--max-np", "2", steps=ENDLESS)
    driver.wait_for("step .*, 2 workers", 60)
    podman("exec", hosts.full_name("agent-1"), "test", "-e", "/tmp/ready")
    podman("kill", "--signal", "TERM", hosts.full_name("agent-1"))
    assert leaving.wait(20) == 0
    driver.wait_for("step .*, 1 workers", 60)
    assert "SIGTERM" in driver.output
    assert "died" not in driver.output


# ---- images/compose.yaml


@pytest.fixture
def compose(image: Image, secret: Path, tmp_path: Path) -> Iterator[list[str]]:
    """podman-compose with the file, in a folder of its own."""
    words = ["podman-compose", "--project-name", "test-compose", "--file", "compose.yaml"]
    folder = tmp_path / "compose"
    folder.mkdir()
    for name in ("compose.yaml", "demo.py"):
        (folder / name).write_bytes((ROOT / "images" / name).read_bytes())
    secret.rename(folder / "job.secret")
    try:
        subprocess.run([*words, "--version"], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("COMPOSE.YAML IS NOT TESTED: apt-get install podman-compose")
    yield words
    subprocess.run([*words, "down", "--timeout", "0"], cwd=folder, capture_output=True, timeout=60)
