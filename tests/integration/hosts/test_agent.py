"""The local agent with real processes: exits are noticed immediately, and no process outlives its starter."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from unittest.mock import create_autospec

import psutil
import pytest

from elastic.driver.events import Event, WorkerExited, WorkerFrozen, WorkerProbed, WorkerThawed
from elastic.driver.launch.local_launcher import LocalLauncher
from elastic.driver.monitoring.stack_excerpts import TRAINING
from elastic.driver.output_interfaces import Stream
from elastic.driver.processes import orphan_reaper_program, proc_stats
from elastic.driver.processes.out_of_memory import OutOfMemory
from elastic.driver.processes.worker_output import Output
from elastic.protocol.life_lock import LIFE_LOCK
from elastic.protocol.messages import Place, Worker
from harness import wording
from harness.processes import lives
from harness.stalls import debugged, freezer
from harness.starter_contract import gone
from harness.waiting import until

A, B = Worker("localhost", 0), Worker("localhost", 1)
ROOT = Path(__file__).parents[3]
DEADLINE_S = 60.0
LEASE_S = 0.4


class Host:
    """A launcher under test, and what it reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exits: asyncio.Queue[WorkerExited] = asyncio.Queue()
        self.seen: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()
        self.log: list[str] = []
        self.ranks: dict[Worker, int] = {}
        self.out, self.err = bytearray(), bytearray()
        self.output = Output(
            place_of=lambda w: Place(self.ranks[w], 2, 0, 2, 0, 1) if w in self.ranks else None,
            stdout=self.out.extend,
            stderr=self.err.extend,
        )
        self.launcher = LocalLauncher(
            sink=self.output,
            log=lambda level, text: self.log.append(f"{level}: {text}"),
            lease_s=LEASE_S,
        )

    def start(self, worker: Worker, command: str | list[str], **env: str) -> int | None:
        """A shell line or a command; returns its pid."""
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else command
        path = os.environ["PATH"]
        self.launcher.start(worker, words, {"PATH": path, "OUT": str(self.folder), **env})
        return self.launcher.agent.pid(worker)

    async def exit(self) -> WorkerExited:
        return await asyncio.wait_for(self.exits.get(), DEADLINE_S)

    async def sees(self) -> Event:
        """Return the next notification."""
        return (await self.timed_sight())[1]

    async def timed_sight(self) -> tuple[float, Event]:
        return await asyncio.wait_for(self.seen.get(), DEADLINE_S)

    async def looks(self, times: int = 8) -> None:
        """Until it has looked at the processes so often: more than a lease."""
        looked = 0
        look = self.launcher.agent._leases.expired

        def counted(now: float) -> list[Worker]:
            nonlocal looked
            looked += 1
            return look(now)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.launcher.agent._leases, "expired", counted)
            await until(lambda: looked >= times, f"{times} looks")

    async def written(self, name: str) -> str:
        """A line that a worker writes to a file."""
        path = self.folder / name
        await until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path}")
        return path.read_text().strip()


@contextlib.asynccontextmanager
async def hosting(folder: Path) -> AsyncIterator[Host]:
    host = Host(folder)
    await host.launcher.open(
        host.exits.put_nowait, lambda e: host.seen.put_nowait((time.monotonic(), e))
    )
    try:
        yield host
    finally:
        await host.launcher.close()
        host.output.close()


def conversation(test):
    """Runs an async test with a Host; afterwards no child and no descriptor of ours is left."""

    def run(tmp_path: Path) -> None:
        async def talk() -> None:
            async with hosting(tmp_path) as host:
                await test(host)

        before = psutil.Process().children()
        gc.collect()  # descriptors of earlier tests would be closed at any time
        fds = len(os.listdir("/proc/self/fd"))
        asyncio.run(asyncio.wait_for(talk(), 100.0))
        assert psutil.Process().children() == before
        assert len(os.listdir("/proc/self/fd")) == fds

    run.__name__ = test.__name__
    return run


# ---- exits -----------------------------------------------------------------------------------------------------------


