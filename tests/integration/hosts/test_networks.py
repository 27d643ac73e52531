"""Jobs without IPv4: on one machine, and over a link between two network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.prometheus_metrics import JobMetrics, MetricsServer
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.driver.network.interface_selection import choose_bind
from elastic.driver.network.local_interfaces import listen_address, own_addresses, worker_network
from elastic.errors import Invalid
from elastic.rendezvous import worker_settings
from elastic.rendezvous.find_rank0 import meet
from elastic.rendezvous.launcher_detection import ByAddress, LauncherEnv
from elastic.rendezvous.store import listen
from harness import wording
from harness.etcd import START_S, Member
from harness.golden import raises
from harness.history import SCRIPTS, STAY_AWAY, History, sizes
from harness.job import Job, elasticrun
from harness.ports import free_port
from harness.waiting import wait_until

HERE, THERE = "fd77::1", "fd77::2"
CLONE_NEWNET = 0x40000000
TROUBLE = {"ELASTIC_DIGESTS": "1", "STEPS": "12", "DIE": "slot=1,step=5,place=backward"}


def has_ipv6() -> bool:
    try:
        listen("::1").close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="needs IPv6, which is turned off here")


def check(training: Job, *, driver: str, stores: set[str]) -> None:
    """The job has lost one of three workers and nothing else; driver and stores were at these addresses."""
    training.succeed()
    assert sizes(training)[-1] == 2
    History(training).check(steps=12)
    training.wait_for(wording.LISTENING % driver)
    assert {world["store"][0] for world in training.worlds()} <= stores


# ---- one machine


@pytest.mark.forked
def test_a_job_over_loopback_survives_a_death(job: Callable[..., Job]):
    training = job(
        f"-np 3 --min-np 1 {STAY_AWAY} --network-interface fd99::/16,::1 --verbose",
        ["python", SCRIPTS / "training.py"],
        env=TROUBLE,
    )
    check(training, driver="::1", stores={"::1"})


def test_ranks_of_a_launcher_rendezvous_over_ipv6():
    way = ByAddress("::1", free_port(), b"secret")
    env = dataclasses.replace(worker_settings.read({"HOROVOD_START_TIMEOUT": "20"}), bind_host="")
    with ThreadPoolExecutor(2) as pool:
        ranks = [LauncherEnv("srun", rank, 2, None, way) for rank in range(2)]
        met = [*pool.map(lambda rank: meet(rank, env), ranks)]
    assert [each.env.bind_host for each in met] == ["::1", "::1"]
    for each in reversed(met):
        each.store.close()


def test_metrics_are_served():
    metrics = MetricsServer("::1", 0, JobMetrics(TimeSpent(JobView())), threading.Lock())
    try:
        with urllib.request.urlopen(f"http://[::1]:{metrics.port}/metrics", timeout=10) as answer:
            assert b"elastic_generation" in answer.read()
    finally:
        metrics.close()


# ---- two namespaces


class Ends(NamedTuple):
    """Names of two network namespaces with one link between them, which has IPv6 only: HERE and THERE."""

    here: str
    there: str


@pytest.fixture(scope="module")
def link() -> Iterator[Ends]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nsenter")):
        pytest.skip("needs root, ip and nsenter to make network namespaces")
    ends = Ends(f"hvd{os.getpid()}a", f"hvd{os.getpid()}b")
    try:
        made = _ip("netns add", ends.here, check=False)
        if made.returncode != 0:
            pytest.skip(f"network namespaces can't be made here: {made.stderr.strip()}")
        _ip("netns add", ends.there)
        _ip("-n", ends.here, "link add eth1 type veth peer name eth1 netns", ends.there)
        for end, address in zip(ends, (HERE, THERE), strict=True):
            _ip("-n", end, "link set lo up")
            _ip("-n", end, f"address add {address}/64 dev eth1 nodad")
            _ip("-n", end, "link set eth1 up")
        for end in ends:  # The kernel reports the state of the link a moment after it is up.
            wait_until(functools.partial(has_carrier, end), "the link between the namespaces", 20.0)
        yield ends
    finally:
        for end in ends:
            _ip("netns delete", end, check=False)


def has_carrier(end: str) -> bool:
    with inside(end):
        return all(each.up for each in own_addresses() if each.name == "eth1")


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["ip", *(part for word in words for part in word.split())]
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=10)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and the processes that it starts, are in that network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    after = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert libc.setns(after, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(before, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(before)
        os.close(after)


@pytest.mark.nightly
@pytest.mark.etcd
def test_agents_over_an_ipv6_only_link_survive_a_death(
    job: Callable[..., Job], link: Ends, tmp_path: Path
):
    """Driver, etcd and one agent at one end; at the other an agent with two workers, of which one dies."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    with contextlib.ExitStack() as running:
        with inside(link.here):
            etcd = running.enter_context(etcd_here(tmp_path / "etcd"))
        flags = f"--etcd {etcd} --job six --secret-file {secret}"
        for end, host, slots in ((link.here, "here", 1), (link.there, "there", 2)):
            with inside(end):
                running.enter_context(agent(f"{flags} --host {host} --slots {slots}", tmp_path))
        with inside(link.here):
            training = job(
                f"-np 3 --min-np 1 {STAY_AWAY} {flags} --verbose",
                ["python", SCRIPTS / "training.py"],
            )
        check(training, driver=HERE, stores={HERE, THERE})
        hosts = {member["worker"][0] for member in training.worlds()[-1]["members"]}
        assert hosts == {"here", "there"}


