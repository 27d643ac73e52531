"""Forks jobs under test from a process that has imported torch, since this import takes longer than a worker's test.

If a test requests it, the process has imported other modules, too. Run as a program, this module is that process. It
has one thread and never computes, so it can fork safely. For a job it forks `elasticrun`, which then forks, before it
runs any code, the processes that it will start first: workers, and agents with forks of their own. They receive their
commands later. A worker is therefore a child of its driver, has the process ID that the driver knows, runs in its own
session, and dies with the driver, as usual. Later processes, and commands other than an agent, ``python SCRIPT.py`` or
``python -m MODULE``, are started normally.

A script that starts a job itself, without ``-np``, is also forked, with SPARE_WORKERS workers, as is an agent that is
started by hand. ``python -m elastic.chaos`` and ``python -m stress`` have one fork: the driver of their job. Any other
``python SCRIPT.py`` has none.

Differences to a normal start: all workers hash strings in the same way, /proc shows one command line for all, and no
worker finalizes its interpreter at exit. Not every test therefore forks its jobs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TextIO

MOST_BYTES = 1 << 18  # of a process's instructions
MOST_DESCRIPTORS = 8  # for a process
SPARE = 4  # workers beyond those of -np, for slots that return, and agents: none if the flags fix the workers ...
SPARE_WORKERS = "ELASTIC_TEST_SPARE"  # ... unless this variable of a job says another number
WHOLE_END = "ELASTIC_TEST_WHOLE_END"  # a variable: the interpreter is finalized at the end
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
AGENT_MODULE = "elastic.driver.agents.agent_main"
CHAOS = (["-m", "elastic.chaos"], ["-m", "stress"])  # programs that start a job
# Flags of jobs that replace workers or start agents.
MORE_WORKERS = {
    "--min-np",
    "--max-np",
    "--etcd",
    "-H",
    "--hosts",
    "--hostfile",
    "--host-discovery-script",
}
ROOM = "-"  # for a mark: repetitions in this process's arguments

Program = Callable[[], object]
at_the_start = dict(os.environ)


@dataclass(frozen=True)
class ForkRequest:
    """Program of a forked process, without its descriptors."""

    words: list[str]
    env: dict[str, str]
    folder: str | None


def tell(channel: socket.socket, told: ForkRequest, descriptors: Sequence[int]) -> None:
    message = json.dumps([told.words, told.env, told.folder]).encode()
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    socket.send_fds(channel, [message], list(descriptors))


def hear(channel: socket.socket, count: int) -> tuple[ForkRequest, list[int]] | None:
    """Return None at the end of the channel."""
    message, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, count)
    return (ForkRequest(*json.loads(message)), descriptors) if message else None


def early(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process reads only once: they must be the same in forks."""
    return {
        name: text
        for name, text in env.items()
        if name.startswith(EARLY) and name not in MADE_UP_FOR
    }


# ---- the process that has imported torch -------------------------------------------------------------------------


class Becomes(BaseException):
    """Leave all activities of the parent, and run this program, in a process that has just been forked."""

    def __init__(self, program: Program) -> None:
        self.program = program


def serve(channel: socket.socket) -> None:
    """Fork drivers until the channel ends. Each starter is told the number of its driver, and how it has ended. Only
    once that was read is the number free again, as with a child.
    """
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    running: dict[
        int, tuple[int, int]
    ] = {}  # process's descriptor: its number, and its starter's descriptor
    ended: dict[int, int] = {}  # starter's descriptor: its driver's number
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                os.close(descriptor)
                driver, starter = running.pop(descriptor)
                answer(starter, how_it_ended(driver))
                ended[starter] = driver
                poll.register(starter, select.POLLIN)
            elif descriptor in ended:
                poll.unregister(descriptor)
                os.close(descriptor)
                os.waitpid(ended.pop(descriptor), 0)
            elif (heard := hear(channel, MOST_DESCRIPTORS)) is None:
                return
            else:
                told, (output, starter, *passed) = heard
                driver = os.fork()
                if driver == 0:
                    channel.close()
                    os.setsid()
                    null = os.open(os.devnull, os.O_RDONLY)
                    become(told, [null, output, output, *passed])
                    raise Becomes(functools.partial(begin, told.words))
                for each in (output, *passed):
                    os.close(each)
                answer(starter, driver)
                process = os.pidfd_open(driver)
                running[process] = driver, starter
                poll.register(process, select.POLLIN)


