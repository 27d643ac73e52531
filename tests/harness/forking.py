"""Forks jobs under test from a process that has imported torch, which takes a worker longer than all that it then does.
Where a test asks for it that process has imported other modules, too.

Run as a program, this is that process. It has one thread and never computes, so its forks are sound. Of a job it forks
`elasticrun`, and of this, before it has run a line, the processes that its first workers will be; they are told later
what to run. So a worker is a child of its driver, under the number that the driver knows, in a session of its own, and
dies with the driver, as others do. What comes after those, and what is neither ``python SCRIPT.py`` nor ``python -m
MODULE``, is started as always.

A script that starts a job by itself, without ``-np``, is forked as well, with as many workers as SPARE_WORKERS says.

What differs: all workers hash strings alike, and /proc has one command line for all. So not every test forks its jobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import re
import runpy
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, TextIO

MOST_BYTES = 1 << 18  # of what a process is told
SPARE = 4  # workers beyond those of -np, for slots that return ...
SPARE_WORKERS = "ELASTIC_TEST_SPARE"  # ... unless this variable of a job says another number
# Read when a process starts, or when it imports torch or TensorFlow.
EARLY = (
    "PYTHON",
    "LD_",
    "MALLOC_",
    "OMP_",
    "MKL_",
    "TORCH_CPP_",
    "CUDA_",
    "FAKE_",
    "TF_",
    "KERAS_",
)
MADE_UP_FOR = ("PYTHONUNBUFFERED", "PYTHONPATH")  # in the fork
PR_SET_PDEATHSIG = 1
KNOWN = {"jemalloc_bg_thd"}  # of pyarrow's allocator, which stops it for a fork
PYTHON = ("python", sys.executable)

Program = Callable[[], object]
at_the_start = dict(os.environ)


@dataclass(frozen=True)
class Told:
    """What a forked process is to run, beside its descriptors."""

    words: list[str]
    env: dict[str, str]
    folder: str | None
    mark: str = ""


def tell(channel: socket.socket, told: Told, descriptors: Sequence[int]) -> None:
    message = json.dumps([told.words, told.env, told.folder, told.mark]).encode()
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    socket.send_fds(channel, [message], list(descriptors))


def hear(channel: socket.socket, count: int) -> tuple[Told, list[int]] | None:
    """None at the end of the channel."""
    message, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, count)
    return (Told(*json.loads(message)), descriptors) if message else None


def early(env: Mapping[str, str]) -> dict[str, str]:
    """What a process reads of its environment once and for all: of forks it must be the same."""
    return {
        name: text
        for name, text in env.items()
        if name.startswith(EARLY) and name not in MADE_UP_FOR
    }


# ---- the process that has imported torch -------------------------------------------------------------------------


def serve(channel: socket.socket) -> Program:
    """Returns only in a forked process, with what it is to run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for guardians
    while (heard := hear(channel, 2)) is not None:
        told, (output, told_to) = heard
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            return guarded(told, output, socket.socket(fileno=told_to))
        os.close(output)
        os.close(told_to)
    sys.exit()


