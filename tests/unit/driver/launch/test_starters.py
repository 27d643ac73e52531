"""Starters of agents: one contract for all, child processes, and each reason why no agent was started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from shutil import which
from typing import Any
from unittest.mock import create_autospec

import psutil
import pytest

from elastic.driver.launch.child_processes import ChildProcesses, as_logged
from elastic.driver.launch.srun import srun, srun_starter
from elastic.driver.launch.ssh import REMOTE, SshOptions, SshStarter
from elastic.driver.launch.ssh_failures import why_ended, why_no_agent, why_ssh_failed
from elastic.driver.launch.starter import READY, StartFailed
from elastic.driver.launch.starter_by_host import StarterByHost
from elastic.driver.launch.subprocess_starter import ChildStarter
from elastic.errors import Invalid
from elastic.version import __version__
from harness.fakes.starter import FakeStarter
from harness.golden import raises, recorded
from harness.processes import lives
from harness.starter_contract import (
    SECRET,
    Bench,
    Log,
    StarterContract,
    agents,
    bootstrap,
    closing,
    failure,
    gone,
    noted,
    stand_in,
)
from harness.waiting import until

# ---- the contract


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Children that this process had before the test."""
    _others.update(child.pid for child in psutil.Process().children())
    yield
    _others.clear()


_others: set[int] = set()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in _others]


class FakeBench(Bench):
    starter: FakeStarter

    def told(self, host: str) -> dict[str, Any]:
        told = self.starter.running[host]
        return {"secret": told.secret, "drivers": told.drivers}

    def runs(self, host: str) -> bool:
        return host in self.starter.running

    def end(self, host: str) -> None:
        self.starter.end(host)

    async def ended(self, host: str) -> None:
        assert not self.runs(host)


class TestFake(StarterContract):
    @contextlib.asynccontextmanager
    async def open(self, folder: Path) -> AsyncIterator[Bench]:
        starter = FakeStarter()
        why = "the bootstrap message contains no driver address"
        starter.why_not = lambda told: why if told.job == "wrong" else ""
        async with closing(FakeBench(starter, folder, [])) as bench:
            yield bench


def child_starter(folder: Path, log: Log, **rest: Any) -> ChildStarter:
    return ChildStarter(
        environ={"PATH": os.defpath, "ELASTIC_JOB_SECRET": SECRET, "COLOUR": "green"},
        log=lambda level, text: log.append((level, text)),
        python=stand_in(folder),
        **rest,
    )


