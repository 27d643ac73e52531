"""Horovod's ``RayExecutor`` for static and elastic jobs, implemented with `elastic.ray.Executor`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from elastic.errors import Invalid
from horovod.common.renamed import renamed
from horovod.ray.coordinator import Coordinator
from horovod.ray.jobs import ElasticJob, PlacementTimeout, StaticJob
from horovod.ray.settings import MiniSettings, limits, verbosity
from horovod.ray.strategy import BaseStrategy, ColocatedStrategy, PGStrategy


class RayExecutor:
    """Executor that starts workers on a Ray cluster and calls functions on them.

    A static job has ``num_workers`` workers, or ``num_workers_per_host`` on each of ``num_hosts`` hosts. They are
    started once and keep an object of ``executable_cls``. An elastic job has ``min_workers`` to ``max_workers``
    workers. By default, the maximum is the number that fits into the cluster at the start. Each call is a separate job,
    which continues when workers join or leave.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Collection[str] | None = None,
        verbose: bool | int | None = None,
    ) -> MiniSettings:
        """Create the settings of a RayExecutor.

        Args:
            timeout_s: timeout for all workers to call ``hvd.init()`` after the first one, in seconds.
            placement_group_timeout_s: timeout for the placement of the workers, in seconds.
        """
        settings = MiniSettings(
            nics=nics,
            verbose=verbosity(verbose),
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )
        if ssh_str is not None:
            settings.ssh_identity_file = ssh_identity_file or "ssh_str"
        limits(settings)  # warns about fields without effect
        return settings

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        cpus_per_slot: float | None = None,
        gpus_per_slot: float | None = None,
    ) -> None:
        """Check the arguments. The workers are started by `start`.

        Args:
            use_current_placement_group: whether to place the workers in the caller's placement group if there is one,
                as in a Ray Tune trial.
            cpus_per_slot, gpus_per_slot: old names of ``cpus_per_worker`` and ``gpus_per_worker``.

        Raises:
            ValueError: the arguments describe neither a static nor an elastic job, or both, or a value is out of range.
        """
        cpus_per_worker = renamed(
            "RayExecutor", "cpus_per_worker", cpus_per_worker, "cpus_per_slot", cpus_per_slot, 1
        )
        gpus_per_worker = renamed(
            "RayExecutor", "gpus_per_worker", gpus_per_worker, "gpus_per_slot", gpus_per_slot, None
        )
        _check_kind(num_workers, num_hosts, min_workers, max_workers)
        resources: dict[str, Any] = {
            "settings": settings,
            "use_gpu": use_gpu,
            "cpus_per_worker": cpus_per_worker,
            "gpus_per_worker": gpus_per_worker,
        }
        self.settings = settings
        self._job: StaticJob | ElasticJob
        if min_workers is None:
            strategy: BaseStrategy
            if num_hosts is not None:
                strategy = ColocatedStrategy(
                    num_hosts=num_hosts, num_workers_per_host=num_workers_per_host, **resources
                )
            else:
                assert num_workers is not None, "checked above"
                strategy = PGStrategy(
                    num_workers=num_workers,
                    force_create_placement_group=not use_current_placement_group,
                    **resources,
                )
            self._job = StaticJob(strategy.arguments | limits(settings))
            return
        if not override_discovery:
            raise Invalid(
                "override_discovery=False is not supported, because hosts are discovered through Ray: omit it"
            )
        placing = PGStrategy(
            num_workers=min_workers,
            force_create_placement_group=not use_current_placement_group,
            **resources,
        ).arguments
        del placing["num_workers"]
        self._job = ElasticJob(
            placing
            | limits(settings)
            | {
                "min_workers": min_workers,
                "max_workers": max_workers,
                "reset_limit": reset_limit,
                "cooldown_range": None if cooldown_range is None else tuple(cooldown_range),
                "elastic_timeout": elastic_timeout,
            }
        )

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Reserve resources, and start the workers of a static job, each with an object of ``executable_cls``.

        The workers of an elastic job create their objects at the beginning of each `execute`.

        Raises:
            PlacementTimeout: (a ValueError and a TimeoutError) the cluster has too few free resources.
            Exception: any exception that the constructor of ``executable_cls`` raised.
        """
        self._job.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], None]] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every worker, and return the values by rank.

        ``callbacks`` are called in this thread with the values that workers log with ``ray_logger.log``.

        Raises:
            JobFailed: (a RuntimeError) the job failed.
            Exception: in a static job, the exception that ``fn`` raised on a worker.
        """
        return self._job.run(fn, args, kwargs, callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function like `run`, but return Ray object references to the values, by rank.

        Supported only for static jobs, because the size of an elastic job is not known in advance.
        """
        return self._job.run_remote(fn, args, kwargs)

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], None]] | None = None
    ) -> list[Any]:
        """Call ``fn(object)`` on every worker, and return the values by rank.

        The object is None if there is no ``executable_cls``.
        """
        return self._job.execute(fn, callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(object)`` on the worker of rank 0, and return its value."""
        return self._job.execute_single(fn)

    def shutdown(self) -> None:
        """Stop the workers and release the resources. Idempotent. Has no effect before `start`."""
        self._job.shutdown()


def _check_kind(
    num_workers: int | None, num_hosts: int | None, min_workers: int | None, max_workers: int | None
) -> None:
    """Raise Invalid unless the arguments describe exactly one kind of job."""
    if max_workers is not None and (min_workers is None or min_workers <= 0):
        raise Invalid(
            "`max_workers` provided without any positive `min_workers`: also pass min_workers, the smallest"
            " number of workers to continue with"
        )
    if min_workers is not None and num_workers is not None:
        raise Invalid(
            "Both `min_workers` and `num_workers` provided. Pass min_workers and max_workers for an elastic"
            " job, or num_workers for a job of fixed size"
        )
    if min_workers is not None and num_hosts is not None:
        raise Invalid(
            "Both `min_workers` and `num_hosts` provided. An elastic job uses all available hosts. Omit"
            " num_hosts"
        )
    if num_workers is not None and num_hosts is not None:
        raise Invalid(
            "Both `num_workers` and `num_hosts` provided. Pass num_workers, or num_hosts with"
            " num_workers_per_host"
        )
    if min_workers is None and num_workers is None and num_hosts is None:
        raise Invalid(
            "Either `num_workers`, `num_hosts` or `min_workers` must be provided: pass the number of workers to"
            " start, as in num_workers=4"
        )


__all__ = ["Coordinator", "MiniSettings", "PlacementTimeout", "RayExecutor"]
