"""A real driver process and its light agents, started and observed together, for benchmarks and tests."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from elastic.driver.settings import Settings
from harness import wording
from harness.ports import free_port
from harness.processes import path_of_tests
from stress.load.agents import Begin, Order, answers

PATIENCE_S = 120.0
MB = 1 << 20

Found = TypeVar("Found")


class LightJob:
    """A driver and its agents. Use as a context manager; it leaves no process behind.

    Args:
        workers: number of workers.
        slots: number of workers of each host.
        folder: empty folder for the journal and the logs.
        lease_s: liveness timeout in seconds. Thousands of hosts on one machine share its cores, so their answers may
            take longer than those of real hosts.
    """

    def __init__(
        self, workers: int, slots: int, folder: Path, lease_s: float = Settings.lease_s
    ) -> None:
        self.hosts = hosts_of(workers, slots)
        self.workers = workers
        self.lease_s = lease_s
        self.patience_s = max(PATIENCE_S, workers / 100)
        self.folder = folder
        self.journal = folder / "journal.jsonl"
        self.port = free_port()
        self.secret = os.urandom(32).hex()
        self.began_at = time.monotonic()
        (folder / "hosts").write_text("".join(f"{h} slots={n}\n" for h, n in self.hosts.items()))
        (folder / "secret").write_text(self.secret + "\n")
        (folder / "secret").chmod(0o600)
        self._started: list[subprocess.Popen[bytes]] = []  # the agents' process, then each driver
        self._log = open(folder / "log", "ab")  # noqa: SIM115 -- lives as long as the job
        self._errors = open(folder / "agents.log", "ab")  # noqa: SIM115
        command = [sys.executable, "-m", "stress.load.agents"]
        self._agents = subprocess.Popen(
            command,
            env=os.environ | path_of_tests(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._started.append(self._agents)
        self._rest = b""
        self._answers: list[Any] = []

    def __enter__(self) -> LightJob:
        self.start_driver()
        self.order(Begin(f"127.0.0.1:{self.port}", self.secret, self.hosts, self.lease_s))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        for pipe in (self._agents.stdin, self._agents.stdout):
            assert pipe is not None
            pipe.close()
        self._log.close()
        self._errors.close()

    def start_driver(self) -> None:
        flags = ["-np", str(self.workers), "--min-np", "1", "--max-np", str(self.workers)]
        flags += ["--hostfile", str(self.folder / "hosts"), "--job", "scale"]
        flags += ["--journal", str(self.journal), "--resume", "--driver-port", str(self.port)]
        flags += ["--secret-file", str(self.folder / "secret"), "--network-interface", "lo"]
        flags += ["--lease", f"{self.lease_s:g}"]
        self.began_at = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "stress.load.driver", *flags, "--", "train.py"],
            env=os.environ | path_of_tests(),
            stdout=self._log,
            stderr=self._log,
        )
        self._started.append(process)

    def kill_driver(self) -> None:
        self._started[-1].send_signal(signal.SIGKILL)
        self._started[-1].wait()

    def cpu_s(self) -> float:
        """Return the CPU time of the driver so far, user and system."""
        spent = psutil.Process(self._started[-1].pid).cpu_times()
        return spent.user + spent.system

    def waited_s(self) -> float:
        """Return the time that the driver's main thread waited for a core."""
        return int(self._proc("schedstat").split()[1]) * 1e-9

    def peak_mb(self) -> float:
        """Return the peak memory of the driver so far."""
        for line in self._proc("status").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MB
        raise RuntimeError("this kernel does not report the peak memory of a process")

    def _proc(self, name: str) -> str:
        return Path(f"/proc/{self._started[-1].pid}/{name}").read_text()

    def order(self, order: Order) -> None:
        assert self._agents.stdin is not None
        self._agents.stdin.write(msgspec.json.encode(order) + b"\n")
        self._agents.stdin.flush()

    def wait(self, kind: type[Found], accepted: Callable[[Found], bool] = lambda it: True) -> Found:
        """Return the next answer of this kind that is accepted; earlier answers are dropped."""
        deadline = time.monotonic() + self.patience_s
        while True:
            while self._answers:
                answer = self._answers.pop(0)
                if isinstance(answer, kind) and accepted(answer):
                    return answer
            self._answers += self._read(deadline, kind.__name__)

    def _read(self, deadline: float, what: str) -> Iterable[Any]:
        assert self._agents.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._agents.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(
                    f"no {what} within {self.patience_s:g} s; output of the driver:\n{self._tail('log')}"
                )
        data = os.read(self._agents.stdout.fileno(), 1 << 16)
        if not data:
            raise RuntimeError(f"the agents have ended; their output:\n{self._tail('agents.log')}")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [answers.decode(line) for line in lines]

    def _tail(self, name: str) -> str:
        return "\n".join((self.folder / name).read_text().splitlines()[-30:])

    def page_link(self) -> str:
        """Return the link of the live page with its token, from the driver's log."""
        found = re.findall(wording.PAGE_JOB, (self.folder / "log").read_text())
        if not found:
            raise RuntimeError(f"the driver serves no page; its output:\n{self._tail('log')}")
        return str(found[-1])

    def lost_at(self, host: str) -> float:
        """Return when the driver noticed the loss of a host, from its journal."""
        begin, end = b'"event":{"type":"HostLost","host":"%b"' % host.encode(), 0.0
        for line in self.journal.read_bytes().splitlines():
            if begin in line[:200]:
                end = float(json.loads(line)["at"])
        if not end:
            raise RuntimeError(f"the journal has no loss of {host}")
        return end


def hosts_of(workers: int, slots: int) -> dict[str, int]:
    full, rest = divmod(workers, slots)
    hosts = {f"h{number}": slots for number in range(full)}
    return {**hosts, f"h{full}": rest} if rest else hosts
