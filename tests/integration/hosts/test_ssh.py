"""Agents started over a real ssh by a real sshd: the contract, all failures, and lifetimes after deaths."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic.driver.commandline import cli
from elastic.driver.launch.ssh import SshOptions, SshStarter
from elastic.driver.launch.starter import Bootstrap
from harness import wording
from harness.golden import recorded
from harness.history import SCRIPTS
from harness.processes import lives
from harness.sshd import SshHosts, missing, ssh_hosts
from harness.starter_contract import (
    DEADLINE_S,
    SECRET,
    Bench,
    Log,
    StarterContract,
    agents,
    bootstrap,
    closing,
    end_agents,
    failure,
    gone,
    noted,
    stand_in,
)
from harness.waiting import until

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

DRIVER = SCRIPTS / "starting.py"


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), ["alpha", "beta", "gamma"]) as hosts:
        yield hosts


@pytest.fixture
def hosts(servers) -> Iterator[SshHosts]:
    """Three of them, to which the way is free; a test may obstruct it."""
    yield servers
    servers.authorize()
    servers.trust()
    servers.configure()
    for server in servers.servers.values():
        if not server.runs:
            server.start()


def ssh_starter(hosts: SshHosts, log: Log, **options: Any) -> SshStarter:
    return SshStarter(
        SshOptions(**{"config": str(hosts.config), **options}),
        environ={**os.environ, "ELASTIC_JOB_SECRET": SECRET},
        log=lambda level, text: log.append((level, text)),
    )


def refusal(hosts: SshHosts, folder: Path, *, host: str = "alpha", job: str = "trains", **options):
    """Return the message of this failed start."""

    async def talk() -> str:
        starter = ssh_starter(hosts, [], **{"python": stand_in(folder), **options})
        try:
            return await failure(starter, bootstrap(host, job))
        finally:
            await starter.close()

    return asyncio.run(asyncio.wait_for(talk(), 100.0))


def succeeds(hosts: SshHosts, folder: Path, *, host: str = "alpha", **options) -> None:
    async def talk() -> None:
        log: Log = []
        starter = ssh_starter(hosts, log, **{"python": stand_in(folder), **options})
        async with closing(Bench(starter, folder, log)) as bench:
            await starter.start(bootstrap(host))
            assert bench.runs(host)

    asyncio.run(asyncio.wait_for(talk(), 100.0))


def clients_of(pid: int) -> list[psutil.Process]:
    """The ssh programs that a process has started. They and its other children may end meanwhile."""
    processes = psutil.process_iter(["name", "ppid"])
    return [each for each in processes if (each.info["name"], each.info["ppid"]) == ("ssh", pid)]


class TestContract(StarterContract):
    @pytest.fixture(autouse=True)
    def reach(self, hosts):
        self.hosts = hosts

    @contextlib.asynccontextmanager
    async def open(self, folder: Path) -> AsyncIterator[Bench]:
        log: Log = []
        starter = ssh_starter(self.hosts, log, python=stand_in(folder))
        async with closing(Bench(starter, folder, log)) as bench:
            yield bench

    async def test_no_secret_is_in_a_command_line_or_an_environment(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            ours = psutil.Process().children(recursive=True)  # both sides: sshd is a child too
            assert noted(bench.folder, "alpha")["pid"] in {process.pid for process in ours}
            client = clients_of(os.getpid())[0]
            assert "alpha" in client.cmdline()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    assert SECRET not in " ".join(process.cmdline())
            for process in ours:
                with contextlib.suppress(psutil.NoSuchProcess):
                    assert SECRET not in str(process.environ())

    async def test_a_silently_lost_connection_is_noticed(self, opened):
        async with opened as bench:
            python = str(bench.folder / ".python")
            starter = ssh_starter(self.hosts, bench.log, python=python, alive_s=1, alive_count=2)
            await starter.start(bootstrap("alpha"))
            stopped = self.hosts.servers["alpha"].processes()
            try:
                for process in stopped:
                    process.suspend()
                await until(lambda: bool(bench.log), "the end of ssh")
                assert [level for level, _ in bench.log] == ["warning"]
                assert "alpha" in bench.log[0][1] and "127.0.0.1" in bench.log[0][1]
            finally:
                for process in stopped:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()
            await starter.close()
            await bench.ended("alpha")  # its sshd has seen the end of the connection

    async def test_jump_host_of_the_ssh_configuration_is_used(self, opened):
        self.hosts.configure(beta="ProxyJump alpha")
        server = self.hosts.servers["alpha"]
        async with opened as bench:
            await bench.starter.start(bootstrap("beta"))
            assert server.processes()
            self.hosts.trust(["beta"])
            told = bootstrap("beta")
            recorded("messages", await failure(bench.starter, told))

    async def test_real_agent_without_a_driver_logs_the_failure_and_ends_with_its_starter(
        self, opened
    ):
        """Not a replacement: the real one, which finds no driver, logs it, and ends with its starter."""

        def real() -> list[psutil.Process]:
            found = []
            for process in self.hosts.servers["alpha"].processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "elastic.driver.agents.agent_main" in process.cmdline():
                        found.append(process)
            return found

        async with opened as bench:
            starter = ssh_starter(self.hosts, bench.log)
            told = Bootstrap("trains", "alpha", SECRET, drivers=["127.0.0.1:1"], slots=1)
            await starter.start(told)
            assert [p.cmdline()[0] for p in real()] == [sys.executable]
            awaited = "the agent on alpha: no driver"
            await until(lambda: any(awaited in text for _, text in bench.log), awaited)
            await starter.close()
            assert not real()


@pytest.mark.nightly
def test_doctor_checks_another_host(hosts, capsys):
    flags = ["-H", "alpha", "--ssh-config", str(hosts.config), "--remote-python", sys.executable]
    assert cli.main(["doctor", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    there = {each["what"]: each["level"] for each in found["alpha"]}
    assert there["torch"] == there["clock"] == "ok"
    assert {each["what"] for each in found["this host"]} == there.keys() - {"clock"}


# ---- each way it fails


def test_unknown_host_name_is_reported(hosts, tmp_path):
    name = "x" * 70  # too long to be asked for: no question leaves this machine
    hosts.configure(delta=f"HostName {name}")
    text = refusal(hosts, tmp_path, host="delta")
    recorded("messages", text, name)


def test_host_without_sshd_is_reported(hosts, tmp_path):
    server = hosts.servers["gamma"]
    server.stop()
    recorded("messages", refusal(hosts, tmp_path, host="gamma"), server.port)


@contextlib.contextmanager
def listener(hosts: SshHosts, backlog: int) -> Iterator[socket.socket]:
    """A port that is no sshd, as host ``delta``."""
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        hosts.configure(delta=f"HostName 127.0.0.1\n  Port {server.getsockname()[1]}")
        yield server


def test_host_that_drops_packets_is_reported(hosts, tmp_path):
    with listener(hosts, 0) as server, contextlib.ExitStack() as stack:
        for _ in range(4):  # its queue is full, so it drops what asks for a connection
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        text = refusal(hosts, tmp_path, host="delta", connect_s=1)
    recorded("messages", text)


def test_host_that_closes_the_connection_is_reported(hosts, tmp_path):
    async def talk() -> str:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        hosts.configure(delta=f"HostName 127.0.0.1\n  Port {port}")
        starter = ssh_starter(hosts, [])
        async with server:
            return await failure(starter, bootstrap("delta"))

    # What ssh says of it differs.
    assert asyncio.run(talk()).startswith(wording.CLOSED_BEFORE_LOGIN)


def test_unknown_host_key_is_refused_with_a_remedy(hosts, tmp_path):
    hosts.trust(["beta"])
    text = refusal(hosts, tmp_path)
    recorded("messages", text, hosts.config)
    hosts.trust(["alpha", "beta"])
    succeeds(hosts, tmp_path)


def test_changed_host_key_is_refused_with_a_remedy(hosts, tmp_path):
    lines = hosts.known.read_text().splitlines()
    keys = [line.split()[1:] for line in lines]
    hosts.known.write_text(
        "".join(
            f"{line.split()[0]} {' '.join(key)}\n"
            for line, key in zip(lines, keys[::-1], strict=True)
        )
    )
    text = refusal(hosts, tmp_path)
    recorded("messages", text, hosts.known)
    forget = re.search(r"ssh-keygen -f .*?(?=, then)", text)
    assert forget is not None
    subprocess.run(shlex.split(forget[0]), check=True, capture_output=True, timeout=20)
    recorded("messages", refusal(hosts, tmp_path))


def test_rejected_ssh_key_is_named(hosts, tmp_path):
    hosts.authorize(False)
    text = refusal(hosts, tmp_path)
    recorded("messages", text, hosts.key)
    other = tmp_path / "another"
    subprocess.run(["cp", hosts.key, other], check=True)
    recorded("messages", refusal(hosts, tmp_path, identity=str(other)), other, hosts.key)


def test_host_without_the_given_python_is_reported(hosts, tmp_path):
    recorded("messages", refusal(hosts, tmp_path, python="/no/python"))


def test_python_without_the_package_is_reported(hosts, tmp_path):
    bare = tmp_path / "bare.py"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    recorded("messages", refusal(hosts, tmp_path, python=str(bare)))


def test_host_with_another_release_is_reported_and_its_agent_ended(hosts, tmp_path):
    recorded("messages", refusal(hosts, tmp_path, job="old"))
    gone(noted(tmp_path, "alpha")["pid"])


def test_agent_that_starts_too_slowly_is_reported(hosts, tmp_path):
    text = refusal(hosts, tmp_path, job="silent", ready_s=2.0)
    recorded("messages", text)


def test_ssh_connection_that_breaks_during_the_start_is_reported(hosts, tmp_path):
    async def talk() -> str:
        starter = ssh_starter(hosts, [], python=stand_in(tmp_path))
        try:
            failing = asyncio.create_task(failure(starter, bootstrap("alpha", "silent")))
            await until(lambda: bool(agents(tmp_path)), "the agent")
            hosts.servers["alpha"].stop()
            return await failing
        finally:
            await starter.close()

    text = asyncio.run(asyncio.wait_for(talk(), 100.0))
    assert text.startswith(wording.SSH_FAILED % "alpha")


def test_port_and_key_may_be_given_without_a_configuration(hosts, tmp_path):
    port = hosts.servers["alpha"].port
    hosts.config.write_text(f"UserKnownHostsFile {hosts.known}\nIdentitiesOnly yes\n")
    succeeds(hosts, tmp_path, host="127.0.0.1", port=port, identity=str(hosts.key))


# ---- a job that grows

GROWS = """
import elastic, torch
elastic.init()
state = elastic.ObjectState()
@elastic.run
def train(state):
    while elastic.size() < 2:
        elastic.allreduce(torch.ones(1))
        state.commit()
    print("together", elastic.size(), flush=True)
