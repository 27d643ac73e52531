"""Client of a driver actor: creates the actor, receives its output and reports, and waits for its job to end.

This module imports Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.driver.etcd.leader_election import LeadershipLost
from elastic.driver.job.multi_host_plan import FORWARDED
from elastic.driver.network.secret import SECRET_BYTES
from elastic.driver.ray.detached_drivers import NAMESPACE as NAMESPACE
from elastic.driver.ray.detached_drivers import actor_name, find_actor
from elastic.driver.ray.discovery_calls import check_labels as check_labels
from elastic.driver.ray.discovery_calls import held_of as held_of
from elastic.driver.ray.discovery_calls import remove_claims
from elastic.driver.ray.journal import RayArchive
from elastic.errors import Invalid, JobFailed
from elastic.launcher.launch_function import run_apart, values_of
from elastic.launcher.option_types import RayOptions
from elastic.protocol.report_values import Report
from elastic.ray.arguments import BOTH, CURRENT, WorkerRequest, check_environ, telemetry
from elastic.ray.driver_actor import DriverActor, DriverSpec, Ended
from elastic.ray.job_updates import UpdateBatch

POLL_S = 1.0
# timeout in seconds for the start of the actor, before which Ray may have to install a runtime environment
START_S = 120.0
CLOSE_S = 45.0
HEAD = "node:__internal_head__"

OnOutput = Callable[[str, bytes], None]  # called with "stdout" or "stderr", and with whole lines
OnReport = Callable[[Report], None]


def connect() -> None:
    """Connect to the Ray cluster at RAY_ADDRESS, or to a new local one, unless this process is already connected."""
    if not ray.is_initialized():
        ray.init()


def with_group(wanted: WorkerRequest) -> WorkerRequest:
    """Return the request with the caller's placement group, if the request selects it and the caller is in one."""
    if isinstance(wanted.placement_group, str):
        if wanted.placement_group != CURRENT:
            raise Invalid(
                f"placement_group is {wanted.placement_group!r}: pass 'current', None or a PlacementGroup"
            )
        group = ray.util.get_current_placement_group()
        if group is not None and wanted.labels:
            raise Invalid(BOTH)
        in_use = {} if group is None else held_of(group)
        return replace(wanted, placement_group=group, in_use=in_use)
    if wanted.placement_group is not None and not hasattr(wanted.placement_group, "bundle_specs"):
        kind = type(wanted.placement_group).__name__
        raise Invalid(f"placement_group is a {kind}: pass 'current', None or a PlacementGroup")
    return wanted


