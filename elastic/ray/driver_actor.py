"""Ray actor that runs the driver of one job, or of the jobs of one executor.

The driver's event loop runs in a separate thread, to which Ray's calls are forwarded, so that a job does not depend on
Ray's own event loop. The driver does not unpickle the values of user functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import select
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import ray

from elastic.driver.commandline import cli
from elastic.driver.commandline.options.argument_parser import RAY
from elastic.driver.commandline.options.keyword_arguments import words_of
from elastic.driver.discovery.interface import Log, ResourceDemand
from elastic.driver.events import Event
from elastic.driver.job.job import Job, Stoppable
from elastic.driver.job.start import start
from elastic.driver.job.start_multi_host import DEPOSED_CODE
from elastic.driver.journal.journal import Archive
from elastic.driver.processes.console import Console
from elastic.driver.ray import discovery as places
from elastic.driver.ray.discovery import RayDiscovery
from elastic.driver.ray.journal import RayArchive
from elastic.driver.ray.node.worker_calls import CallFailed
from elastic.driver.ray.starter import RayStarter
from elastic.errors import ElasticError, Invalid
from elastic.launcher.option_types import RayOptions
from elastic.protocol.report_values import Report
from elastic.ray import arguments, call_results
from elastic.ray.arguments import WorkerRequest
from elastic.ray.job_updates import JobUpdate, JobUpdates, UpdateBatch

RUN_FUNCTION = ("python", "-m", "elastic.launcher.run_function")
SERVE_CALLS = ("python", "-m", "elastic.ray.persistent_worker")
KEPT_S = 600.0  # seconds for which the outcome of a detached job stays available
STOP_CODE = 130
ENDS_S = 20.0  # seconds that a job may take to end after it has lost a persistent worker
CLOSE_S = 30.0  # seconds that a job may take to end after it was asked to
REPORT_BYTES = 256  # approximate size of a report in bytes

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverSpec:
    """Settings of the driver of a job on Ray.

    Args:
        name: name of the job, unique in the Ray cluster.
        secret: secret that the driver shares with its agents.
    """

    name: str
    wanted: WorkerRequest
    options: RayOptions
    # variables to add to the workers' environment
    environ: Mapping[str, str] = dataclasses.field(repr=False)
    # the driver's OTEL_* variables
    telemetry: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    secret: bytes = dataclasses.field(repr=False)
    detached: bool = False
    # pickled call of a detached job
    call: bytes | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Ended:
    """Outcome of a job on Ray.

    Args:
        invalid: whether the job was rejected before it started. The reason then contains the remedy.
    """

    code: int
    reason: str
    results: list[bytes | None] = dataclasses.field(default_factory=list, repr=False)
    reports: dict[int, Report] = dataclasses.field(default_factory=dict)
    invalid: bool = False


class DriverActor:
    """Ray actor that runs the driver of a job.

    The actor of a detached job begins the job immediately, and continues it after a restart by Ray.
    """

    def __init__(self, spec: DriverSpec) -> None:
        end_with_raylet()
        # The OpenTelemetry SDK reads its settings only from the environment.
        os.environ.update(spec.telemetry)
        self._job_spec = spec
        self._runs = 0
        self._driver: Stoppable | None = None
        self._starter: RayStarter | None = None
        self._desk: tuple[str, bytes] | None = None
        self._stopped: tuple[str, int] | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="elastic-driver", daemon=True).start()
        self._news: JobUpdates = self._apart(self._make_news()).result()
        self._job: asyncio.Future[Ended] | None = None
        self._placed = False
        self._again = spec.detached and _restarted()
        if spec.detached:
            assert spec.call is not None
            self._apart(self._begin(spec.call, RUN_FUNCTION)).result()
            threading.Thread(target=self._leave_later, name="elastic-leave", daemon=True).start()

    # ---- calls of the caller -----------------------------------------------------------------------------------------

    async def place(self) -> str:
        """Reserve resources for the initial workers. Return an empty string, or the reason why this is not possible."""
        return await self._in_loop(self._place())

    async def begin(self, call: bytes, *, persistent: bool = False) -> None:
        """Begin a job, after the previous one has ended.

        Args:
            call: pickled function for the workers to run.
            persistent: whether the workers are persistent and serve calls.
        """
        await self._in_loop(self._begin(call, SERVE_CALLS if persistent else RUN_FUNCTION))

    async def outcome(self) -> Ended:
        """Wait until the job has ended, and return its outcome."""
        return await self._in_loop(self._outcome())

    async def ready(self, count: int, within_s: float) -> str:
        """Wait until ``count`` persistent workers serve calls.

        Return an empty string, or the reason why the workers do not serve calls.
        """
        return await self._in_loop(self._ready(count, within_s))

    async def call(self, rank: int, blob: bytes) -> bytes:
        """Send a request to a persistent worker.

        Return its answer, or an answer with the reason why the worker was lost. See `elastic.ray.call_results`.
        """
        assert self._starter is not None, "persistent workers have been started"
        return await self._in_loop(self._call(rank, blob))

    async def news(self, source: str, begin: int, wait_s: float) -> UpdateBatch:
        return await self._in_loop(self._news.after(source, begin, wait_s))

    async def desk(self) -> tuple[str, bytes] | None:
        """Return the address and key of the job's operator service, or None if no job is running."""
        return self._desk

    async def stop(self, reason: str) -> None:
        """End the job with exit code 130. A second call ends the job immediately."""
        await self._in_loop(self._stop(reason))

    async def close(self) -> None:
        """Stop the job and release its resources."""
        await self._in_loop(self._close())

    async def pid(self) -> int:
        return os.getpid()

    # ---- tasks in the driver's event loop ----------------------------------------------------------------------------

    def _apart(self, work: Coroutine[Any, Any, Value]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _in_loop(self, work: Coroutine[Any, Any, Value]) -> Awaitable[Value]:
        return asyncio.wrap_future(self._apart(work))

    async def _make_news(self) -> JobUpdates:
        news = JobUpdates()
        spec = self._job_spec
        level = "debug" if spec.options.get("verbose") else "info"
        self._log: Log = Console(news.err, level=level, colour=False, timestamps=True)
        self._discovery = self._discover()
        self._archive = RayArchive(spec.name, log=self._log) if spec.detached else None
        return news

    def _discover(self) -> RayDiscovery:
        wanted = self._job_spec.wanted
        return RayDiscovery(
            places.ClusterRequest(
                arguments.places(wanted, self._job_spec.options),
                wanted.resources,
                wanted.placement_group,
                wanted.in_use,
                wanted.per_bundle,
                wanted.labels,
            ),
            self._log,
            job=self._job_spec.name,
            detached=self._job_spec.detached,
        )

    async def _place(self) -> str:
        if self._placed:
            return ""
        spec = self._job_spec
        count = spec.wanted.least if spec.wanted.elastic else spec.wanted.np
        if self._again:
            count = 0  # The workers that the previous driver placed keep their placement groups.
        try:
            await self._discovery.place(count, spec.wanted.placement_timeout)
        except Invalid as error:
            return str(error)
        self._placed = True
        return ""

    async def _begin(self, call: bytes, program: Sequence[str]) -> None:
        if self._job is not None and not self._job.done():
            raise Invalid("this executor is already running a function: wait until it returns")
        self._stopped = None
        self._job = asyncio.ensure_future(self._run(call, program))

    async def _run(self, call: bytes, program: Sequence[str]) -> Ended:
        self._runs += 1
        try:
            refused = await self._place()
            if refused:
                return Ended(2, refused, invalid=True)
            outcome = await start(self._make_job(call, program))
        except Invalid as error:
            return Ended(2, str(error), invalid=True)
        except OSError as error:
            return Ended(1, f"the driver can't start: {error}")
        except ElasticError as error:  # Another driver has taken over the job.
            return Ended(DEPOSED_CODE, str(error))
        finally:
            self._driver = self._desk = None
            if self._archive is not None and not self._archive.lost.is_set():
                with contextlib.suppress(ElasticError, OSError):
                    await self._discovery.close()
                self._placed = False
        return Ended(outcome.code, outcome.reason, outcome.results, outcome.reports)

    def _make_job(self, call: bytes, program: Sequence[str]) -> Job:
        spec, wanted = self._job_spec, self._job_spec.wanted
        name = spec.name if spec.detached else f"{spec.name}-{self._runs}"
        flags = ["-np", str(wanted.np), "--job", name, *words_of(RAY, spec.options)]
        if wanted.elastic:
            flags += ["--min-np", str(wanted.least), "--max-np", str(wanted.most)]
        environ = {**os.environ, **spec.environ}
        if self._runs > 1:
            self._discovery = self._discover()  # A discovery object can be used for only one job.
        self._starter = RayStarter(
            self._discovery.node_of, call, self._log, job=name, detached=spec.detached
        )
        provider = RayProvider(spec, self._discovery, self._starter, self._archive, self._again)
        options = cli.read_options([*flags, *program], environ)
        job = cli.make_job(options, environ, provider=provider)
        assert job.fleet is not None
        return dataclasses.replace(
            job,
            # Ray has set variables in this process's environment, so it is not forwarded to the workers.
            fleet=dataclasses.replace(job.fleet, forwarded=dict(spec.environ)),
            streams=(self._news.out, self._news.err),
            reported=self._reported,
            begun=self._begun,
            steered=self._steered,
        )

    def _reported(self, report: Report) -> None:
        self._news.put(JobUpdate("report", report), REPORT_BYTES + len(repr(report.metrics)))

    def _steered(self, address: str, key: bytes) -> None:
        self._desk = address, key

    def _begun(self, driver: Stoppable) -> None:
        self._driver = driver
        if self._stopped is not None:
            driver.stop(*self._stopped)

    async def _outcome(self) -> Ended:
        assert self._job is not None, "a job has started"
        return await asyncio.shield(self._job)

    async def _ready(self, count: int, within_s: float) -> str:
        assert self._job is not None, "a job has started"
        waiting = asyncio.ensure_future(self._all_present(count, within_s))
        both: set[asyncio.Future[Any]] = {waiting, self._job}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            ended = self._job.result()
            return f"the workers ended with exit code {ended.code}: {ended.reason}"
        return waiting.result()

    async def _all_present(self, count: int, within_s: float) -> str:
        deadline = self._loop.time() + within_s
        while self._starter is None or (present := await self._starter.present()) < count:
            if self._loop.time() >= deadline:
                there = 0 if self._starter is None else present
                return f"{there} of {count} workers have started within {within_s:g} s"
            await asyncio.sleep(0.05)
        return ""

    async def _call(self, rank: int, blob: bytes) -> bytes:
        assert self._starter is not None and self._job is not None
        why = "the workers have ended"
        if not self._job.done():
            try:
                answer: bytes = await self._starter.call(rank, blob)
                return answer
            except CallFailed as error:
                why = str(error)
            await asyncio.wait({self._job}, timeout=ENDS_S)
        if self._job.done():
            ended = self._job.result()
            why = f"the job ended with exit code {ended.code}: {ended.reason}"
        return call_results.lost(why)

    async def _stop(self, reason: str) -> None:
        self._stopped = (reason, STOP_CODE)
        if self._driver is not None:
            self._driver.stop(reason, STOP_CODE)

    async def _close(self) -> None:
        if self._job is not None and not self._job.done():
            await self._stop("the executor is shut down")
            with contextlib.suppress(Exception):
                await asyncio.wait({self._job}, timeout=CLOSE_S)
        with contextlib.suppress(ElasticError, OSError):
            await self._discovery.close()
        self._placed = False
        if self._archive is not None:
            with contextlib.suppress(ElasticError, OSError):
                await self._archive.forget()
        self._news.close()

    def _leave_later(self) -> None:
        """End the driver of a detached job `KEPT_S` seconds after the job, even if its outcome was never requested."""
        with contextlib.suppress(Exception):
            self._apart(self._outcome()).result()
        threading.Event().wait(KEPT_S)
        with contextlib.suppress(Exception):
            self._apart(self._close()).result(CLOSE_S)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _restarted() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's function warns that it is deprecated.
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def end_with_raylet() -> None:
    """Exit this process when its raylet dies.

    When a raylet dies, Ray treats the node as lost and restarts a detached driver elsewhere, but does not end the
    processes on the node.
    """
    raylet = int(os.environ.get("RAY_RAYLET_PID", "0"))
    if not raylet:
        return
    with contextlib.suppress(OSError):
        watched = os.pidfd_open(raylet)
        poll = select.poll()
        poll.register(watched, select.POLLIN)

        def watch() -> None:
            poll.poll()
            os._exit(1)

        threading.Thread(target=watch, name="elastic-raylet", daemon=True).start()


class RayProvider:
    """Provider of Ray's nodes, placement groups and actors for the driver.

    See `elastic.driver.job.provider.Provider`.
    """

    def __init__(
        self,
        spec: DriverSpec,
        discovery: RayDiscovery,
        starter: RayStarter,
        archive: RayArchive | None,
        again: bool,
    ) -> None:
        self._job_spec = spec
        self._discovery = discovery
        self._starter = starter
        self._archive = archive
        self.outlived = spec.detached
        self.connected = None
        self.fresh = not again
        self.lost = None if archive is None else archive.lost
        self.secret = spec.secret

    @property
    def towards(self) -> list[str]:
        return self._discovery.addresses()

    def discovery(
        self, log: Log, need: Callable[[], ResourceDemand], noticed: Callable[[Event], None]
    ) -> RayDiscovery:
        self._discovery.follow(need, noticed)
        return self._discovery

    def starter(self, log: Log) -> RayStarter:
        return self._starter

    def archive(self) -> Archive | None:
        return self._archive

    def environ_of(self, host: str) -> Mapping[str, str]:
        if not self._job_spec.wanted.gpus:
            return {}
        # The slots that share a GPU all list the GPU's ID.
        ids = [id for slot in self._discovery.gpus_of(host) for id in slot.split(",")]
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(ids))}

    async def listening(self, address: str) -> None:
        if self._job_spec.detached:
            await self._starter.redirect([address])