@conversation
async def test_exit_codes_and_signals_are_reported(host):
    for command, code in (
        ("exit 0", 0),
        ("exit 3", 3),
        ("kill -KILL $$", -9),
        ("kill -SEGV $$", -11),
    ):
        host.start(A, command)
        assert await host.exit() == WorkerExited(A, code)
    assert host.launcher.alive() == frozenset()


@conversation
async def test_oom_kill_is_reported_as_the_reason_of_an_exit(host):
    memory = create_autospec(OutOfMemory, instance=True)
    memory.look.return_value = "out of memory, the limit is 2.0 GB"
    host.launcher.agent._memory = memory
    host.start(A, "kill -KILL $$")
    told = "signal 9 SIGKILL: out of memory, the limit is 2.0 GB"
    assert await host.exit() == WorkerExited(A, -9, told, out_of_memory=True)
    host.start(A, ["sleep", "60"])
    host.launcher.kill(A)
    assert await host.exit() == WorkerExited(A, -9)  # by us


@conversation
async def test_an_exit_is_noticed_immediately_and_not_at_the_next_check(host):
    host.launcher.agent._look_s = 3600.0
    pid = host.start(A, ["sleep", "60"])
    os.kill(pid, signal.SIGKILL)
    assert (await host.exit()).code == -9


HOLDS = f"""
import os, sys
from pathlib import Path
from elastic.protocol import life_lock
life_lock.hold(os.environ["{LIFE_LOCK}"])
Path(os.environ["OUT"], "held").write_text(str(life_lock._held) + "\\n")
"""


@conversation
async def test_worker_death_is_reported_before_the_kernel_reports_the_exit(host):
    with pytest.MonkeyPatch.context() as patch:
        watch = host.launcher.agent._watch
        unwatched: list[object] = []
        patch.setattr(host.launcher.agent, "_watch", unwatched.append)
        patch.setattr(proc_stats, "uses_devices", lambda pid: False)  # it may have ended by then
        pid = host.start(A, [sys.executable, "-c", f"{HOLDS}\nimport time\ntime.sleep(60)"])
        assert await host.written("held") == "True"
        os.kill(pid, signal.SIGKILL)
        assert await host.exit() == WorkerExited(A, -9)
        process = Path(f"/proc/{pid}")
        assert process.exists()  # not reaped, and nobody gets its number
    # Its ports and its memory may be its own yet: whoever follows in its slot waits, and can be killed meanwhile.
    for incarnation in (2, 3):
        assert host.start(Worker(A.host, A.slot, incarnation), "sleep 60") is None
    host.launcher.kill(Worker(A.host, A.slot, 2))
    assert await host.exit() == WorkerExited(Worker(A.host, A.slot, 2), -9)
    assert host.launcher.agent.alive() == {Worker(A.host, A.slot, 3)}
    watch(unwatched[0])
    await until(lambda: not process.exists(), "its end")
    await until(lambda: host.launcher.agent.pid(Worker(A.host, A.slot, 3)) is not None, "a start")
    assert host.exits.empty()


@conversation
async def test_a_worker_that_becomes_another_program_has_not_died(host):
    looks: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        end_of = proc_stats.end_of
        patch.setattr(proc_stats, "end_of", lambda pid: looks.append(end_of(pid)))
        become = "os.execvp('sh', ['sh', '-c', 'sleep 60'])"
        host.start(A, [sys.executable, "-c", f"{HOLDS}\n{become}"])
        await until(lambda: bool(looks), "a look at it")
    assert looks[0] is None and host.exits.empty()
    host.launcher.kill(A)
    assert await host.exit() == WorkerExited(A, -9)


@conversation
async def test_without_pidfd_a_thread_waits(host):
    def forbidden(pid: int) -> int:
        raise PermissionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pidfd_open", forbidden)
        host.start(A, "exit 5")
        host.start(B, ["sleep", "60"])
        assert await host.exit() == WorkerExited(A, 5)
        host.launcher.kill(B)
        assert await host.exit() == WorkerExited(B, -9)