def how_it_ended(driver: int) -> int:
    """Return the exit status, or the negative signal, of a process that has ended, which stays a zombie."""
    ended = os.waitid(os.P_PID, driver, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def answer(starter: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the starter may have ended
        os.write(starter, f"{number}\n".encode())


# ---- starting forks ------------------------------------------------------------------------------------------------


def begin(words: list[str]) -> None:
    """Run a program that starts workers, or a driver; or any other Python program."""
    if words[1:3] in CHAOS:
        have_forks(1, apart=False)
        take_path()
        return run_module(words[2:])
    if words[0] in PYTHON:
        return python(words)
    found = re.search(r"-np (\d+)", " ".join(words))
    more = not MORE_WORKERS.isdisjoint(word.partition("=")[0] for word in words)
    spare = int(os.environ.get(SPARE_WORKERS, SPARE if found and more else 0))
    have_forks(spare + (int(found[1]) if found else 0))
    run_script(words)


def agent() -> None:
    """Fork workers in this process: it may have been sent to the background before."""
    from elastic.driver.agents import agent_main

    serve = agent_main.serve

    def serving(*arguments: Any, **how: Any) -> Any:
        have_forks(int(os.environ.get(SPARE_WORKERS, SPARE)))
        return serve(*arguments, **how)

    agent_main.serve = serving
    sys.exit(agent_main.main())


def have_forks(count: int, *, apart: bool = True) -> None:
    """Let the next processes that this one starts be forks. ``apart``: each in a separate session."""
    parent = os.getpid()
    forks: list[tuple[int, socket.socket]] = []
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for channel in (ours, *(channel for _, channel in forks)):
                channel.close()
            raise Becomes(functools.partial(wait_for_request, theirs, parent, apart))
        theirs.close()
        forks.append((pid, ours))
    Fork.ready = forks
    subprocess.Popen = Fork  # type: ignore[misc]


class Fork(subprocess.Popen):
    """As the base class, but uses a prepared process if possible."""

    ready: ClassVar[list[tuple[int, socket.socket]]] = []

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *rest: Any,
    ) -> None:
        words = [args] if isinstance(args, str) else [*map(str, args)]
        if not self.ready or pass_fds or not can_be_a_fork(words, env):
            before = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env)
            super()._execute_child(*before, *rest)  # type: ignore[misc]
            return
        pipes = rest[3:9]  # both ends of each
        theirs = (pipes[0], pipes[3], pipes[5])
        self.pid, channel = self.ready.pop(0)
        standard = [n if end == -1 else end for n, end in enumerate(theirs)]
        folder = None if cwd is None else str(cwd)
        tell(
            channel, ForkRequest(words, dict(os.environ if env is None else env), folder), standard
        )
        channel.close()
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def can_be_a_fork(words: Sequence[str], env: Mapping[str, str] | None) -> bool:
    if words[0] in PYTHON and words[1:]:
        if words[-1] == AGENT_MODULE:
            return True
        same = early(os.environ if env is None else env) == early(at_the_start)
        return words[1].endswith((".py", "-m")) and same
    return Path(words[0]).name == "elasticrun"


# ---- its forks -----------------------------------------------------------------------------------------------------


def wait_for_request(channel: socket.socket, parent: int, apart: bool) -> None:
    if apart:
        os.setsid()
    dies_with_its_parent(True)
    if os.getppid() != parent:
        os._exit(0)
    heard = hear(channel, 3)
    channel.close()
    if heard is None:  # its parent does not need it
        os._exit(0)
    told, standard = heard
    become(told, standard)
    if told.words[0] in PYTHON and told.words[-1] != AGENT_MODULE:
        return python(told.words)
    dies_with_its_parent(False)
    if told.words[0] in PYTHON:
        agent()
    else:
        begin(told.words)


