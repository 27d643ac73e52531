"""Supervisor that starts, monitors and kills the worker processes of this host.

It carries out orders and reports events, but makes no decisions.

A worker's exit is detected by its pidfd, not by the end of its output, because its children may hold the pipes longer.
The supervisor then reads the exit status without reaping, kills the rest of the worker's process group, reads its
pipes, and reports the exit. Shortly afterwards, it kills the whole session. Only then does it reap the worker, so that
the process ID cannot be reused earlier.

The kernel frees the memory of a process before it reports the exit. This takes tens of milliseconds if a framework has
been imported, and seconds for a large model. If a signal or an error ended the worker, its exit is reported earlier, as
soon as all of its threads have stopped running (see `life_lock`), unless it has a device open.

The state of all processes is checked four times a second. A process that has been unable to run for a whole liveness
timeout is reported as frozen, and as thawed when it can run again. Resource counters are read only on request.

Each worker runs in a separate session and is killed when the thread that started it exits (PDEATHSIG). If the driver is
killed, the orphan reaper kills the children of workers. All code here runs in the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from elastic.driver.events import Event, WorkerExited, WorkerFrozen, WorkerProbed, WorkerThawed
from elastic.driver.membership.worlds.root_cause import describe_exit
from elastic.driver.output_interfaces import Log, Sink, Stream, Usage
from elastic.driver.processes import health_check_run, orphan_reaper_program, proc_stats
from elastic.driver.processes.health_check_run import HealthCheckRun
from elastic.driver.processes.liveness_timeouts import LivenessTimeouts
from elastic.driver.processes.orphan_reaper_control import OrphanReaper
from elastic.driver.processes.out_of_memory import OutOfMemory
from elastic.driver.processes.output_pipe import Pipe
from elastic.driver.processes.preloaded_pool import PreparedProcesses
from elastic.driver.processes.spawning import spawn, why_not_started
from elastic.driver.processes.thread_stacks import STACKS_S, in_order, signal_in_turn
from elastic.driver.processes.usage_meter import USAGE_S, UsageMeter
from elastic.driver.reasons import counted
from elastic.driver.settings import Settings
from elastic.protocol.life_lock import LIFE_LOCK, LifeLock, LifeLocks
from elastic.protocol.messages import STACKS_SIGNAL_OFFSET, Worker
from elastic.protocol.uncaught.at_start import sitecustomize
from elastic.protocol.uncaught.sending import DIAGNOSTICS, StackOf

# maximum number of seconds for reading the pipes of an exited worker, which another process may keep open
LINGER_S = 0.5
# delay, in seconds, after which the sessions of exited workers are killed, in one pass for all of them
SWEEP_S = 0.01
# seconds to wait for an exit after SIGKILL; only a process that is blocked in the kernel takes longer
DEATH_S = 10.0
# Interval between two checks of all processes, in seconds. If a quarter of the liveness timeout is less, that is used.
LOOK_S = 0.25
LEAST_LOOK_S = 0.05  # minimum interval between two samples
# Interval between two checks of whether all threads of a process have ended, in seconds. The checks begin when its main
# thread has ended.
ENDING_S = 0.001
# maximum number of such checks, after which the supervisor waits for the exit of the process
ENDING_LOOKS = 50


class ProcessSupervisor:
    """Supervisor of the worker processes of this host.

    Args:
        exited: called once for each started worker.
        noticed: called with other events: WorkerFrozen, WorkerThawed, WorkerProbed and WorkerHealthChecked.
        sink: receives the workers' output.
        log: called with the level and the text of each log line.
        lease_s: liveness timeout, in seconds.
    """

    def __init__(
        self,
        *,
        exited: Callable[[WorkerExited], None],
        noticed: Callable[[Event], None],
        sink: Sink,
        log: Log,
        lease_s: float = Settings.lease_s,
    ) -> None:
        self._exited = exited
        self._noticed = noticed
        self._sink = sink
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._processes: dict[Worker, _Process] = {}
        # processes whose exit was reported, but which have not been reaped yet
        self._dying: set[_Process] = set()
        # starts that wait until the previous process of their slot has been reaped
        self._held: dict[Worker, Callable[[], None]] = {}
        self._unreaped: set[_Process] = set()
        # health checks of workers that are starting
        self._checks: dict[Worker, HealthCheckRun] = {}
        self._pipes: set[Pipe] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._leases: LivenessTimeouts[Worker] = LivenessTimeouts(lease_s)
        self._look_s = min(LOOK_S, max(LEAST_LOOK_S, lease_s / 4))
        self._next_look: asyncio.TimerHandle | None = None
        self._usage = UsageMeter()
        self._usage_at = -math.inf
        # Whether a measurement is in progress. It runs in a thread, because a GPU driver may not respond.
        self._measures = False
        self._memory = OutOfMemory()
        self._dumps: set[asyncio.Task[None]] = set()
        # memory shared with forked children, to which they write their process IDs
        self._born = mmap.mmap(-1, 8)
        self._life_locks = LifeLocks()
        self._reaper = OrphanReaper(self._loop, self._groups, log)
        self.prepared = PreparedProcesses(
            "",
            spawn=self._spawn,
            gone=self._has_exited,
            available=self._memory.available_bytes,
            log=log,
        )

    def start(
        self,
        worker: Worker,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        folder: str | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """Start a worker. See `elastic.driver.launch.interface.Launcher.start`.

        The start waits for at most DEATH_S seconds until the previous process of the slot has exited and released its
        ports, locks and memory.

        Args:
            worker: the worker.
            command: program and arguments.
            env: environment.
            folder: working folder (default: that of this process).
            stdin: file descriptor of the worker's standard input (default: empty input). A worker with standard input
                never uses a preloaded process.
        """
        assert worker not in self.alive(), f"{worker} is already running"
        if any(_one_slot(worker, each.worker) for each in self._dying):
            self._held[worker] = partial(self._start, worker, command, env, folder, stdin)
            self._loop.call_later(DEATH_S, self._start_held, worker)
        else:
            self._start(worker, command, env, folder, stdin)

    def _start_held(self, worker: Worker) -> None:
        if start := self._held.pop(worker, None):
            start()

    def _start(
        self,
        worker: Worker,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: str | None,
        stdin: int,
    ) -> None:
        self._reaper.ensure()
        given, env = env, health_check_run.without_check(env)
        lock = self._life_locks.new()
        if lock is not None:
            env = {**env, LIFE_LOCK: lock.env_value}
        answered = stdin != subprocess.DEVNULL
        diagnostics, written = os.pipe2(os.O_CLOEXEC)
        env = {**env, **_reporting_to(written, env)}
        try:
            popen = None if answered else self.prepared.take(command, env, folder)
            popen = popen or self._spawn(command, env, folder, stdin=stdin)
            process = _Process(worker, popen, lock, written)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            code = 127 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 126
            reason = why_not_started(command[0], error)
            if lock is not None:
                lock.end()
            os.close(diagnostics)
            os.close(written)
            self._loop.call_soon(self._exited, WorkerExited(worker, code, reason))
            return
        # Register the process again, because the reaper may have been replaced since the fork.
        self._reaper.send(f"+{process.pid}\n")
        self._processes[worker] = process
        self._check_health(worker, command, given, folder)
        assert popen.stdout is not None and popen.stderr is not None
        fds: dict[Stream, int] = {
            "stdout": os.dup(popen.stdout.fileno()),
            "stderr": os.dup(popen.stderr.fileno()),
            "diagnostics": diagnostics,
        }
        popen.stdout.close()
        popen.stderr.close()
        for stream, fd in fds.items():
            prompts = answered and stream != "diagnostics"
            pipe = Pipe(self._loop, fd, worker, stream, self._sink, prompts=prompts)
            if stream == "diagnostics":  # show the exception after the output that precedes it
                pipe.later_than = [*process.pipes]
            pipe.closed = lambda pipe: self._on_pipe_end(process, pipe)
            self._pipes.add(pipe)
            process.pipes.append(pipe)
        self._watch(process)
        if lock is not None:
            lock.watch(partial(self._from_thread, self._on_ending, process, ENDING_LOOKS))
        self._leases.grant(worker, self._loop.time())
        if self._next_look is None:
            self._next_look = self._loop.call_later(self._look_s, self._look)

    def _check_health(
        self, worker: Worker, command: Sequence[str], env: Mapping[str, str], folder: str | None
    ) -> None:
        """Start the health check for a starting worker, if the job has one. The result is reported as an event."""
        if not env.get(health_check_run.COMMAND):
            return
        self._checks = {each: check for each, check in self._checks.items() if check.running}
        self._checks[worker] = HealthCheckRun(
            worker,
            command,
            env,
            folder,
            spawn=self._spawn,
            done=self._noticed,
            reaped=self._has_exited,
        )

    def kill(self, worker: Worker) -> None:
        """Send SIGKILL to a worker and its children. Unknown workers are ignored."""
        if self._held.pop(worker, None):
            self._loop.call_soon(self._exited, WorkerExited(worker, -signal.SIGKILL))
        process = self._processes.get(worker)
        if process is not None:
            self._leases.drop(worker)
            process.frozen_reported_at = None
            orphan_reaper_program.kill_group(process.pid)
            if process.overdue is None:
                process.overdue = self._loop.call_later(DEATH_S, self._report_overdue, process)

    def probe(self, workers: Sequence[Worker]) -> None:
        """Report the counters of these workers as WorkerProbed events. Unknown workers are ignored."""
        pids = {w: self._processes[w].pid for w in workers if w in self._processes}
        samples = proc_stats.samples_of(set(pids.values())) if pids else {}
        for worker, pid in pids.items():
            sample = samples[pid]
            probed = WorkerProbed(
                worker, sample.cpu_s, sample.io_bytes, sample.state, sample.traced
            )
            self._noticed(probed)

    def dump(self, worker: Worker, *, all_threads: bool) -> None:
        """Make a worker print its stacks. See `elastic.driver.launch.interface.Launcher.dump`."""
        process = self._processes.get(worker)
        if process is None:
            return
        number = signal.SIGRTMIN + STACKS_SIGNAL_OFFSET
        if proc_stats.stat_of(process.pid).state == proc_stats.STOPPED or proc_stats.frozen(
            process.pid
        ):
            self._log("info", f"{worker} wrote no stacks: its process is not running")
        elif not proc_stats.handles(process.pid, number):
            why = f"it has not called init(), or handles signal {number} itself"
            self._log("info", f"no stacks of {worker}: {why}")
        else:
            task = self._loop.create_task(self._write_stacks(process, number, all_threads))
            self._dumps.add(task)
            task.add_done_callback(self._dumps.discard)

    async def _write_stacks(self, process: _Process, number: int, all_threads: bool) -> None:
        async with process.stacks:
            if process.reported:
                return
            worker, pid = process.worker, process.pid
            for pipe in list(process.pipes):
                pipe.drain()
            threads = proc_stats.threads_of(pid)
            reported = self._sink.training_thread(worker)
            training = reported if reported in [thread.id for thread in threads] else pid

            def announce(thread: proc_stats.ThreadStatus) -> None:
                header = StackOf(thread.id, thread.name, thread.id == training)
                self._sink.feed(worker, "diagnostics", msgspec.json.encode(header) + b"\n")

            chosen = in_order(threads, number, training, all_threads=all_threads)
            if not chosen:
                self._log(
                    "info", f"no stacks of {worker}: its training thread blocks signal {number}"
                )
            try:
                late = await signal_in_turn(pid, chosen, number, announce)
            except OSError as error:
                self._log("info", f"no stacks of {worker}: signal {number} cannot be sent: {error}")
                return
            if late and not process.reported:
                count = f"{late} of {counted(len(chosen), 'thread')}"
                self._log(
                    "info",
                    f"stacks of {worker} are incomplete: {count} did not respond within {STACKS_S:g} s",
                )

    def alive(self) -> frozenset[Worker]:
        return frozenset(self._processes) | frozenset(self._held)

    def pid(self, worker: Worker) -> int | None:
        """Return the process ID of a running worker."""
        process = self._processes.get(worker)
        return process.pid if process else None

    async def close(self) -> None:
        """Kill all workers, wait for their exits, read their pipes, and stop the orphan reaper.

        The wait takes at most DEATH_S seconds.
        """
        if self._next_look is not None:
            self._next_look.cancel()
        for task in self._dumps:
            task.cancel()
        for worker in self.alive():
            self.kill(worker)
        # This call blocks, so it is made after the workers were killed, which would otherwise compete for the CPUs.
        self.prepared.close()
        deadline = self._loop.time() + DEATH_S
        while (
            self._processes
            or self._dying
            or self._unreaped
            or self._pipes
            or any(check.running for check in self._checks.values())
        ) and self._loop.time() < deadline:
            # The event loop keeps handling exits and pipes during the wait.
            await asyncio.sleep(0.002)
        for process in (*self._processes.values(), *self._dying):
            self._log("error", f"{process.worker} (pid {process.pid}) could not be killed")
        for pipe in list(self._pipes):
            pipe.close()
        await self._reaper.close()
        self._born.close()
        self._life_locks.close()

    def _spawn(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: str | None,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        self._born[:] = bytes(len(self._born))
        try:
            return spawn(
                command, env, self._announce, folder=folder, pass_fds=pass_fds, stdin=stdin
            )
        except (OSError, subprocess.SubprocessError, ValueError):
            if pid := int.from_bytes(self._born[:], "little"):
                self._has_exited(pid)
            raise

    def _has_exited(self, pid: int) -> None:
        """Unregister an exited process from the orphan reaper, because its process ID may now be reused."""
        self._reaper.send(f"-{pid}\n")

    def _announce(self, pid: int) -> None:
        """Register a child with the orphan reaper. Called in the child.

        The child also writes its process ID to shared memory. If its exec fails, the parent cannot obtain the ID in any
        other way.
        """
        self._born[:] = pid.to_bytes(len(self._born), "little")
        self._reaper.announce(pid)

    # ---- states ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Renew the liveness timeout of each worker that is able to run, and report expired timeouts."""
        self._next_look = None
        now = self._loop.time()
        for worker, process in self._processes.items():
            process.hindrance, process.stat = proc_stats.cannot_run(process.pid, process.stat)
            if not process.hindrance and self._leases.renew(worker, now):
                process.frozen_reported_at = None
                self._noticed(WorkerThawed(worker))
        expired = self._leases.expired(now)
        for worker, process in self._processes.items():
            # Repeat the report, because a delayed message may have made the frozen worker appear to run.
            reported_at = process.frozen_reported_at
            again = reported_at is not None and now - reported_at >= self._leases.lease_s
            if worker in expired or (again and process.hindrance):
                process.frozen_reported_at = now
                self._noticed(WorkerFrozen(worker, process.hindrance))
        if not self._measures and now - self._usage_at >= USAGE_S:
            self._usage_at, self._measures = now, True
            workers = {process.pid: worker for worker, process in self._processes.items()}
            threading.Thread(target=self._measure, args=(workers, now), daemon=True).start()
        if self._processes:
            self._next_look = self._loop.call_later(self._look_s, self._look)

    def _measure(self, workers: Mapping[int, Worker], now: float) -> None:
        used: Mapping[int, Usage] = {}
        try:
            with contextlib.suppress(OSError):
                used = self._usage.look(workers.keys(), now)
        finally:
            self._from_thread(self._measured, workers, used)

    def _measured(self, workers: Mapping[int, Worker], used: Mapping[int, Usage]) -> None:
        self._measures = False
        for pid, usage in used.items():
            process = self._processes.get(workers[pid])
            if process is not None and process.pid == pid:
                self._sink.feed(workers[pid], "usage", msgspec.json.encode(usage))

    # ---- exits -----------------------------------------------------------------------------------------------------

    def _watch(self, process: _Process) -> None:
        try:
            process.pidfd = os.pidfd_open(process.pid)
        except OSError:  # Some sandboxes forbid pidfds. In that case, a thread waits for the exit.
            target = self._wait_in_thread
            threading.Thread(target=target, args=(process,), daemon=True).start()
        else:
            self._loop.add_reader(process.pidfd, self._on_exit, process)

    def _wait_in_thread(self, process: _Process) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        self._from_thread(self._on_exit, process)

    def _from_thread(self, done: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # The event loop has been closed.
            self._loop.call_soon_threadsafe(done, *arguments)

    def _on_ending(self, process: _Process, looks: int) -> None:
        if process.reported:
            return
        code = proc_stats.end_of(process.pid)
        if code is None and looks:
            self._loop.call_later(ENDING_S, self._on_ending, process, looks - 1)
        elif code and not proc_stats.uses_devices(process.pid):
            self._report(process, code, "")
            self._dying.add(process)

    def _on_exit(self, process: _Process) -> None:
        if process.pidfd is not None:
            self._loop.remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None
        if not process.reported:
            self._report(process, *process.status())
        self._dying.discard(process)
        for worker in [each for each in self._held if _one_slot(each, process.worker)]:
            self._start_held(worker)
        if process.overdue is not None:
            process.overdue.cancel()
        if process.life_lock is not None:
            process.life_lock.end()
        for pipe in process.pipes:
            pipe.end_within(LINGER_S)
        self._forget_if_done(process)
        self._unreaped.add(process)
        if self._sweep is None:
            self._sweep = self._loop.call_later(SWEEP_S, self._reap)

    def _report(self, process: _Process, code: int, reason: str) -> None:
        why = ""
        if code == -signal.SIGKILL and process.overdue is None and (why := self._memory.look()):
            reason = f"{describe_exit(code)}: {why}"
        # Otherwise, the worker's DataLoader processes would keep its sockets open.
        orphan_reaper_program.kill_group(process.pid)
        for pipe in list(process.pipes):
            pipe.drain()
        os.close(process.written)
        del self._processes[process.worker]
        if check := self._checks.get(process.worker):
            check.cancel()
        self._leases.drop(process.worker)
        tail = self._sink.tail(process.worker)
        process.reported = True
        cause = self._sink.cause(process.worker)
        self._exited(WorkerExited(process.worker, code, reason, tail, bool(why), cause))

    def _on_pipe_end(self, process: _Process, pipe: Pipe) -> None:
        self._pipes.discard(pipe)
        process.pipes.remove(pipe)
        self._forget_if_done(process)

    def _forget_if_done(self, process: _Process) -> None:
        if process.reported and not process.pipes:
            self._sink.drop(process.worker)

    def _reap(self) -> None:
        self._sweep = None
        dead, self._unreaped = self._unreaped, set()
        orphan_reaper_program.kill_sessions({process.pid for process in dead})
        for process in dead:
            self._has_exited(process.pid)
            # The process has exited but was not reaped, so this call returns immediately.
            process.popen.wait()

    def _groups(self) -> list[int]:
        processes = (*self._processes.values(), *self._dying, *self._unreaped)
        return [process.pid for process in processes]

    def _report_overdue(self, process: _Process) -> None:
        state = orphan_reaper_program.state_of(process.pid)[0]
        self._log(
            "warning",
            f"{process.worker} (pid {process.pid}) has not exited {DEATH_S:.0f} s after SIGKILL (process state"
            f" {state}); if it stays in state D, its device or file system hangs",
        )


def _reporting_to(pipe: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a worker needs to report its uncaught exception through a pipe.

    See `uncaught.sending`.
    """
    start = os.path.dirname(sitecustomize.__file__)
    path = os.pathsep.join(filter(None, (start, env.get("PYTHONPATH"))))
    target = f"/proc/{os.getpid()}/fd/{pipe}:{os.fstat(pipe).st_ino}"
    return {"PYTHONPATH": path, DIAGNOSTICS: target}


def _one_slot(a: Worker, b: Worker) -> bool:
    return (a.host, a.slot) == (b.host, b.slot)


class _Process:
    """State of one worker process, from its start until it is reaped."""

    def __init__(
        self,
        worker: Worker,
        popen: subprocess.Popen[bytes],
        life_lock: LifeLock | None,
        written: int,
    ) -> None:
        self.worker = worker
        # The worker's end of the diagnostics pipe, which stays open until the exit is reported.
        self.written = written
        self.popen = popen
        self.life_lock = life_lock
        self.pid = popen.pid
        self.pidfd: int | None = None
        self.pipes: list[Pipe] = []  # pipes that are still open
        self.reported = False  # whether the exit of the process was reported
        self.overdue: asyncio.TimerHandle | None = None
        self.stat: proc_stats.Stat | None = None  # state of the process at the last check
        self.hindrance = ""  # reason why the process could not run at the last check
        self.frozen_reported_at: float | None = None
        # Held while stacks are printed: stacks in one pipe must not be interleaved.
        self.stacks = asyncio.Lock()

    def status(self) -> tuple[int, str]:
        """Return the exit code or the negative signal number, and an empty string. Does not reap the process.

        If the code is unknown, return 255 and the reason why it is unknown.
        """
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            return 255, "its exit status was reaped by other code in the driver's process"
        assert status is not None, f"{self.worker} was reported dead, but it is running"
        died = status.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
        return (-status.si_status if died else status.si_status), ""