@conversation
async def test_kill_ends_the_children_of_a_worker(host):
    host.start(A, "sleep 60 & echo $! >$OUT/child; wait")
    child = int(await host.written("child"))
    host.launcher.kill(A)
    host.launcher.kill(A)
    assert (await host.exit()).code == -9
    gone(child)
    host.launcher.kill(A)


@conversation
async def test_a_stopped_worker_can_be_killed(host):
    pid = host.start(A, ["sleep", "60"])
    os.kill(pid, signal.SIGSTOP)
    host.launcher.kill(A)
    assert (await host.exit()).code == -9


@conversation
async def test_exit_ends_the_children_of_a_worker(host):
    host.start(A, "sleep 60 & echo $! >$OUT/child")
    child = int(await host.written("child"))
    assert (await host.exit()).code == 0
    gone(child)


@conversation
async def test_children_with_their_own_process_group_are_found(host):
    # A shell with job control puts each job into its own group, within the worker's session.
    host.start(A, "set -m; sleep 60 & echo $! >$OUT/child; exit 4")
    child = int(await host.written("child"))
    assert (await host.exit()).code == 4
    gone(child)


@conversation
async def test_end_of_output_is_not_an_exit_and_an_open_pipe_does_not_delay_an_exit(host):
    pid = host.start(A, "exec >/dev/null 2>&1; echo >$OUT/closed; exec sleep 60")
    await until((host.folder / "closed").exists, "closed pipes")
    # A daemon in a session of its own keeps the worker's pipes open for longer than the worker lives.
    host.start(B, "setsid sleep 60 & echo $! >$OUT/daemon; echo last; exit 2")
    assert await host.exit() == WorkerExited(B, 2)
    assert host.launcher.alive() == {A} and lives(pid)
    await until(lambda: bytes(host.out) == b"[localhost:1] last\n", "the last line")
    for process in orphan_reaper_program.members_of([int(await host.written("daemon"))]):
        os.kill(process, signal.SIGKILL)


@conversation
async def test_many_workers_report_their_exit_codes(host):
    workers = [Worker("localhost", n) for n in range(24)]
    for worker in workers:
        host.start(worker, f"exit {worker.slot}")
    exits = [await host.exit() for _ in workers]
    assert {e.worker.slot: e.code for e in exits} == {n: n for n in range(24)}


# ---- states ----------------------------------------------------------------------------------------------------------


@conversation
async def test_stopped_worker_is_reported_frozen_after_its_lease_and_thawed_after_sigcont(host):
    pid = host.start(A, ["sleep", "60"])
    host.start(B, ["sleep", "60"])
    await host.looks(2)
    stopped_at = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    at, event = await host.timed_sight()
    assert event == WorkerFrozen(A, "stopped by a signal such as SIGSTOP")
    assert LEASE_S / 2 < at - stopped_at < LEASE_S + 20.0
    os.kill(pid, signal.SIGCONT)
    assert await host.sees() == WorkerThawed(A)
    await host.looks()
    assert host.seen.empty()  # it is said once, and B sleeps in good health


@pytest.mark.parametrize("kind", ["unified", "freezer"])
def test_frozen_cgroup_is_detected_although_its_processes_appear_asleep(kind, tmp_path):
    with freezer(kind) as cgroup:

        @conversation
        async def talk(host):
            pid = host.start(A, ["sleep", "60"])
            cgroup.freeze(pid)
            assert await host.sees() == WorkerFrozen(A, "its cgroup is frozen")
            host.launcher.dump(A, all_threads=False)
            assert host.log[-1].endswith(wording.PROCESS_CANT_RUN_CANT)
            cgroup.thaw()
            assert await host.sees() == WorkerThawed(A)

        talk(tmp_path)


