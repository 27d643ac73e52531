"""Starts, watches and kills the workers of this host. Decides nothing: it does what it is told and reports exits.

A worker's exit is known from its pidfd the moment it happens, never from the end of its output, because its children
may hold the pipes for longer. In order: read the exit status without reaping, kill what is left of its process group,
take what its pipes hold, report the exit. A moment later its whole session is swept and only then it is reaped, so
that until then nobody else can have its process number.

Each worker is a session of its own and dies with the thread that started it (PDEATHSIG); the warden kills its children
if the driver is killed. Everything here runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

from elastic.driver import warden
from elastic.driver.events import WorkerExited
from elastic.driver.launch.interface import Log, Sink, Stream
from elastic.driver.warden_process import WardenProcess
from elastic.protocol import Worker

CHUNK = 64 * 1024
DRAIN_LIMIT = 1024 * 1024  # bytes taken from a dead worker's pipe before its exit is reported
LINGER_S = 0.5  # a dead worker's pipes are read for this long, should somebody still hold them
SWEEP_S = 0.01  # gathers the sweeps of workers that die together
DEATH_S = 10.0  # SIGKILL works at once, but for a process stuck in the kernel
PR_SET_PDEATHSIG = 1

_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Agent:
    """The worker processes of this host. ``exited`` is called once per started worker, ``sink`` gets their output."""

    def __init__(self, *, exited: Callable[[WorkerExited], None], sink: Sink, log: Log) -> None:
        self._exited = exited
        self._sink = sink
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._processes: dict[Worker, _Process] = {}
        self._unreaped: set[_Process] = set()
        self._pipes: set[_Pipe] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._born = mmap.mmap(-1, 8)  # shared with children
        self._warden = WardenProcess(self._loop, self._groups, log)

    def start(self, worker: Worker, command: Sequence[str], env: Mapping[str, str]) -> None:
        """See `Launcher.start`."""
        assert worker not in self._processes, f"{worker} runs already"
        self._warden.ensure()
        self._born[:] = bytes(len(self._born))
        try:
            process = _Process(worker, _spawn(command, env, self._announce))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            if pid := int.from_bytes(self._born[:], "little"):
                self._warden.tell(f"-{pid}\n")
            code = 127 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 126
            reason = _why_not_started(command[0], error)
            self._loop.call_soon(self._exited, WorkerExited(worker, code, reason))
            return
        self._warden.tell(
            f"+{process.pid}\n"
        )  # again, should the warden have been replaced meanwhile
        self._processes[worker] = process
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        for stream, file in zip(streams, (process.popen.stdout, process.popen.stderr), strict=True):
            assert file is not None
            pipe = _Pipe(self._loop, os.dup(file.fileno()), worker, stream, self._sink)
            file.close()
            pipe.closed = lambda pipe: self._on_pipe_end(process, pipe)
            self._pipes.add(pipe)
            process.pipes.append(pipe)
        self._watch(process)

    def kill(self, worker: Worker) -> None:
        """See `Launcher.kill`."""
        process = self._processes.get(worker)
        if process is not None:
            warden.kill_group(process.pid)
            if process.overdue is None:
                process.overdue = self._loop.call_later(DEATH_S, self._report_overdue, process)

    def alive(self) -> frozenset[Worker]:
        return frozenset(self._processes)

    def pid(self, worker: Worker) -> int | None:
        """Process number of a worker that runs."""
        process = self._processes.get(worker)
        return process.pid if process else None

    async def close(self) -> None:
        """Kill every worker, wait at most DEATH_S for them, read out their pipes, end the warden."""
        for worker in list(self._processes):
            self.kill(worker)
        deadline = self._loop.time() + DEATH_S
        while (self._processes or self._unreaped or self._pipes) and self._loop.time() < deadline:
            await asyncio.sleep(
                0.002
            )  # nothing else is left to do; exits and pipes are still watched
        for process in self._processes.values():
            self._log("error", f"{process.worker} (pid {process.pid}) cannot be killed; leaving it")
        for pipe in list(self._pipes):
            pipe.close()
        await self._warden.close()
        self._born.close()

    def _announce(self, pid: int) -> None:
        """In the child. If its exec fails, this memory is all that the parent learns of it."""
        self._born[:] = pid.to_bytes(len(self._born), "little")
        self._warden.announce(pid)

    # ---- exits -----------------------------------------------------------------------------------------------------

    def _watch(self, process: _Process) -> None:
        try:
            process.pidfd = os.pidfd_open(process.pid)
        except OSError:  # forbidden in some sandboxes: wait in a thread instead
            target = self._wait_in_thread
            threading.Thread(target=target, args=(process,), daemon=True).start()
        else:
            self._loop.add_reader(process.pidfd, self._on_exit, process)

    def _wait_in_thread(self, process: _Process) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._on_exit, process)

    def _on_exit(self, process: _Process) -> None:
        if process.pidfd is not None:
            self._loop.remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None
        if process.overdue is not None:
            process.overdue.cancel()
        code, reason = process.status()
        warden.kill_group(process.pid)  # its DataLoader workers would keep its sockets open
        for pipe in list(process.pipes):
            pipe.drain()
        del self._processes[process.worker]
        self._exited(WorkerExited(process.worker, code, reason, self._sink.tail(process.worker)))
        process.reported = True
        for pipe in process.pipes:
            pipe.end_within(LINGER_S)
        self._forget_if_done(process)
        self._unreaped.add(process)
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_S, self._reap)

    def _on_pipe_end(self, process: _Process, pipe: _Pipe) -> None:
        self._pipes.discard(pipe)
        process.pipes.remove(pipe)
        self._forget_if_done(process)

    def _forget_if_done(self, process: _Process) -> None:
        if process.reported and not process.pipes:
            self._sink.forget(process.worker)

    def _reap(self) -> None:
        """Sweep the sessions of the dead, then let their process numbers go."""
        self._sweep = None
        dead, self._unreaped = self._unreaped, set()
        warden.kill_sessions({process.pid for process in dead})
        for process in dead:
            self._warden.tell(f"-{process.pid}\n")
            process.popen.wait()  # a zombie: returns at once

    def _groups(self) -> list[int]:
        return [process.pid for process in (*self._processes.values(), *self._unreaped)]

    def _report_overdue(self, process: _Process) -> None:
        state = warden.state_of(process.pid)[0]
        self._log(
            "warning",
            f"{process.worker} (pid {process.pid}) has not died {DEATH_S:.0f} s after SIGKILL"
            f" (process state {state}); if it stays in state D, its device or file system hangs",
        )


class _Process:
    """One worker process, from its start to its reaping."""

    def __init__(self, worker: Worker, popen: subprocess.Popen[bytes]) -> None:
        self.worker = worker
        self.popen = popen
        self.pid = popen.pid
        self.pidfd: int | None = None
        self.pipes: list[_Pipe] = []  # those not at their end
        self.reported = False  # its exit has been
        self.overdue: asyncio.TimerHandle | None = None

    def status(self) -> tuple[int, str]:
        """Exit code, or minus the signal, without reaping."""
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return 255, "its exit status was taken by other code in the driver's process"
        assert status is not None, f"{self.worker} was reported dead, but it runs"
        died = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        return (-status.si_status if died else status.si_status), ""


class _Pipe:
    """The reading end of one output stream."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        worker: Worker,
        stream: Stream,
        sink: Sink,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._worker = worker
        self._stream: Stream = stream
        self._sink = sink
        self._open = True
        self.closed: Callable[[_Pipe], None] = lambda pipe: None
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._read)

    def _read(self) -> bool:
        """Pass on one chunk. False when there is none now, or never again."""
        if not self._open:
            return False
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._sink.feed(self._worker, self._stream, data)
        return True

    def drain(self) -> None:
        """What is there now, without waiting and within a bound."""
        for _ in range(DRAIN_LIMIT // CHUNK):
            if not self._read():
                return

    def end_within(self, timeout_s: float) -> None:
        if self._open:
            self._loop.call_later(timeout_s, self.close)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._sink.finish(self._worker, self._stream)
            self.closed(self)


def _spawn(
    command: Sequence[str], env: Mapping[str, str], announce: Callable[[int], None]
) -> subprocess.Popen[bytes]:
    driver = os.getpid()

    def before_exec() -> None:  # in the child
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != driver:  # it died before it could be told to take us with it
            os.kill(os.getpid(), signal.SIGKILL)
        announce(os.getpid())

    with warnings.catch_warnings():
        # Python 3.12 warns of forks beside threads; ours makes a few system calls and execs.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=before_exec,
        )


def _why_not_started(program: str, error: Exception) -> str:
    match getattr(error, "errno", None):
        case errno.ENOENT | errno.ENOTDIR:
            if os.path.exists(program):
                return (
                    f"cannot start {program!r}: the interpreter named in its first line is missing"
                )
            return f"cannot start {program!r}: there is no such program; check the name and PATH"
        case errno.EACCES:
            return f"cannot start {program!r}: it is not executable; try `chmod +x` or `python {program}`"
        case errno.ENOEXEC:
            return f"cannot start {program!r}: it is no program; add a first line such as #!/bin/sh"
        case errno.EAGAIN | errno.ENOMEM:
            return f"cannot start {program!r}: the host is out of processes or memory; check `ulimit -u`"
        case errno.E2BIG:
            return f"cannot start {program!r}: its arguments and environment are too long; shorten them"
        case _:
            return f"cannot start {program!r}: {error}"
