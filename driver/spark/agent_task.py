"""Spark task that runs an agent as a child process until the agent exits. Makes no decisions.

In a barrier stage, one task of each executor runs an agent, with one slot for each task of the executor. An ordinary
task runs an agent with one slot, because executors may be added and removed at any time. The agent reads its bootstrap
from standard input, which stays open while the task runs. The agent therefore exits with the task, and the workers exit
with the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elastic import version
from elastic.driver.launch.agent_folder import make_folder, own_path, private, programs, sweep
from elastic.driver.launch.agent_modules import BOOT, agents_path, users_modules
from elastic.driver.launch.child_processes import as_logged
from elastic.driver.launch.ssh_failures import why_ended
from elastic.driver.launch.starter import READY, Bootstrap
from elastic.driver.launch.worker_environment import without_secrets
from elastic.driver.spark.task_environment import agents_environ, executor_of_command, host_of
from elastic.errors import ElasticError

# timeout for the first start of Python, in seconds; it is slow on a machine without cached files
PYTHON_S = 60.0
LOOK_S = 1.0  # interval between two checks of the parent process, in seconds
END_S = 12.0  # timeout for an agent to kill its workers and exit, in seconds
LINES_KEPT = 20


class AgentEnded(ElasticError, RuntimeError):
    """Error raised when the agent of a Spark task fails. The message contains the last line of the agent's output."""


@dataclass(frozen=True)
class AgentTask:
    """Function that a Spark task executes. ``call`` is a broadcast variable with the workers' pickled function."""

    bootstrap: bytes  # encoded bootstrap of the agent, without the host
    call: Any
    barrier: bool
    threads: bool  # whether to set the workers' number of threads to the number of cores of a task

    def __call__(self, _: Iterable[Any]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext, TaskContext

        context: Any = TaskContext.get()
        gpus = context.resources().get("gpu")
        own = json.dumps([_executor_process(), None if gpus is None else gpus.addresses])
        if not self.barrier:
            self._hold(context, [own])
            return iter(())
        barrier = BarrierTaskContext.get()
        tasks = barrier.allGather(own)
        here = [number for number, each in enumerate(tasks) if _same_executor(each, own)]
        if here[0] == barrier.partitionId():
            self._hold(context, [tasks[number] for number in here])
        # The other tasks keep their Spark slots occupied until the agents have exited.
        barrier.barrier()
        return iter(())

    def _hold(self, context: Any, tasks: list[str]) -> None:
        """Run the agent for these tasks until it exits.

        Raises:
            AgentEnded: the agent exited with an error.
            OSError, SubprocessError: the agent could not be started.
        """
        lists = [gpus for _, gpus in map(json.loads, tasks)]
        gpus = None if lists[0] is None else [address for each in lists for address in each]
        host = host_of(socket.gethostname(), _executor(), context.taskAttemptId())
        config = msgspec.json.decode(self.bootstrap, type=Bootstrap)
        config = msgspec.structs.replace(config, host=host, slots=len(tasks), folder=os.getcwd())
        sweep()
        folder, lock = make_folder()
        try:
            with open(folder / "call", "xb", opener=private) as file:
                file.write(self.call.value)
            own = own_path(sys.executable, PYTHON_S)
            users = users_modules(sys.path, own, "")
            environ = agents_environ(
                without_secrets(os.environ),
                programs=programs(sys.executable, folder),
                modules=users,
                gpus=gpus,
                threads=context.cpus() if self.threads else None,
                call=str(folder / "call"),
                folder=os.getcwd(),
            )
            package = os.path.dirname(os.path.dirname(os.path.abspath(version.__file__)))
            path = ":".join(agents_path(own, package, users))
            _run_agent([sys.executable, "-I", "-c", BOOT, path], environ, config)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _run_agent(command: list[str], environ: dict[str, str], config: Bootstrap) -> None:
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    lines: deque[str] = deque(maxlen=LINES_KEPT)
    try:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the exit is reported below
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
        for line in _lines(process.stdout.fileno()):
            lines.append(line)
            if as_logged(line)[0] != "debug" and not line.startswith(READY):
                print(line, file=sys.stderr, flush=True)  # stderr is written to the executor's log.
    finally:
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait(END_S)
    if code:
        raise AgentEnded(why_ended(config.host, code, "\n".join(lines), by_ssh=False))


def _lines(fd: int) -> Iterator[str]:
    """Yield the lines of a pipe until its end, or until the Spark process that started this one has exited."""
    parent, rest = os.getppid(), b""
    while os.getppid() == parent:
        if not select.select([fd], [], [], LOOK_S)[0]:
            continue
        data = os.read(fd, 64 * 1024)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in whole)


def _executor_process() -> list[Any]:
    """Return the identity of the process that starts the Python workers of this executor."""
    return [socket.gethostname(), os.readlink("/proc/self/ns/pid"), os.getppid()]


def _same_executor(left: str, right: str) -> bool:
    return bool(json.loads(left)[0] == json.loads(right)[0])


def _executor() -> str:
    """Return the ID of this executor.

    Only the executor's JVM knows the ID. It is the parent of this process or of the daemon that forked this process.
    """
    pid, command = os.getppid(), b""
    with contextlib.suppress(OSError, ValueError, IndexError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"pyspark" in command and b"java" not in command.split(b"\0")[0]:
            stat = Path(f"/proc/{pid}/stat").read_text()
            above = int(stat.rpartition(")")[2].split()[1])
            command = Path(f"/proc/{above}/cmdline").read_bytes()
    return executor_of_command(command)
