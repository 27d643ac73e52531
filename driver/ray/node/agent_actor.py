"""Actor that runs a job's agent process on a Ray node and forwards calls to the workers there.

Makes no decisions.

The async actor starts the agent in a private folder and writes the configuration to its standard input, which stays
open while the actor runs. If the actor exits, the agent exits and kills its workers. If the agent exits, the actor
exits as well. The actor returns only plain values, so that the caller unpickles no untrusted data.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic import version
from elastic.driver.launch.agent_folder import make_folder, own_path, private, programs, sweep
from elastic.driver.launch.agent_modules import BOOT, agents_path, users_modules
from elastic.driver.launch.child_processes import MAX_LOGGED_LINES, ChildProcess, as_logged
from elastic.driver.launch.ssh_failures import why_ended, why_no_agent
from elastic.driver.launch.starter import Bootstrap
from elastic.driver.network.blocking_calls import within
from elastic.driver.ray.node.environment import environ_of_bytes, workers_environ
from elastic.driver.ray.node.worker_calls import CallFailed, WorkerCalls
from elastic.version import __version__

LINES_KEPT = 200  # maximum number of log lines kept until the starter fetches them
UNUSED_S = 120.0  # seconds after which an actor without an agent exits
FETCHED_S = 1.0  # seconds that the starter has for fetching the last log lines
SENT_S = 0.3  # seconds that Ray has for sending an answer before the process is killed
# seconds that the agent has for killing its workers, after which it is killed
END_S = 10.0
# the same limit if Ray has already declared the node lost
DYING_S = 2.0
REAP_S = 2.0  # timeout for the exit of a killed agent, in seconds

Line = tuple[str, str]  # level and text of a log line


@dataclass(frozen=True)
class RayProcess:
    """Information from Ray about the process of the actor.

    Args:
        given: the ``env_vars`` in the runtime_env of the process.
    """

    address: str
    namespace: str
    given: Mapping[str, str]
    above: Mapping[str, str]  # environment variables of the raylet
    folder: str  # folder with Ray's own modules
    raylet: int = 0  # process ID of the raylet, or 0 if unknown


class RayEngine:
    """Interface of the Ray runtime in which the actor runs."""

    def ray_process(self) -> RayProcess:
        import ray

        context = ray.get_runtime_context()
        given = dict(context.runtime_env).get("env_vars") or {}
        above: dict[str, str] = {}
        with contextlib.suppress(OSError, KeyError):
            above = environ_of_bytes(
                Path(f"/proc/{os.environ['RAY_RAYLET_PID']}/environ").read_bytes()
            )
        return RayProcess(
            address=context.gcs_address,
            namespace=context.namespace,
            given=dict(given),
            above=above,
            folder=os.path.dirname(ray.__file__),
            raylet=int(os.environ.get("RAY_RAYLET_PID", "0")),
        )

    def leave(self) -> None:
        """Exit the actor without an error.

        Ray allows an exit only in a method of the actor, so this method calls the actor's method ``leave``.
        """
        import ray

        ray.get_runtime_context().current_actor.leave.remote()

    def die(self, code: int = 1) -> None:
        """Exit the process immediately. Used if Ray cannot be reached."""
        os._exit(code)

    def exit(self) -> None:
        """Exit the actor. Must be called in one of the actor's methods."""
        import ray.actor

        ray.actor.exit_actor()  # type: ignore[no-untyped-call, unused-ignore]