@conversation
async def test_a_worker_under_a_debugger_is_not_frozen(host):
    pid = host.start(A, ["sleep", "60"])
    with debugged(pid):
        await host.looks()
        host.launcher.probe([A])
        seen = await host.sees()
        assert isinstance(seen, WorkerProbed) and seen.traced and seen.state == "t"
        os.kill(pid, signal.SIGSTOP)
        await host.looks()
        assert host.seen.empty()
    assert await host.sees() == WorkerFrozen(A, "stopped by a signal such as SIGSTOP")


@conversation
async def test_paused_agent_reports_no_frozen_worker(host):
    pid = host.start(A, ["sleep", "60"])
    await host.looks(2)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2)  # the whole loop stands still, as in a suspended machine
    os.kill(pid, signal.SIGCONT)
    await host.looks()
    assert host.seen.empty()


@conversation
async def test_a_killed_worker_is_not_reported_as_frozen(host):
    with freezer("freezer") as cgroup:
        pid = host.start(A, ["sleep", "60"])
        cgroup.freeze(pid)
        host.launcher.kill(A)
        await host.looks()
        assert host.seen.empty() and lives(pid)  # not even SIGKILL ends it now
        cgroup.thaw()
        assert await host.exit() == WorkerExited(A, -9)


@conversation
async def test_probe_counts_cpu_time_and_io_of_a_worker_and_its_children(host):
    host.start(A, ["sleep", "60"])
    host.start(
        B, "while :; do :; done & head -c 3000000 /dev/zero >$OUT/bytes; echo >$OUT/on; wait"
    )
    await host.written("on")

    async def probe() -> list[WorkerProbed]:
        host.launcher.probe([A, B, Worker("elsewhere", 0)])
        first, second = await host.sees(), await host.sees()
        assert isinstance(first, WorkerProbed) and isinstance(second, WorkerProbed)
        assert [first.worker, second.worker] == [A, B] and host.seen.empty()
        return [first, second]

    idle, busy = await probe()
    while True:
        later_idle, later = await probe()
        if later.cpu_s >= busy.cpu_s + 0.05:
            break
        await asyncio.sleep(0.01)
    assert later_idle.cpu_s - idle.cpu_s < later.cpu_s - busy.cpu_s
    assert later_idle.io_bytes == idle.io_bytes and idle.state == "S"
    assert busy.io_bytes >= 2 * 3_000_000


# ---- stacks ----------------------------------------------------------------------------------------------------------

BEGINS = """
import ctypes, pathlib, signal, sys, threading, time
from elastic.runtime.failures import stack_dump

def begin():
    stack_dump.answer()
    pathlib.Path(sys.argv[1]).touch()

def waits_for_ever():
    threading.Event().wait()
"""
MAIN_THREAD = f"""{BEGINS}
def hangs_here():
    begin()
    time.sleep(60)

threading.Thread(target=waits_for_ever, name="second", daemon=True).start()
hangs_here()
"""
ANOTHER_THREAD = f"""{BEGINS}
def trains_here():
    begin()
    time.sleep(60)

threading.Thread(target=trains_here).start()
waits_for_ever()
"""
BLOCKS = f"""{BEGINS}
def hangs_here():
    begin()
    time.sleep(60)

signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGRTMIN + 4}})
hangs_here()
"""
HOLDS_THE_INTERPRETER = f"""{BEGINS}
def in_c():
    begin()
    ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock, and libc's sleep() returns after a signal

def again_and_again():
    while True:
        in_c()

threading.Thread(target=waits_for_ever, daemon=True).start()
again_and_again()
"""
RECURSES_EVERYWHERE = f"""{BEGINS}
def deeper(left):
    return left and 1 + deeper(left - 1)

def generates(left):
    if left:
        yield from generates(left - 1)
    yield left

def works():
    while True:
        deeper(400)
        list(generates(40))
        exec("[each for each in range(9)]")

sys.setrecursionlimit(5000)
for _ in range(8):
    threading.Thread(target=works, daemon=True).start()
begin()
works()
"""