def guarded(told: Told, output: int, starter: socket.socket) -> Program:
    """Returns in the driver. Its parent, a guardian, says its number and how it has ended. Only once that was read is
    the number free again, as with a child.
    """
    driver = os.fork()
    if driver == 0:
        starter.close()
        return elasticrun(told, output)
    os.close(output)
    starter.sendall(f"{driver}\n".encode())
    ended = os.waitid(os.P_PID, driver, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(OSError):  # who started it may be gone
        starter.sendall(f"{code}\n".encode())
        starter.recv(1)
    os.waitpid(driver, 0)
    os._exit(0)


def elasticrun(told: Told, output: int) -> Program:
    """Returns in the driver, and in each of its workers."""
    os.setsid()
    mark(told.mark)
    become(told, [os.open(os.devnull, os.O_RDONLY), output, output])
    found = re.search(r"-np (\d+)", " ".join(told.words))
    driver = os.getpid()
    forks: list[Fork] = []
    spare = int(told.env.get(SPARE_WORKERS, SPARE if found else 0))
    for _ in range(spare + (int(found[1]) if found else 0)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for channel in (ours, *(fork.channel for fork in forks)):
                channel.close()
            return worker(theirs, driver)
        theirs.close()
        forks.append(Fork(pid, ours))
    return lambda: drive(told.words, forks)


def drive(words: list[str], forks: list[Fork]) -> None:
    """As the program that the words name does it, but that its first workers are those forks."""
    from elastic.driver.processes import spawning, supervisor

    def spawn(
        command: Sequence[str],
        env: Mapping[str, str],
        announce: Callable[[int], None],
        *,
        folder: str | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Any:
        known = len(command) > 1 and command[0] in PYTHON and command[1].endswith((".py", "-m"))
        if not (known and forks and early(env) == early(at_the_start)):
            return spawning.spawn(command, env, announce, folder=folder, pass_fds=pass_fds)
        fork = forks.pop(0)
        fork.start(Told(list(command), dict(env), folder))
        return fork

    supervisor.spawn = spawn  # type: ignore[attr-defined]
    run_script(words)


class Fork:
    """What the driver has of a worker: as much of `subprocess.Popen` as it uses."""

    stdout: BinaryIO
    stderr: BinaryIO

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel

    def start(self, told: Told) -> None:
        read_out, out = os.pipe()
        read_err, err = os.pipe()
        self.stdout, self.stderr = os.fdopen(read_out, "rb"), os.fdopen(read_err, "rb")
        tell(self.channel, told, [out, err])
        for descriptor in (out, err):
            os.close(descriptor)
        self.channel.close()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def worker(channel: socket.socket, driver: int) -> Program:
    """Waits until it is told to be one."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != driver:
        os._exit(0)
    heard = hear(channel, 2)
    channel.close()
    if heard is None:  # the driver has no use for it
        os._exit(0)
    told, outputs = heard
    become(told, [os.open(os.devnull, os.O_RDONLY), *outputs])
    if told.env.get("PYTHONUNBUFFERED"):
        sys.stdout, sys.stderr = unbuffered(sys.stdout), unbuffered(sys.stderr)
    path = told.env.get("PYTHONPATH", "")
    if path and path != at_the_start.get("PYTHONPATH"):
        sys.path[1:1] = path.split(os.pathsep)  # behind the folder of the script
    from elastic import failpoints
    from elastic.rendezvous import environment
    from elastic.torch_autoload import autoload

    failpoints.use(environment.failpoints())
    autoload()  # as the import of torch would have called it, with this environment
    sys.modules["numpy"].random.seed()  # Python draws anew after a fork, NumPy doesn't
    return lambda: (
        run_module(told.words[2:]) if told.words[1] == "-m" else run_script(told.words[1:])
    )


def become(told: Told, standard: Sequence[int]) -> None:
    """Has the standard descriptors, the environment and the folder that it was told, and nothing else that was open."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # it was open for this look only
                os.close(int(name))
    os.environ.clear()
    os.environ.update(told.env)
    if told.folder is not None:
        os.chdir(told.folder)
    sys.argv = told.words


def unbuffered(stream: TextIO) -> TextIO:
    raw = io.FileIO(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, "\n", write_through=True)


def run_script(words: list[str]) -> None:
    """As ``python SCRIPT WORDS`` does it."""
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent.resolve())
    script = ModuleType("__main__")
    script.__file__ = words[0]
    sys.modules["__main__"] = script
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), script.__dict__)


def run_module(words: list[str]) -> None:
    """As ``python -m MODULE WORDS`` does it."""
    sys.argv = words
    sys.path[0] = os.getcwd()
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


# ---- its mark ------------------------------------------------------------------------------------------------------


def mark(entry: str) -> None:
    """``NAME=value`` in /proc/self/environ, in place of a value of the same length there."""
    name, _, value = entry.partition("=")
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_void_p
    place = get(name.encode())
    assert place is not None and len(ctypes.string_at(place)) == len(value), entry
    ctypes.memmove(place, value.encode(), len(value))


def main() -> None:
    """``forking.py DESCRIPTOR [MODULE ...]``"""
    gc.disable()
    import torch
    import torch._dynamo  # as the first optimizer does, for most of a second  # noqa: F401

    import elastic.checkpoints.writer
    import elastic.driver.commandline.cli
    import elastic.driver.job.start
    import elastic.optimizer
    import elastic.run_loop
    import elastic.runtime.lifecycle
    import elastic.state  # noqa: F401

    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    threads = [Path(f"/proc/self/task/{each}/comm") for each in os.listdir("/proc/self/task")]
    names = [path.read_text().strip() for path in threads]
    assert set(names[1:]) <= KNOWN, f"a fork would lack its threads {names}"
    program = serve(socket.socket(fileno=int(sys.argv[1])))
    program()


if __name__ == "__main__":
    main()