train(state)
"""


def test_job_started_on_this_machine_adds_another_host_over_ssh(hosts, job, tmp_path):
    listed, script = tmp_path / "hosts", tmp_path / "discover.sh"
    listed.write_text("localhost:1\n")
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    flags = f"--min-np 1 --host-discovery-script {script} --ssh-config {hosts.config}"
    training = job(flags, ["python", "-c", GROWS])
    training.wait_for_world(1)
    (new := tmp_path / "new").write_text("localhost:1\nalpha:1\n")
    new.rename(listed)
    training.succeed(60)
    assert wording.LEFT_OUT not in training.output
    assert sorted(member["worker"][0] for member in training.worlds()[-1]["members"]) == [
        "alpha",
        "localhost",
    ]


# ---- who lives on


@pytest.mark.nightly
def test_an_exception_of_ranks_on_several_hosts_is_printed_once(hosts, job, tmp_path):
    running = job(
        f"-np 4 -H alpha:2,beta:2 --ssh-config {hosts.config}",
        ["python", SCRIPTS / "raising.py", "all-value", "before"],
    )
    assert running.wait(100) == 1
    assert len(re.findall(r"^\[\d\] ValueError: ", running.output, re.MULTILINE)) == 1
    assert running.output.count("Traceback (most recent call last)") == 1


def test_ctrl_c_kill_and_hangup_end_only_agents_bound_to_the_driver(hosts, tmp_path):
    names = {"alpha": True, "beta": False, "here1": True, "here2": False}
    told = {"python": stand_in(tmp_path), "config": str(hosts.config), "hosts": names}
    master, slave = pty.openpty()
    driver = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, str(DRIVER), json.dumps(told)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "ELASTIC_JOB_SECRET": SECRET},
    )
    os.close(slave)
    try:
        _wait_for(master, "started")
        pids = agents(tmp_path)
        assert set(pids) == set(names)
        ssh = clients_of(driver.pid)
        assert len(ssh) >= 1  # that of beta; that of alpha may not have ended yet
        os.write(master, b"\x03")
        _wait_for(master, "interrupted")
        assert all(lives(pid) for pid in pids.values())
        driver.send_signal(signal.SIGKILL)
        driver.wait(DEADLINE_S)
        os.close(master)
        master = -1
        for host, outlives in names.items():
            if not outlives:
                gone(pids[host])
        for process in ssh:
            gone(process.pid)
        assert lives(pids["alpha"]) and lives(pids["here1"])
    finally:
        driver.kill()
        driver.wait(DEADLINE_S)
        if master >= 0:
            os.close(master)
        end_agents(tmp_path)


def _wait_for(terminal: int, word: str) -> None:
    seen = ""
    deadline = time.monotonic() + DEADLINE_S
    while word not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"waited {DEADLINE_S} s for {word!r}; there was {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