@contextlib.contextmanager
def etcd_here(folder: Path) -> Iterator[str]:
    """Return its address. This process does not call it: grpc's threads would stay in the namespace."""
    member = Member(
        folder, "one", None, ["--heartbeat-interval", "10", "--election-timeout", "100"]
    )
    member.endpoint = f"[{HERE}]:{member.client_port}"
    try:
        member.start()
        deadline = time.monotonic() + START_S
        while not _healthy(member.endpoint):
            assert member.process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "etcd has not started"
            time.sleep(0.02)
        yield member.endpoint
    finally:
        member.kill()


def _healthy(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/health", timeout=5) as answer:
            return b'"true"' in answer.read()
    except OSError:
        return False


@contextlib.contextmanager
def agent(flags: str, folder: Path) -> Iterator[None]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', '')}"
    env = own | TROUBLE | {"PATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([elasticrun(), "agent", *flags.split()], cwd=folder, env=env)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def test_listen_address_of_a_host_without_ipv4_is_ipv6_and_link_local_is_refused(link: Ends):
    with inside(link.here):
        assert {str(each) for each in own_addresses() if each.name == "eth1"} >= {f"eth1 {HERE}/64"}
        assert asyncio.run(listen_address([], [THERE])) == HERE
        assert asyncio.run(listen_address(["eth1"], [THERE])) == HERE
        assert choose_bind([], own_addresses(), local=HERE, several=True) == HERE
        assert choose_bind([], own_addresses(), local="127.0.0.1", several=True) == HERE
        assert worker_network(HERE, {})["NCCL_SOCKET_FAMILY"] == "AF_INET6"
        with pytest.raises(Invalid, match=r"eth9 .*\beth1\b"):
            choose_bind(["eth9"], own_addresses(), local=HERE)
        _ip("-n", link.here, f"address delete {HERE}/64 dev eth1")
        try:
            with pytest.raises(Invalid, match=r"fe80::\S+ of eth1 .*--network-interface"):
                choose_bind(["eth1"], own_addresses(), local="::1")
            with pytest.raises(Invalid, match=r"fe80::\S+ .*--network-interface"):
                asyncio.run(listen_address([], ["fe80::1%eth1"]))
            with raises(Invalid):
                asyncio.run(listen_address([], [THERE]))
        finally:
            _ip("-n", link.here, f"address add {HERE}/64 dev eth1 nodad")