class Stacks:
    """The lines of the stacks of worker A."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.lines: list[str] = []
        host.output._on_lines = self._add

    def _add(self, worker: Worker, name: str, stream: Stream, lines: Sequence[bytes]) -> None:
        self.lines += [line.decode() for line in lines if stream == "diagnostics"]

    async def start(self, script: str) -> int:
        path = self.host.folder / "began"
        pid = self.host.start(A, [sys.executable, "-c", script, str(path)])
        await until(path.exists, "a worker that answers")
        assert pid is not None
        return pid

    async def written(self, *, all_threads: bool = False) -> dict[str, list[str]]:
        """Return the functions of each thread, by header, once the worker has written them."""
        self.lines.clear()
        self.host.launcher.dump(A, all_threads=all_threads)
        await until(lambda: not self.host.launcher.agent._dumps, "the end of the stacks")
        for process in self.host.launcher.agent._processes.values():
            for pipe in process.pipes:
                pipe.drain()
        found: dict[str, list[str]] = {}
        for line in self.lines:
            if line.startswith("  "):
                found[[*found][-1]].append(line.rpartition(" in ")[2])
            else:
                found[line] = []
        return found


@conversation
async def test_stacks_when_unavailable_then_the_reason_is_logged_and_no_process_ends(host):
    pid = host.start(B, ["sleep", "60"])
    host.launcher.dump(B, all_threads=True)
    assert host.log[-1] == wording.INFO_NO_STACKS_LOCALHOST
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: orphan_reaper_program.state_of(pid)[0] == "T", "a stopped process")
    host.launcher.dump(B, all_threads=False)
    assert host.log[-1].endswith(wording.PROCESS_CANT_RUN_CANT)
    host.launcher.dump(Worker("elsewhere", 0), all_threads=False)
    logged = len(host.log)
    stacks = Stacks(host)
    await stacks.start(BLOCKS)
    assert await stacks.written() == {}
    assert len(host.log) == logged + 1
    assert host.launcher.alive() == {A, B}


@conversation
async def test_stacks_when_the_main_thread_trains_then_other_threads_write_only_on_request(host):
    stacks = Stacks(host)
    pid = await stacks.start(MAIN_THREAD)
    [(header, frames)] = (await stacks.written()).items()
    assert header.startswith(f"{TRAINING} {pid} ") and frames == ["hangs_here", "<module>"]
    (first, frames), (second, others) = (await stacks.written(all_threads=True)).items()
    assert first == header and frames == ["hangs_here", "<module>"]
    assert not second.startswith(TRAINING) and "waits_for_ever" in others
    await until(lambda: b"in hangs_here" in host.err, "its stack in the log")


@conversation
async def test_stacks_when_another_thread_trains_then_that_thread_writes_first(host):
    stacks = Stacks(host)
    pid = await stacks.start(ANOTHER_THREAD)
    [(header, frames)] = (await stacks.written()).items()
    assert header.startswith(TRAINING) and f" {pid} " not in header and "trains_here" in frames
    first, main = await stacks.written(all_threads=True)
    assert first == header and main.startswith(f"Thread {pid} ")


@conversation
async def test_stacks_when_a_c_call_holds_the_gil_then_all_threads_write(host):
    stacks = Stacks(host)
    await stacks.start(HOLDS_THE_INTERPRETER)
    [(_, frames)] = (await stacks.written()).items()
    assert frames[:2] == ["in_c", "again_and_again"]
    assert len(await stacks.written(all_threads=True)) == 2


@conversation
async def test_stacks_when_two_are_requested_at_once_then_each_is_complete(host):
    stacks = Stacks(host)
    pid = await stacks.start(ANOTHER_THREAD)
    host.launcher.dump(A, all_threads=True)
    await stacks.written(all_threads=True)
    headers = [line for line in stacks.lines if not line.startswith("  ")]
    assert len(headers) == 4 and headers[:2] == headers[2:] and f" {pid} " in headers[1]


@pytest.mark.nightly
def test_stacks_when_all_threads_recurse_then_300_dumps_do_not_end_the_process(tmp_path):
    @conversation
    async def talk(host):
        stacks = Stacks(host)
        pid = await stacks.start(RECURSES_EVERYWHERE)
        alone = [await stacks.written() for _ in range(270)]
        assert {len(found) for found in alone} == {1}
        every = [await stacks.written(all_threads=True) for _ in range(30)]
        # On a busy machine, the time limit may end a dump before the last thread.
        assert max(map(len, every)) == 9
        assert all(all(found.values()) for found in alone + every)
        assert lives(pid) and host.launcher.alive() == {A} and host.exits.empty()

    talk(tmp_path)


# ---- starts ----------------------------------------------------------------------------------------------------------


@conversation
async def test_program_that_cannot_be_started_exits_with_a_reason(host):
    plain = host.folder / "plain.py"
    plain.write_text("print(1)\n")
    bad = host.folder / "bad"
    bad.write_text("#!/no/such/interpreter\n")
    bad.chmod(0o755)
    for program, code, reason in (
        ("no-such-program", 127, wording.THERE_NO_SUCH_PROGRAM),
        (str(plain), 126, f"try `chmod +x` or `python {plain}`"),
        (str(bad), 127, wording.INTERPRETER_NAMED_FIRST_LINE),
        (str(host.folder), 126, wording.NOT_EXECUTABLE),
    ):
        host.start(A, [program])
        event = await host.exit()
        assert (event.worker, event.code) == (A, code)
        assert repr(program) in event.reason and reason in event.reason
    assert host.launcher.alive() == frozenset()


@conversation
async def test_reaper_drops_a_program_that_could_not_be_started(host):
    host.start(A, ["no-such-program"])
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.launcher.agent._reaper, "send", told.append)
        host.start(B, ["no-such-program"])
    assert len(told) == 1 and told[0].startswith("-")
    assert [(await host.exit()).code, (await host.exit()).code] == [127, 127]


@conversation
async def test_a_worker_has_its_session_and_exactly_its_environment(host):
    pid = host.start(A, "env >$OUT/env; echo >$OUT/done; exec sleep 60", COLOUR="blue")
    await host.written("done")
    assert os.getsid(pid) == os.getpgid(pid) == pid
    env = dict(line.split("=", 1) for line in (host.folder / "env").read_text().splitlines())
    assert env["COLOUR"] == "blue" and "HOME" not in env
    # An inherited descriptor would stay for ever; the one with which sleep's loader reads a library does not.
    await until(
        lambda: sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"],
        "no descriptors but the standard ones",
    )
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"


# ---- output ----------------------------------------------------------------------------------------------------------


@conversation
async def test_output_has_its_rank_and_is_complete(host):
    host.ranks[B] = 1
    host.start(B, 'printf "no end"; printf "to stderr\\n" >&2; exit 1')
    assert await host.exit() == WorkerExited(B, 1, "", "to stderr\n")
    await host.launcher.close()
    host.output.close()
    assert bytes(host.out) == b"[1] no end\n"
    assert bytes(host.err) == b"[1] to stderr\n"


@conversation
async def test_an_exit_carries_the_end_of_stderr(host):
    host.start(A, 'i=0; while [ $i -lt 4000 ]; do echo "line $i"; i=$((i+1)); done >&2; exit 1')
    event = await host.exit()
    assert event.output.endswith("line 3998\nline 3999\n")
    assert len(event.output) == 20 * 1024


# ---- the reaper and the death of the driver --------------------------------------------------------------------------


@conversation
async def test_a_dead_reaper_is_replaced_with_its_full_state(host):
    host.start(A, ["sleep", "60"])
    first = host.launcher.agent._reaper.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: host.launcher.agent._reaper.pid not in (None, first), "another reaper")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(host.launcher.agent._reaper.pid, number)
    host.launcher.kill(A)
    assert (await host.exit()).code == -9
    assert not host.log


@conversation
async def test_a_reaper_that_keeps_dying_is_given_up(host):
    host.start(A, ["sleep", "60"])
    killed = set()
    while not host.log:
        pid = host.launcher.agent._reaper.pid
        if pid is not None and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.002)
    assert len(killed) == 3
    assert host.log[0].startswith(wording.WARNING_WARDEN_PROCESS_DOES)
    host.launcher.kill(A)
    assert (await host.exit()).code == -9


@conversation
async def test_reaper_holds_no_descriptor_of_its_starter(host):
    host.start(A, ["sleep", "60"])
    pid = host.launcher.agent._reaper.pid

    def held() -> set[str]:
        with contextlib.suppress(FileNotFoundError):
            return {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        return set()

    await until(lambda: "anon_inode:[pidfd]" in held(), "the reaper watching")
    assert {name.partition(":[")[0] for name in held()} == {"pipe", "/dev/null", "anon_inode"}
    assert len([name for name in held() if name.startswith("pipe:")]) == 1
    assert os.getsid(pid) == pid
    assert not Path(f"/proc/{pid}/environ").read_bytes()


DRIVER = """
import asyncio, os, sys, time
from elastic.driver.events import ExitCause
from elastic.driver.launch.local_launcher import LocalLauncher
from elastic.protocol.messages import Worker