class DriverClient:
    """Client of one driver actor. Not thread-safe."""

    def __init__(
        self, actor: Any, *, on_output: OnOutput | None = None, on_report: OnReport | None = None
    ) -> None:
        self._actor = actor
        self._on_output = on_output or to_streams
        self._on_report = on_report
        self._complained = False
        self._source, self._next = "", 0
        self._fetch: Any = None  # pending Ray call that fetches output and reports, or None

    @classmethod
    def made(
        cls,
        wanted: WorkerRequest,
        options: RayOptions,
        environ: Mapping[str, str],
        *,
        detached: str | None = None,
        call: bytes | None = None,
        on_output: OnOutput | None = None,
        on_report: OnReport | None = None,
    ) -> DriverClient:
        """Create a driver actor, and return a client for it.

        Raises:
            Invalid: a job with this name already exists.
        """
        name = detached or uuid.uuid4().hex[:12]
        if detached is not None and find_actor(detached) is not None:
            raise Invalid(
                f"job {detached!r} already exists: attach to it with elastic.ray.attach({detached!r}), or use"
                " another name"
            )
        spec = DriverSpec(
            name=name,
            wanted=with_group(wanted),
            options=options,
            environ=dict(environ),
            telemetry=telemetry(os.environ, environ),
            secret=secrets.token_bytes(SECRET_BYTES),
            detached=detached is not None,
            call=call,
        )
        of_actor: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000}
        if detached is not None:
            of_actor |= {
                "name": actor_name(name),
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "max_restarts": -1,
                "max_task_retries": -1,
            }
        by_client: bool = ray.util.client.ray.is_connected()  # type: ignore[no-untyped-call]
        if detached is not None or by_client:
            of_actor["resources"] = {HEAD: 0.001}
            # Place the actor outside the caller's placement group, whose bundles lack this resource.
            of_actor["scheduling_strategy"] = "DEFAULT"
        else:
            here = ray.get_runtime_context().get_node_id()
            # A hard constraint: on another node, the actor would not end together with this process.
            of_actor["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
        made: Any = ray.remote(DriverActor)
        actor = made.options(**of_actor).remote(spec)
        follower = cls(actor, on_output=on_output, on_report=on_report)
        try:
            ray.get(actor.pid.remote(), timeout=START_S)
        except GetTimeoutError:
            ray.kill(actor)
            raise JobFailed(
                f"Ray did not start the driver's actor within {START_S:g} s: see `ray list actors`, and check"
                " that a node accepts actors that need no CPU"
            ) from None
        except RayError as error:
            raise JobFailed(f"the driver's actor can't be started: {brief(error)}") from error
        return follower

    @property
    def actor(self) -> Any:
        """Handle of the actor.

        Raises JobFailed after ``ray.shutdown()``, because calling the actor would then start another cluster.
        """
        if not ray.is_initialized():
            raise JobFailed(
                "this process disconnected from Ray (ray.shutdown()), which ended the job's driver and workers:"
                " call the executor's shutdown() and start() again"
            )
        return self._actor

    # ---- output and reports ------------------------------------------------------------------------------------------

    def poll(self, wait_s: float = 0.0) -> bool:
        """Forward output and reports.

        This method waits up to ``wait_s`` seconds for the first item, and returns whether there was any.
        """
        # Drop the pending request, because the next line sends it again with another timeout.
        self._fetch = None
        batch = self.ask(self.actor.news.remote(self._source, self._next, wait_s), wait_s + CLOSE_S)
        return self._pass_on(batch)

    def _pass_on(self, batch: UpdateBatch) -> bool:
        self._source, self._next = batch.source, batch.next
        if batch.lost:
            self._on_output("stderr", f"elastic | {batch.lost} bytes were lost\n".encode())
        for kind, value in batch.items:
            if kind in ("stdout", "stderr"):
                self._on_output(kind, value)
            elif kind == "report" and self._on_report is not None:
                self._pass_report(value)
        return bool(batch.items)

    def _pass_report(self, report: Report) -> None:
        """Pass a report to the user's callback.

        The first exception of the callback is logged, and the job continues.
        """
        assert self._on_report is not None
        try:
            self._on_report(report)
        except Exception:
            if not self._complained:
                self._complained = True
                trace = traceback.format_exc()
                text = f"elastic | error: on_report raised; the job continues\n{trace}"
                self._on_output("stderr", text.encode())

    def wait(self, refs: Sequence[Any]) -> list[Any]:
        """Wait for calls of the actor and return their values.

        This method forwards output and reports in the meantime.
        """
        left = list(refs)
        while left:
            _, left = self.some(left)
        return [self.ask(ref) for ref in refs]

    def some(
        self, refs: Sequence[Any], within_s: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Return the completed and the pending calls, as two lists.

        This method waits up to ``within_s`` seconds until at least one call has completed.
        """
        by = None if within_s is None else time.monotonic() + within_s
        while True:
            if self._fetch is None:
                self._fetch = self.actor.news.remote(self._source, self._next, POLL_S)
            left_s = CLOSE_S if by is None else min(CLOSE_S, max(0.0, by - time.monotonic()))
            ray.wait([self._fetch, *refs], num_returns=1, timeout=left_s)
            if ray.wait([self._fetch], timeout=0)[0]:
                fetch, self._fetch = self._fetch, None
                self._pass_on(self.ask(fetch))
            done, left = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            if done or (by is not None and time.monotonic() >= by):
                return done, left

    def ended(self, ref: Any | None = None, *, stops_job: bool = True) -> Ended:
        """Wait for the job to end, and return its outcome.

        Ctrl-C stops the job; a second Ctrl-C stops it immediately. If ``stops_job`` is False, Ctrl-C only ends the
        wait.
        """
        ref = ref if ref is not None else self.actor.outcome.remote()
        stops = 0
        while True:
            try:
                (found,) = self.wait([ref])
                self.drain()
            except KeyboardInterrupt:
                stops += 1
                if stops > 2 or not stops_job:
                    raise
                self.actor.stop.remote("Ctrl-C at the caller")
                continue
            if stops:
                raise KeyboardInterrupt
            ended: Ended = found
            return ended

    def drain(self) -> None:
        while self.poll():
            pass

    def ask(self, ref: Any, within_s: float = CLOSE_S) -> Any:
        """Wait for a call of the actor and return its result.

        Raises the exception that the call raised, or JobFailed if the actor has died.
        """
        try:
            return ray.get(ref, timeout=within_s)
        except GetTimeoutError:
            raise JobFailed(
                f"the driver's actor did not respond within {within_s:g} s: see its state in `ray list actors`"
            ) from None
        except RayActorError as error:
            raise JobFailed(
                f"the driver's actor has exited: {brief(error)}. Start the job again"
            ) from error
        except RayTaskError as error:
            cause: Exception = error.as_instanceof_cause()  # type: ignore[no-untyped-call]
            raise cause from None

    def close(self) -> None:
        """End the job and release its resources."""
        try:
            ray.get(self.actor.close.remote(), timeout=CLOSE_S)
            self.drain()
        except Exception:
            pass  # Ray raises untyped errors for an actor of a previous cluster.
        with contextlib.suppress(Exception):
            ray.kill(self.actor, no_restart=True)


def stop(job: str) -> bool:
    """End a detached job, or clean up after one whose driver is permanently lost. Return whether the job existed."""
    actor = find_actor(job)
    if actor is not None:
        follower = DriverClient(actor, on_output=lambda stream, data: None)
        follower.close()
    removed = remove_claims(job)
    with contextlib.suppress(LeadershipLost):  # Another job with this name has started.
        run_apart(lambda: asyncio.run(RayArchive(job).forget()))
    return bool(removed) or actor is not None


def to_streams(stream: str, data: bytes) -> None:
    """Write data to this process's current ``sys.stdout`` or ``sys.stderr``."""
    text = sys.stdout if stream == "stdout" else sys.stderr
    text.write(data.decode("utf-8", "replace"))
    text.flush()


def brief(error: BaseException) -> str:
    """Return the last nonempty line of an error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def environ_of(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment for the workers: the caller's variables that concern training, overridden by ``given``.

    Raises:
        Invalid: ``given`` is not a mapping of strings, or a name or value is invalid.
    """
    check_environ(given)
    own = {name: value for name, value in os.environ.items() if FORWARDED.fullmatch(name)}
    own.pop("PYTHONPATH", None)  # This variable has a different value on each node.
    # The caller is a task or an actor, for which Ray has set this variable.
    if "RAY_RAYLET_PID" in os.environ:
        own.pop("OMP_NUM_THREADS", None)
    return {**own, **(given or {})}


def results_of(ended: Ended) -> list[Any]:
    """Return the values that the function has returned, by rank.

    Raises:
        Invalid: the job was rejected before it started.
        JobFailed: the job started and failed.
    """
    if ended.invalid:
        raise Invalid(ended.reason)
    if ended.code != 0:
        raise JobFailed(
            f"the job ended with exit code {ended.code} (see the output of its workers): {ended.reason}"
        )
    return values_of(ended.results)