class AgentActor:
    """Actor that runs one agent, from its start to its exit.

    ``python`` is the interpreter that runs the agent. Its folder comes first in the PATH of workers.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        engine: RayEngine | None = None,
        unused_s: float = UNUSED_S,
    ) -> None:
        self._python = python
        self._engine = engine or RayEngine()
        self._process: ChildProcess | None = None
        self._folder: Path | None = None
        self._lock: int | None = None
        self._calls: WorkerCalls | None = None
        self._host = ""
        self._lines: deque[Line] = deque(maxlen=LINES_KEPT)
        self._number = 0  # number of lines stored so far, including dropped ones
        self._left = MAX_LOGGED_LINES
        self._ended: Line | None = None  # reason for the exit of the agent, or None while it runs
        self._fetched = False  # whether the starter has fetched that reason
        # event that is set when the next line arrives, then replaced
        self._news: asyncio.Event | None = None
        self._clearing: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._raylet: int | None = None  # pidfd of the raylet
        self._dying: asyncio.Task[None] | None = None
        self._unused = threading.Timer(unused_s, self._engine.die, [0])
        self._unused.daemon = True
        self._unused.start()

    # ---- called by the starter ---------------------------------------------------------------------------------------

    async def hello(self) -> str:
        """Return the release of this package on the node."""
        return __version__

    async def pid(self) -> int:
        return os.getpid()

    async def start(self, bootstrap: bytes, call: bytes, ready_s: float) -> str:
        """Start the agent, and wait until it is ready.

        Returns an empty string, or the reason why the agent could not be started.
        """
        config = msgspec.json.decode(bootstrap, type=Bootstrap)
        self._host = config.host
        self._news = asyncio.Event()
        try:
            why = await self._start(config, call, ready_s)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            why = f"no agent was started on {config.host}: {where}{error.strerror or error}"
        except subprocess.SubprocessError as error:
            why = f"no agent was started on {config.host}: its Python does not run: {error}"
        if why:
            await self._clear()
        else:
            self._unused.cancel()
        return why

    async def news(self, after: int) -> tuple[int, list[Line], Line | None]:
        """Wait for log lines after the line with the number ``after``, or for the exit of the agent.

        Returns:
            The number of the last line, the lines, and the reason for the exit of the agent, or None while it runs.
        """
        while self._number <= after and self._ended is None:
            assert self._news is not None, "call start() first"
            await self._news.wait()
        count = min(self._number - after, len(self._lines))
        lines = list(self._lines)[len(self._lines) - count :]
        self._fetched = self._ended is not None
        return self._number, lines, self._ended

    async def redirect(self, addresses: list[str]) -> None:
        """Set the addresses at which the agent looks for the driver."""
        if self._folder is not None:
            new = self._folder / "drivers.new"
            new.write_text("".join(f"{address}\n" for address in addresses))
            new.rename(self._folder / "drivers")

    async def present(self, count: int = 0, within_s: float = 0.0) -> list[int]:
        """Wait until ``count`` persistent workers on this node are connected, or until the time limit.

        Returns the ranks of the connected workers.
        """
        return [] if self._calls is None else await self._calls.present(count, within_s)

    async def call(
        self, rank: int, blob: bytes, timeout_s: float | None = None
    ) -> tuple[bytes, str]:
        """Call a worker. Return its answer and an empty string, or empty bytes and the reason for the failure."""
        if self._calls is None:
            return b"", f"the worker of rank {rank} has exited together with the agent of its host"
        try:
            return await self._calls.call(rank, blob, timeout_s), ""
        except CallFailed as error:
            return b"", str(error)

    async def end(self) -> None:
        """Stop the agent, which also ends its workers, and remove the agent's files."""
        self._fetched = True
        await self._clear()

    async def leave(self) -> None:
        self._engine.exit()

    # ---- the agent ---------------------------------------------------------------------------------------------------

    async def _start(self, config: Bootstrap, call: bytes, ready_s: float) -> str:
        if self._process is not None or self._ended is not None:
            return f"no agent was started on {config.host}: its actor already had one"
        around = self._engine.ray_process()
        self._follow(around.raylet)
        await asyncio.to_thread(sweep)
        self._folder, self._lock = make_folder()
        folder = self._folder
        with open(folder / "call", "xb", opener=private) as file:
            file.write(call)
        await self.redirect(config.drivers)
        self._calls = WorkerCalls(str(folder / "calls"))
        await self._calls.open()
        own = await asyncio.to_thread(own_path, self._python, ready_s)
        users = users_modules(sys.path, own, around.folder)
        package = os.path.dirname(os.path.dirname(os.path.abspath(version.__file__)))
        environ = workers_environ(
            os.environ,
            around.given,
            around.above,
            programs=programs(self._python, folder),
            modules=users,
            address=around.address,
            namespace=around.namespace,
            call=str(folder / "call"),
            folder=os.getcwd(),
        )
        config = msgspec.structs.replace(
            config, outlives=False, drivers_file=str(folder / "drivers"), folder=os.getcwd()
        )
        path = ":".join(agents_path(own, package, users))
        self._process = process = ChildProcess(
            [self._python, "-I", "-c", BOOT, path],
            environ,
            msgspec.json.encode(config) + b"\n",
            outlives=False,
        )
        process.on_line = self._on_output_line
        try:
            release = await within(process.ready, ready_s)
        except asyncio.TimeoutError:
            release = None
        if release != __version__:
            return why_no_agent(
                config.host,
                process.code,
                process.last_output(),
                ours=__version__,
                release=release,
                limit_s=ready_s,
            )
        self._watch = asyncio.create_task(self._see_it_end(process))
        return ""

    def _follow(self, raylet: int) -> None:
        """Exit when the raylet exits.

        Ray then considers the node lost, but its worker processes, including this one, would continue as orphans.
        """
        if not raylet:
            return
        # Some sandboxes forbid pidfds. In that case, Ray must detect the loss of the node.
        with contextlib.suppress(OSError):
            self._raylet = os.pidfd_open(raylet)
            asyncio.get_running_loop().add_reader(self._raylet, self._raylet_exited)

    def _raylet_exited(self) -> None:
        assert self._raylet is not None
        asyncio.get_running_loop().remove_reader(self._raylet)
        self._dying = asyncio.create_task(self._die())

    async def _die(self) -> None:
        await self._clear()
        why = f"Ray's raylet on {self._host} is gone, and the agent exited with it"
        await self._report_last("warning", why)
        await asyncio.sleep(SENT_S)
        self._engine.die()

    def _on_output_line(self, line: str) -> None:
        """Store a line that the agent has printed.

        The agent sends its log to the driver, so what it prints is usually an error.
        """
        level, text = as_logged(line)
        if level != "debug":
            if not self._left:
                return
            text += "; further lines are omitted" if self._left == 1 else ""
            self._left -= 1
        self._lines.append((level, text))
        self._number += 1
        self._wake()

    async def _see_it_end(self, process: ChildProcess) -> None:
        await process.ended.wait()
        if self._dying is not None:
            return
        why = why_ended(self._host, process.code, process.last_output(), by_ssh=False)
        await self._clear()
        await self._report_last("warning" if process.code else "debug", why)
        await asyncio.sleep(SENT_S)
        self._engine.leave()

    async def _report_last(self, level: str, why: str) -> None:
        self._ended = (level, why)
        self._wake()
        deadline = asyncio.get_running_loop().time() + FETCHED_S
        while not self._fetched and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    def _wake(self) -> None:
        assert self._news is not None
        self._news.set()
        self._news = asyncio.Event()

    async def _clear(self) -> None:
        if self._clearing is None:
            self._clearing = asyncio.create_task(self._clear_once())
        await asyncio.shield(self._clearing)

    async def _clear_once(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.hang_up()
            for limit_s in (END_S if self._dying is None else DYING_S, REAP_S):
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(process.ended.wait(), limit_s)
                    break
                process.kill()
            process.release()
        calls, self._calls = self._calls, None
        if calls is not None:
            await calls.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._raylet is not None:
            asyncio.get_running_loop().remove_reader(self._raylet)
            os.close(self._raylet)
            self._raylet = None