def dies_with_its_parent(does: bool) -> None:
    number = signal.SIGKILL if does else 0
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def python(words: list[str]) -> None:
    """Run as ``python SCRIPT WORDS`` or ``python -m MODULE WORDS`` in a process that has imported torch."""
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout, sys.stderr = unbuffered(sys.stdout), unbuffered(sys.stderr)
    from elastic.protocol.uncaught.at_start import sitecustomize

    sitecustomize.leave_path(os.environ)  # the start of Python would have imported it
    sitecustomize.arrange()
    take_path()
    from elastic import failpoints
    from elastic.rendezvous import worker_settings
    from elastic.torch_autoload import autoload

    failpoints.use(worker_settings.failpoints())
    autoload()  # as the import of torch would have called it, with this environment
    sys.modules["numpy"].random.seed()  # Python reseeds after a fork, NumPy does not
    if words[1] == "-m":
        run_module(words[2:])
    else:
        run_script(words[1:])


def take_path() -> None:
    """Search the folders of PYTHONPATH, behind that of the script."""
    path = os.environ.get("PYTHONPATH", "")
    if path and path != at_the_start.get("PYTHONPATH"):
        sys.path[1:1] = path.split(os.pathsep)


def become(told: ForkRequest, descriptors: Sequence[int]) -> None:
    """Has the descriptors, the environment and the folder that it was told, and nothing else that was open.

    ``descriptors`` are numbered from 0.
    """
    for number, descriptor in enumerate([os.dup(each) for each in descriptors]):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= len(descriptors):
            with contextlib.suppress(OSError):  # it was open only for this listing
                os.close(int(name))
    for name, place in marks().items():
        room = at_the_start[name]
        if len(value := told.env.get(name, room)) == len(room):
            ctypes.memmove(place, value.encode(), len(value))
    os.environ.clear()
    os.environ.update(told.env)
    if told.folder is not None:
        os.chdir(told.folder)
    sys.argv = told.words


@functools.cache
def marks() -> dict[str, int]:
    """Return the locations of variables with room for a mark, which /proc/self/environ shows."""
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_void_p
    return {name: get(name.encode()) for name, text in at_the_start.items() if {*text} == {ROOM}}


def unbuffered(stream: TextIO) -> TextIO:
    raw = io.FileIO(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, "\n", write_through=True)


def run_script(words: list[str]) -> None:
    """Run as ``python SCRIPT WORDS``."""
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent.resolve())
    script = ModuleType("__main__")
    script.__file__ = words[0]
    sys.modules["__main__"] = script
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), script.__dict__)


def run_module(words: list[str]) -> None:
    """Run as ``python -m MODULE WORDS``."""
    sys.argv = words
    sys.path[0] = os.getcwd()
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def main() -> None:
    """``forking.py DESCRIPTOR [MODULE ...]``"""
    gc.disable()
    import elastic.checkpoints.background_writer
    import elastic.driver.agents.agent_main
    import elastic.driver.commandline.cli
    import elastic.driver.job.start  # noqa: F401
    from elastic.driver.processes.preloaded_program import OURS

    for name in (*OURS, *sys.argv[2:]):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    threads = [Path(f"/proc/self/task/{each}/comm") for each in os.listdir("/proc/self/task")]
    names = [path.read_text().strip() for path in threads]
    assert set(names[1:]) <= KNOWN, f"a fork would lack its threads {names}"
    marks()
    program: Program | None = functools.partial(serve, socket.socket(fileno=int(sys.argv[1])))
    while program is not None:
        try:
            end(program)
            program = None
        except Becomes as fork:
            program = fork.program


def end(program: Program) -> None:
    """Runs it and ends as Python does, but that nothing is taken apart: this would touch, and so copy, all that was
    imported before the fork, and took a process more time than all else that it does. With WHOLE_END it is.
    """
    code = 0
    try:
        program()
    except SystemExit as left:
        if WHOLE_END in os.environ:
            raise
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except Exception:
        if WHOLE_END in os.environ:
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    if WHOLE_END in os.environ:
        return
    threading._shutdown()  # type: ignore[attr-defined]
    # first, because the next calls wake threads, which must not run without anything to flush
    flush()
    atexit._run_exitfuncs()
    flush()
    os._exit(code & 0xFF)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no reader, or it is closed
            stream.flush()


if __name__ == "__main__":
    main()