class Sink:
    def feed(self, worker, stream, data): pass
    def finish(self, worker, stream): pass
    def tail(self, worker): return ""
    def cause(self, worker): return ExitCause.UNKNOWN
    def training_thread(self, worker): return None
    def drop(self, worker): pass

async def main():
    launcher = LocalLauncher(sink=Sink(), log=print)
    await launcher.open(lambda event: None, lambda event: None)
    script = "sleep 600 & a=$!; set -m; sleep 600 & echo $$ $a $! >$OUT/pids; exec sleep 600"
    launcher.start(Worker("localhost", 0), ["/bin/sh", "-c", script], dict(os.environ))
    if "fork" in sys.argv and os.fork() == 0:  # somebody who inherits the pipe to the reaper
        time.sleep(600)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["plain", "fork", "no reaper"])
def test_no_process_outlives_a_killed_driver(tmp_path, mode):
    out = {**os.environ, "OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = textwrap.dedent(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, "-c", code, mode], env=out, start_new_session=True, close_fds=True
    )
    try:
        pids = tmp_path / "pids"
        asyncio.run(until(lambda: pids.exists() and pids.read_text().endswith("\n"), "pids"))
        worker, child, grouped = map(int, pids.read_text().split())
        assert all(map(lives, (worker, child, grouped)))
        reapers = [
            each.pid
            for each in psutil.Process(driver.pid).children()
            if "orphan_reaper_program.py" in " ".join(each.cmdline())
        ]
        assert len(reapers) == 1
        if mode == "no reaper":  # PDEATHSIG alone takes the worker
            os.kill(driver.pid, signal.SIGSTOP)  # or it would start another one
            os.kill(reapers[0], signal.SIGKILL)
        os.kill(driver.pid, signal.SIGKILL)
        gone(worker)
        if mode != "no reaper":
            gone(child)
            gone(grouped)
            gone(reapers[0])
        else:
            orphan_reaper_program.kill_sessions([worker])
    finally:
        driver.kill()
        driver.wait(DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)


# ---- the agent's command ---------------------------------------------------------------------------------------------


def test_agent_that_is_terminated_has_not_completed_its_pod(tmp_path):
    """A Kubernetes Job replaces a pod only if its container fails."""
    secret = tmp_path / "job.secret"
    secret.write_text("0" * 64)
    secret.chmod(0o600)
    command = [str(Path(sys.executable).parent / "elasticrun"), "agent", "--job", "a"]
    command += ["--host", "127.0.0.1", "--driver", "127.0.0.1:1", "--secret-file", str(secret)]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with agent:
        assert agent.stdout is not None
        # It handles signals when it has looked for its driver, which is the second line.
        assert agent.stdout.readline() and agent.stdout.readline()
        agent.send_signal(signal.SIGTERM)
        agent.stdout.read()
        assert agent.wait(DEADLINE_S) == 143
