"""`run` and `Executor`: elastic training on a Ray cluster, from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic.driver.commandline.options.argument_parser import RAY
from elastic.driver.commandline.options.keyword_arguments import accepts
from elastic.errors import Invalid, JobFailed
from elastic.launcher.run_function import pickled
from elastic.protocol.report_values import Report
from elastic.ray import arguments, call_results
from elastic.ray.arguments import CURRENT, PLACEMENT_S

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from elastic.launcher.option_types import RayOptions

NEEDS_RAY = "elastic.ray needs Ray, which is not installed: run pip install 'hvd-elastic[ray]'"


@dataclass(frozen=True)
class Result:
    """Outcome of a successful job on Ray.

    Args:
        values: return values of the function, in order of the ranks of the last world.
        reports: last report of each rank of the last world, in rank order. Ranks without a report are omitted.
    """

    values: list[Any]
    reports: dict[int, Report] = field(default_factory=dict)


@accepts(RAY)
def run(
    train_fn: Callable[..., Any],
    config: Any = None,
    *,
    num_workers: int | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    use_gpu: bool = False,
    placement_group: Any = CURRENT,
    label_selector: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    on_report: Callable[[Report], None] | None = None,
    on_output: Callable[[str, bytes], None] | None = None,
    detached: str | None = None,
    placement_timeout: float = PLACEMENT_S,
    **options: Unpack[RayOptions],
) -> Result:
    """Call ``train_fn`` on workers of a Ray cluster, and wait for the result.

    The call is ``train_fn(config)``, or ``train_fn()`` without a config. Checkpoints work as with ``elasticrun``
    (docs/checkpoints.md), in a folder shared by all nodes or at a URL. A repeated call resumes from the newest
    checkpoint, unless ``fresh`` is True.

    Args:
        train_fn: training function, pickled with cloudpickle.
        config: argument of ``train_fn``.
        num_workers: number of workers with which the job begins.
        min_workers: number of workers with which an elastic job continues after nodes are lost.
        max_workers: number of workers to which an elastic job grows when nodes join.
        resources_per_worker: resources of a worker in Ray's units (default: one CPU, and one GPU with ``use_gpu``).
        use_gpu: whether each worker needs a GPU.
        placement_group: placement group for the workers (default: the caller's group without its first bundle, as in a
            trial of Ray Tune; otherwise the job creates groups).
        label_selector: labels of the nodes for the workers, in the syntax of Ray's label selectors (default: any node).
            Requires a release of Ray whose placement groups support label selectors.
        env: variables that are added to the workers' environment. Variables of ``elasticrun`` and OpenTelemetry also
            apply to the driver.
        on_report: called in this thread with each `elastic.report` of a worker.
        on_output: called in this thread with the output of the workers and the log: the stream ("stdout" or "stderr"),
            and bytes of whole lines, up to 64 KiB.
        detached: name of a job that continues after its caller exits. Ray restarts the driver of the job after a
            failure, and `attach` follows the job.
        placement_timeout: seconds to wait for the resources of ``num_workers`` workers.
        **options: options of ``elasticrun`` (docs/reference/variables.md), with times in seconds.

    Returns:
        The return values and the last reports of the workers, by rank.

    Raises:
        Invalid: (a ValueError) an argument is invalid, or the cluster has no resources for the workers within
            ``placement_timeout`` seconds. Raised before any process is started.
        JobFailed: the job failed.
    """
    with Executor(
        num_workers,
        min_workers=min_workers,
        max_workers=max_workers,
        resources_per_worker=resources_per_worker,
        use_gpu=use_gpu,
        placement_group=placement_group,
        label_selector=label_selector,
        env=env,
        on_report=on_report,
        on_output=on_output,
        placement_timeout=placement_timeout,
        **options,
    ) as executor:
        if not callable(train_fn):
            raise Invalid(f"run() got a {type(train_fn).__name__}: pass a function")
        given = arguments.call_arguments(config)
        arguments.check_call(train_fn, given, {})
        if detached is not None:
            arguments.check_job_name(detached)
        call = pickled(train_fn, given, {})
        if detached is None:
            return executor.run_once(call)
        return executor.run_detached(call, detached)


def attach(
    job: str,
    *,
    on_report: Callable[[Report], None] | None = None,
    on_output: Callable[[str, bytes], None] | None = None,
) -> Result:
    """Follow a job that was started with ``detached=job``, and wait for its result. Ctrl-C only ends the wait.

    The result can be read only once. Afterwards, another job can use the name.

    Args:
        job: name of the job.
        on_report, on_output: see `run`.

    Returns:
        The return values and the last reports of the workers, by rank.

    Raises:
        Invalid: no detached job has this name.
        JobFailed: the job failed.
    """
    driver_client = _following()
    driver_client.connect()
    actor = driver_client.find_actor(job)
    if actor is None:
        raise Invalid(
            f"the Ray cluster has no detached job {job!r}: pass a job that `ray list actors` shows"
        )
    follower = driver_client.DriverClient(actor, on_report=on_report, on_output=on_output)
    ended = follower.ended(stops_job=False)
    follower.close()
    return _result(ended)


def stop(job: str) -> bool:
    """End a detached job in any state, and release its resources. Return whether the job existed."""
    driver_client = _following()
    driver_client.connect()
    return bool(driver_client.stop(job))


class Executor:
    """Pool of workers on a Ray cluster that runs functions.

    Without ``min_workers`` and ``max_workers``, `start` starts persistent workers, which run until `shutdown`. Each
    worker holds an instance of ``executable_cls``, and `run` and `execute` call functions on the workers. With either
    argument, the executor is elastic: it keeps its resources, and each `run` starts new workers.

    Args:
        num_hosts: exact number of nodes, each with the same number of workers.
        num_workers, min_workers, max_workers, resources_per_worker, use_gpu, placement_group, label_selector, env,
            on_report, on_output, placement_timeout, options: see `run`.
    """

    @accepts(RAY)
    def __init__(
        self,
        num_workers: int | None = None,
        *,
        min_workers: int | None = None,
        max_workers: int | None = None,
        num_hosts: int | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        use_gpu: bool = False,
        placement_group: Any = CURRENT,
        label_selector: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        on_report: Callable[[Report], None] | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
        placement_timeout: float = PLACEMENT_S,
        **options: Unpack[RayOptions],
    ) -> None:
        """Validate the arguments. This method starts nothing.

        Args:
            num_hosts: exact number of nodes, each with the same number of workers.

        Raises:
            Invalid: an argument is out of range or contradicts another argument.
        """
        self._wanted = arguments.wanted(
            num_workers,
            min_workers,
            max_workers,
            resources_per_worker,
            use_gpu,
            placement_group,
            num_hosts,
            placement_timeout,
            label_selector,
        )
        arguments.check_options(options, elastic=self._wanted.elastic)
        self._options = options
        arguments.check_callables(on_report=on_report, on_output=on_output)
        arguments.check_environ(env)
        self._env = dict(env or {})
        self._on_report = on_report
        self._on_output = on_output
        self._follower: Any = None
        # worker request with a placement group that spans several hosts, or None
        self._spread: arguments.WorkerRequest | None = None
        self._calling: Any = None  # client for calls; not None iff the workers are persistent

    # ---- start and shutdown ------------------------------------------------------------------------------------------

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Reserve the resources, and start the workers unless the executor is elastic.

        Args:
            executable_cls: class that each worker instantiates for `execute`. None creates no instance.
            executable_args, executable_kwargs: arguments of ``executable_cls``.
            extra_env_vars: variables to add to the workers' environment.

        Raises:
            Invalid: the executor was already started, ``executable_cls`` was passed to an elastic executor, or the
                cluster cannot provide the resources.
            JobFailed: a worker failed while it started.
        """
        if self._follower is not None:
            raise Invalid("this executor was already started: call shutdown() first")
        if executable_cls is not None and self._wanted.elastic:
            raise Invalid(
                "executable_cls can't be used with an elastic executor, because each run starts new workers:"
                " create the object inside the function"
            )
        self._env |= dict(extra_env_vars or {})
        driver_client, environ = self._prepared()
        if self._wanted.hosts is not None:
            from elastic.ray.spread_placement import spread

            self._spread = spread(self._wanted)
        try:
            self._follower = self._made(driver_client, environ)
            (refused,) = self._follower.wait([self._follower.actor.place.remote()])
            if refused:
                raise Invalid(refused)
            if not self._wanted.elastic:
                self._begin_serving(executable_cls, executable_args, executable_kwargs)
        except BaseException:
            self.shutdown()
            raise

    def _prepared(self) -> tuple[Any, dict[str, str]]:
        """Connect to Ray, and prepare the workers' environment.

        Returns:
            The module `elastic.ray.driver_client`, and the workers' environment.

        Raises:
            Invalid: Ray is not installed, or a name or value of the environment is invalid.
        """
        driver_client = _following()
        environ = driver_client.environ_of(self._env)
        driver_client.connect()
        driver_client.check_labels(self._wanted.labels)
        return driver_client, environ

    def _made(self, driver_client: Any, environ: Mapping[str, str], **more: Any) -> Any:
        return driver_client.DriverClient.made(
            self._spread or self._wanted,
            self._options,
            environ,
            on_output=self._on_output,
            on_report=self._on_report,
            **more,
        )

    def _begin_serving(
        self,
        executable_cls: type | None,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
    ) -> None:
        follower, wanted = self._follower, self._wanted
        follower.ask(follower.actor.begin.remote(b"", persistent=True))
        start_s = arguments.start_timeout_s(self._options)
        ready = follower.actor.ready.remote(wanted.np, start_s)
        (trouble,) = follower.wait([ready])
        if trouble:
            raise JobFailed(trouble)
        from elastic.ray.call_client import CallClient

        self._calling = CallClient(follower, wanted.np)
        if executable_cls is not None:
            self._call(call_results.MAKE, executable_cls, tuple(args or ()), dict(kwargs or {}))

    def shutdown(self) -> None:
        """End the workers and release the resources. Idempotent."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()
        if self._spread is not None:
            from elastic.ray.spread_placement import give_back

            spread, self._spread = self._spread, None
            give_back(spread)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # ---- calls -------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every worker and return the results by rank.

        Raises:
            JobFailed: the job failed.
            Exception: raised by ``fn`` on a worker, and raised again here.
        """
        self._need_start("run", fn)
        if not self._wanted.elastic:
            return self._call(call_results.RUN, fn, args, kwargs)
        return self.run_once(pickled(fn, args, kwargs)).values

    def run_remote(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Start ``fn(*args, **kwargs)`` on every worker, and return Ray references to the results immediately.

        Raises:
            Invalid: the executor was not started.
            NotImplementedError: the executor is elastic.
        """
        self._need_start("run_remote", fn)
        self._need_static("run_remote")
        return list(self._calling.references(call_results.call(call_results.RUN, fn, args, kwargs)))

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call ``fn(instance)`` on every worker, with the worker's instance of ``executable_cls``.

        Returns:
            The results, by rank.

        Raises:
            Invalid: the executor was not started.
            NotImplementedError: the executor is elastic.
            JobFailed: the job failed.
            Exception: raised by ``fn`` on a worker, and raised again here.
        """
        self._need_start("execute", fn)
        self._need_static("execute")
        return self._call(call_results.EXECUTE, fn)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(instance)`` only on the worker with rank 0, and return the result.

        Errors are those of `execute`.
        """
        self._need_start("execute_single", fn)
        self._need_static("execute_single")
        return self._call(call_results.EXECUTE, fn, ranks=(0,))[0]

    def _call(self, kind: str, *parts: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        values: list[Any] = self._calling.values(call_results.call(kind, *parts), ranks)
        return values

    def run_once(self, call: bytes) -> Result:
        """Run a pickled call as a separate job. If necessary, start the executor first."""
        if self._follower is None:
            self._follower = self._made(*self._prepared())
        follower = self._follower
        follower.ask(follower.actor.begin.remote(call))
        return _result(follower.ended())

    def run_detached(self, call: bytes, name: str) -> Result:
        follower = self._made(*self._prepared(), detached=name, call=call)
        try:
            ended = follower.ended()
        except KeyboardInterrupt:  # The driver may interrupt this process with a signal.
            follower.close()
            raise
        follower.close()
        return _result(ended)

    def _need_start(self, what: str, fn: object) -> None:
        if not callable(fn):
            raise Invalid(f"{what}() got a {type(fn).__name__}: pass a function")
        if self._follower is None:
            raise Invalid(f"this executor has no workers: call start() before {what}()")

    def _need_static(self, what: str) -> None:
        if self._wanted.elastic:
            raise NotImplementedError(
                f"{what}() needs persistent workers, but an elastic executor starts new workers for each run:"
                " call run() instead"
            )


def _result(ended: Any) -> Result:
    from elastic.ray.driver_client import results_of

    return Result(results_of(ended), dict(sorted(ended.reports.items())))


def _following() -> Any:
    """Import and return the module that depends on Ray."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise Invalid(NEEDS_RAY) from None
    from elastic.ray import driver_client

    return driver_client