@pytest.mark.slow
class TestChild(StarterContract):
    rest: dict[str, Any] = {}  # noqa: RUF012

    @contextlib.asynccontextmanager
    async def open(self, folder: Path) -> AsyncIterator[Bench]:
        log: Log = []
        async with closing(Bench(child_starter(folder, log, **self.rest), folder, log)) as bench:
            yield bench

    async def test_child_has_its_own_session_and_receives_the_secret_only_on_stdin(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            pid = noted(bench.folder, "alpha")["pid"]
            assert os.getsid(pid) == pid != os.getsid(0)
            environ = noted(bench.folder, "alpha")["environ"]
            assert environ["COLOUR"] == "green"
            assert SECRET not in str(environ) + str(psutil.Process(pid).cmdline())

    async def test_agent_that_outlives_its_starter_is_not_its_child(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha", outlives=True))
            await until(lambda: not children(), "the end of the child")
            pid = noted(bench.folder, "alpha")["pid"]
            assert os.getsid(pid) == pid

    async def test_child_that_is_not_ready_in_time_is_killed(self, opened):
        async with opened as bench:
            starter = child_starter(bench.folder, bench.log, ready_s=0.3)
            text = await failure(starter, bootstrap("alpha", "silent"))
            assert "within 0.3 s" in text
            await until(lambda: not children(), "its end")
            await starter.close()

    async def test_cancelled_start_kills_the_child(self, opened):
        async with opened as bench:
            starting = asyncio.create_task(bench.starter.start(bootstrap("alpha", "silent")))
            await until(lambda: bool(children()), "its start")
            starting.cancel()
            await until(lambda: not children(), "its end")

    async def test_child_of_another_release_is_ended(self, opened):
        async with opened as bench:
            text = await failure(bench.starter, bootstrap("alpha", "old"))
            recorded("messages", text)
            await asyncio.to_thread(gone, noted(bench.folder, "alpha")["pid"])

    async def test_child_that_dies_during_its_start_is_reported(self, opened):
        async with opened as bench:
            recorded("messages", await failure(bench.starter, bootstrap("alpha", "killed")))

    async def test_output_before_readiness_is_accepted(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha", "noisy"))

    async def test_later_output_of_an_agent_is_logged_within_limits(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha", "chatty"))
            await until(lambda: ("debug", "the agent on alpha: a step") in bench.log, "the words")
            warnings = [text for level, text in bench.log if level == "warning"]
            recorded("messages", warnings[0])
            recorded("messages", warnings[19:])

    async def test_unexpected_end_of_an_agent_is_logged_once(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha", "broken"))
            await until(lambda: bool(bench.log), "the end")
            await bench.starter.start(bootstrap("beta"))
            await bench.starter.close()
            assert bench.log == [("warning", "the agent on alpha ended with exit code 3")]

    async def test_agent_that_ignores_the_end_is_killed(self, opened):
        async with opened as bench:
            starter = child_starter(bench.folder, bench.log, close_s=0.1)
            await starter.start(bootstrap("alpha", "stubborn"))
            await starter.close()
            assert not lives(noted(bench.folder, "alpha")["pid"])

    async def test_closing_ends_pending_and_running_starts(self, opened):
        async with opened as bench:
            starter = child_starter(bench.folder, bench.log, at_once=1)
            bootstraps = [bootstrap(host, "silent") for host in ("alpha", "beta")]
            failures = [asyncio.create_task(failure(starter, each)) for each in bootstraps]
            await until(lambda: bool(agents(bench.folder)), "the first")
            await starter.close()
            for each in failures:
                recorded("messages", await each)
            assert list(agents(bench.folder)) == ["alpha"]

    async def test_number_of_concurrent_starts_is_limited(self, opened):
        async with opened as bench:
            starter = child_starter(bench.folder, bench.log, at_once=3)
            hosts = [f"host{letter}" for letter in "abcdefg"]
            starts = {h: asyncio.create_task(starter.start(bootstrap(h, "silent"))) for h in hosts}
            for ended in range(len(hosts) - 3):
                await until(lambda n=ended: len(agents(bench.folder)) == n + 3, "the next")  # type: ignore[misc]
                assert len(children()) == 3
                host = next(h for h in agents(bench.folder) if not starts[h].done())
                os.kill(agents(bench.folder)[host], signal.SIGKILL)
                with pytest.raises(StartFailed):
                    await starts[host]
            await starter.close()
            await asyncio.gather(*starts.values(), return_exceptions=True)

    async def test_restarted_host_has_one_agent(self, opened):
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            first = noted(bench.folder, "alpha")["pid"]
            await bench.starter.start(bootstrap("alpha"))
            assert not lives(first)
            assert bench.runs("alpha") and bench.log == []

    async def test_missing_python_is_named(self, opened):
        async with opened:
            starter = ChildStarter(environ={}, log=print, python="/no/python")
            text = await failure(starter, bootstrap("alpha"))
            recorded("messages", text)

    async def test_thread_waits_without_pidfd(self, opened, monkeypatch):
        def refuse(pid: int) -> int:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "pidfd_open", refuse)
        async with opened as bench:
            await bench.starter.start(bootstrap("alpha"))
            recorded("messages", await failure(bench.starter, bootstrap("beta", "wrong")))
            await bench.starter.close()
            assert not bench.runs("alpha")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["child", "ssh"])
def test_agent_imports_no_module_from_its_working_directory(by, tmp_path, monkeypatch):
    (tmp_path / "socket.py").write_text("raise SystemExit('not what was meant')")
    command, stdin = ["/bin/sh", "-c", REMOTE], f"{sys.executable}\n\n\n"
    if by == "child":
        begin = create_autospec(ChildProcesses.begin)
        monkeypatch.setattr(ChildProcesses, "begin", begin)
        asyncio.run(ChildStarter(environ={}, log=print).start(bootstrap("alpha")))
        command, stdin = begin.call_args.args[2], "\n"
    ended = subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    recorded("messages", ended.stderr)


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("elastic | 12:01:33 | serves a driver", "debug", "serves a driver"),
        ("elastic | warning: no driver to serve", "warning", "no driver to serve"),
        ("elastic | 12:01:33 | error: the driver refuses it", "error", "the driver refuses it"),
        ("elastic |   and a second line", "debug", "and a second line"),
        ("ValueError: 3", "warning", "ValueError: 3"),
        ("", "debug", ""),
    ],
)
def test_log_lines_of_an_agent_keep_their_levels(line, level, text):
    assert as_logged(line) == (level, text)


# ---- choice of the starter


async def test_this_machine_uses_a_child_and_other_hosts_the_other_starter():
    here, there = FakeStarter(), FakeStarter()
    elsewhere = {"a": None, "b": "it is another machine (10.0.0.2)"}
    starter = StarterByHost(elsewhere.__getitem__, here=here, there=there)
    there.why_not = lambda bootstrap: "it is tired"
    await starter.start(bootstrap("a"))
    assert (list(here.running), there.started) == (["a"], [])
    await failure(starter, bootstrap("b"))
    await starter.close()
    assert not here.running
    assert "ending" in await failure(here, bootstrap("a"))
    assert "ending" in await failure(there, bootstrap("b"))


# ---- ssh, without connections


@pytest.mark.parametrize("host", ["-oProxyCommand=touch", "a b", "a;b", "$(a)", "u@h", "", "a:b:c"])
async def test_invalid_host_name_is_not_passed_to_ssh(host):
    starter = SshStarter(SshOptions(program="/no/ssh"), environ={}, log=print)
    recorded("messages", await failure(starter, bootstrap(host)))


@pytest.mark.parametrize("host", ["gpu7", "10.0.0.7", "fe80::1", "a_b.c-d"])
async def test_missing_ssh_program_is_reported_with_the_package(host):
    starter = SshStarter(SshOptions(program="/no/ssh"), environ={}, log=print)
    with raises(StartFailed):
        await starter.start(bootstrap(host))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"identity": "/no/key"}, "--ssh-identity-file /no/key"),
        ({"config": "/no/config"}, "--ssh-config /no/config"),
        *(({"python": each}, "--remote-python") for each in ("", "-c", "~/python", "a\nb")),
    ],
)
def test_invalid_options_are_rejected(options, named):
    with pytest.raises(Invalid, match=named):
        SshOptions(**options)


