"""The image is small and reproducible, and its containers train with a read-only root and without permissions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elastic.version import __version__
from harness import wording
from harness.program import Program
from images.conftest import IMAGES, ROOT, Image, Run, build, config, podman

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1200)]

DEMO = IMAGES / "demo.py"
MOST_MB = 400
ENDLESS = "100000"
ALL_AGENTS = "agents"  # the name behind which the driver finds them


def test_a_node_fetches_at_most_400_mb(image: Image) -> None:
    assert image.packed_mb <= MOST_MB


def test_image_contains_the_current_sources(run: Run) -> None:
    """Whatever of an earlier build was used."""
    folder = "/opt/venv/lib/python3.11/site-packages"
    listed = run(
        "sh", "-c", f"cd {folder} && find elastic -name '*.py' | xargs sha256sum"
    ).succeed()
    there = {name: digest for digest, name in map(str.split, listed.splitlines())}
    assert len(there) > 300
    changed = [
        name
        for name, digest in there.items()
        if hashlib.sha256((ROOT / name).read_bytes()).hexdigest() != digest
    ]
    assert changed == []


def test_the_same_sources_give_the_same_digest(image: Image) -> None:
    again = build("again", FRESH="1")
    podman("image", "rm", "--force", again.name)
    assert again.digest == image.digest


def test_image_runs_as_user_1000(image: Image, run: Run) -> None:
    assert config(image)["User"] == "1000:1000"
    assert run("id", "--user").succeed().split() == ["1000"]


def test_no_file_of_the_build_machine_remains_in_the_image(run: Run) -> None:
    places = "/mnt /root /build /wheel /etc/resolv.conf /etc/apt/sources.list /var/log"
    left = run("sh", "-c", f"find {places} -type f -size +0 2>/dev/null; true", flags=["--user=0"])
    files = [file for file in left.succeed().split() if file != "/etc/resolv.conf"]  # its own
    assert files == ["/root/.bashrc", "/root/.profile"]
    apt = run("sh", "-c", "cat /etc/apt/sources.list.d/* | grep ^URIs:").succeed().splitlines()
    assert {*apt} == {
        f"URIs: http://deb.debian.org/{name}" for name in ("debian", "debian-security")
    }


def test_elasticrun_in_the_image_prints_its_version(run: Run) -> None:
    assert run("elasticrun", "--version").succeed().split() == [__version__]


def test_horovod_s_command_finds_the_library_and_torch(run: Run) -> None:
    found = run("horovodrun", "--check-build").succeed()
    assert "[X] PyTorch" in found and wording.SHARED_MEMORY in found


def test_two_workers_train_in_one_container(run: Run) -> None:
    trained = run(
        *("elasticrun", "-np", "2", "--preemption", "off", "python", "/demo.py", "40"),
        flags=["--network=none", f"--volume={DEMO}:/demo.py:ro"],
    )
    assert "step 40, 2 workers" in trained.succeed()


def test_imported_modules_are_precompiled(image: Image) -> None:
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


class Compose:
    """podman-compose with the file, in a folder of its own."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._words = [str(program), "--project-name", folder.name, "--file", "compose.yaml"]
        self._folder = folder

    def __call__(self, *words: str, env: Mapping[str, str] | None = None) -> None:
        done = subprocess.run(
            [*self._words, *words],
            cwd=self._folder,
            env=os.environ | (env or {}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def logs(self, service: str) -> Program:
        """What it says, from its beginning on."""
        words = [*self._words, "logs", "--follow", service]
        mark = "ELASTIC_TEST_COMPOSE"
        return Program(words, folder=self._folder, env=os.environ, mark=mark, called=service)


@pytest.fixture
def compose(image: Image, secret: Path, tmp_path: Path) -> Iterator[Compose]:
    """All of the file runs."""
    program = Path(sys.executable).parent / "podman-compose"
    if not program.exists():
        pytest.skip(f"COMPOSE.YAML IS NOT TESTED: no {program}; `make images` installs it")
    folder = tmp_path / f"test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    for name in ("compose.yaml", "demo.py"):
        (folder / name).write_bytes((IMAGES / name).read_bytes())
    secret.rename(folder / "job.secret")
    found = Compose(program, folder)
    try:
        found("up", "--detach", env={"IMAGE": image.name, "STEPS": ENDLESS})
        yield found
    finally:
        found("down", "--timeout", "0")


def test_compose_hosts_survive_a_kill_and_a_stop(compose: Compose) -> None:
    driver = compose.logs("driver")
    try:
        driver.wait_for("step .*, 3 workers", 60)
        compose("kill", "agent-2")
        driver.wait_for("lost host", 20)
        driver.wait_for(wording.RECOVERED_WORKERS, 20)
        steps = len([line for line in driver.lines if "3 workers, loss" in line])
        compose("start", "agent-2")
        driver.wait_for("step .*, 3 workers", 60, count=steps + 1)
        compose("stop", "agent-3")
        driver.wait_for(wording.CHANGED_WORKERS_LEAVES, 20)
        assert driver.output.count(wording.RECOVERED) == 1, "a stop costs no step"
    finally:
        driver.end()