async def test_ssh_command_is_non_interactive_and_respects_the_users_configuration():
    command = SshStarter(SshOptions(port=2222), environ={}, log=print).command("gpu7")
    assert command[:4] == ["ssh", "-T", "-p", "2222"]
    assert command[-3:] == ["--", "gpu7", REMOTE]
    settings = {word.partition("=")[0] for word in command if "=" in word and word != REMOTE}
    assert {"BatchMode", "ConnectTimeout", "ServerAliveInterval", "ControlMaster"} <= settings
    assert not {s for s in settings if "Key" in s or s in ("User", "Port", "ProxyJump")}


def test_srun_runs_one_overlapping_step_on_the_node():
    command = srun("7", "gpu7")
    assert command[0] == "srun"
    assert {"--jobid=7", "--nodelist=gpu7", "--nodes=1", "--ntasks=1", "--overlap"} <= {*command}


async def test_missing_srun_is_a_failed_start():
    starter = srun_starter("7", environ={"PATH": "/no"}, python="/opt/python", log=print)
    with raises(StartFailed):
        await starter.start(bootstrap("gpu7"))


SHELLS = [shell for shell in ("sh", "bash", "dash", "csh", "tcsh", "fish", "zsh") if which(shell)]


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_remote_command_finds_a_python_in_any_shell(shell, tmp_path):
    folder = tmp_path / 'it\'s a "folder" of $HOME; \\ !x'
    folder.mkdir()
    (folder / "nothing").mkdir()
    python = stand_in(folder)
    plain = folder / "python9"
    plain.symlink_to(python)

    def run(*pythons: str) -> tuple[int, str]:
        done = subprocess.run(
            [shell, "-c", REMOTE],
            input="".join(f"{each}\n" for each in pythons)
            + json.dumps({"job": "trains", "host": "alpha", "outlives": False})
            + "\n",
            env={"PATH": f"{folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.returncode, done.stdout + done.stderr

    ready = (0, f"{READY} {__version__}\n")
    assert run(python, python) == ready
    assert run(str(folder / "nothing"), python) == ready  # a directory is not executable
    assert run(str(folder / "missing"), "python9") == ready
    assert run("", "python9") == ready
    recorded("messages", run("/no/python", "no-python"))


# ---- reasons


@pytest.mark.parametrize(
    "output",
    [
        "ssh: Could not resolve hostname alpha: Name or service not known\r\n",
        "debug1: connect to address 10.0.0.7 port 22: Connection refused\r\n"
        "ssh: connect to host 10.0.0.7 port 22: Connection refused\r\n",
        "debug1: Server host key: ssh-ed25519 SHA256:abc\r\nHost key verification failed.\r\n",
        "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\r\n"
        "Offending ED25519 key in /k:3\r\nHost key for [a]:22 has changed and\r\n"
        "Host key verification failed.\r\n",
        "debug1: Offering public key: /home/ana/.ssh/id RSA SHA256:x agent\r\n"
        "ana@alpha.example: Permission denied (publickey,password).\r\n",
        "kex_exchange_identification: Connection closed by remote host\r\n"
        "Connection closed by 10.0.0.7 port 22\r\n",
        "debug1: x\r\n/c: line 1: Bad configuration option: hots\r\n/c: terminating, 1 bad\r\n",
        "",
    ],
)
def test_reason_of_an_ssh_failure_is_found(output):
    recorded("log", why_ssh_failed("alpha", output, "-p 22 alpha"))


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (
            1,
            "/p/python3: Error while finding module specification for 'elastic.driver.agents.agent_main'"
            " (ModuleNotFoundError: No module named 'elastic')\n",
        ),
        (1, "/p/python3: No module named elastic.driver.agents.agent_main\n"),
        (1, "Traceback (most recent call last):\nModuleNotFoundError: No module named 'msgspec'\n"),
        (
            127,
            "debug1: Sending command\r\nhvd-elastic: no python: /a/python python3\n"
            "debug1: Exit status 127\r\n",
        ),
        (1, "SyntaxError: future feature annotations is not defined\n"),
        (1, "This account is currently not available.\n"),
        (0, ""),
        (-9, ""),
        (None, "Authenticated to alpha\r\nWelcome!\n"),
    ],
)
def test_reason_for_a_missing_agent_is_found(code, output):
    recorded("log", why_no_agent("alpha", code, output, ours="1.2", release=None, limit_s=60.0))


def test_other_release_is_named():
    recorded("messages", why_no_agent("alpha", None, "", ours="1.2", release="1.1", limit_s=60.0))


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (255, "Timeout, server 10.0.0.7 not responding.\r\nTransferred: sent 3\r\n"),
        (1, "ValueError: 3\n"),
        (0, "elastic | the job is over\n"),
        (-9, ""),
    ],
)
def test_reason_for_the_end_of_an_agent_is_found(code, output):
    recorded("log", why_ended("alpha", code, output, by_ssh=True))
