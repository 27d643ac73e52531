"""Horovod's first elastic executor on Ray, ``ElasticRayExecutor``.

Horovod has deprecated it in favour of RayExecutor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from elastic.errors import Invalid
from horovod.common.renamed import renamed
from horovod.ray import elastic_v2
from horovod.ray.runner import RayExecutor
from horovod.ray.settings import ElasticSettings, limits, verbosity


class ElasticRayExecutor:
    """Deprecated executor. Use ``RayExecutor(settings, min_workers=...)``."""

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Collection[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """Create the settings of an ElasticRayExecutor.

        Also accepts ``cooldown_range``, the fields of MiniSettings, and the old names ``min_np`` and ``max_np``.
        """
        what = "create_settings"
        least = renamed(what, "min_num_proc", min_num_proc, "min_np", min_np, 1)
        most = renamed(what, "max_num_proc", max_num_proc, "max_np", max_np)
        if "verbose" in kwargs:
            kwargs["verbose"] = verbosity(kwargs["verbose"])
        try:
            settings = ElasticSettings(
                nics=nics,
                timeout_s=timeout_s,
                ssh_identity_file=ssh_identity_file,
                min_num_proc=least,
                max_num_proc=most,
                reset_limit=reset_limit,
                elastic_timeout=elastic_timeout,
                **kwargs,
            )
        except TypeError:
            known = ElasticSettings.__dataclass_fields__
            strange = ", ".join(name for name in kwargs if name not in known)
            raise Invalid(f"create_settings() has no parameter {strange}: omit it") from None
        limits(settings)  # warns about fields without effect
        return settings

    def __init__(
        self,
        settings: Any,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        """Check the arguments.

        Raises:
            ValueError: ``gpus_per_slot`` is set without ``use_gpu``, or the settings are invalid.
        """
        warnings.warn(
            "ElasticRayExecutor is deprecated; use RayExecutor(settings, min_workers=...)",
            DeprecationWarning,
            stacklevel=2,
        )
        if gpus_per_slot and not use_gpu:
            raise Invalid(
                "gpus_per_slot is set, but use_gpu is False: pass use_gpu=True, or omit gpus_per_slot"
            )
        self.settings = settings
        self._env_vars = env_vars
        self._executor = RayExecutor(
            settings,
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=getattr(settings, "cooldown_range", None),
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
        )

    def start(self) -> None:
        """Reserve resources for the workers.

        Raises:
            PlacementTimeout: the cluster did not have enough free resources within the timeout.
        """
        self._executor.start(extra_env_vars=self._env_vars)

    def run(
        self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[[Any], None]] | None = None
    ) -> list[Any]:
        """Call a function on all workers. See `RayExecutor.run`."""
        return self._executor.run(worker_fn, callbacks=callbacks)

    def shutdown(self) -> None:
        """Release the resources.

        Horovod has no such method; it releases them when the executor is garbage-collected.
        """
        self._executor.shutdown()


class RayHostDiscovery(elastic_v2.RayHostDiscovery):
    """Variant of `elastic_v2.RayHostDiscovery` with the older argument names."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float | None = 1
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)


class TestDiscovery(elastic_v2.TestDiscovery):
    """Variant of `elastic_v2.TestDiscovery` with the older argument names."""

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = 1,
        verbose: bool = True,
        _graceful: bool = True,
    ) -> None:
        slot = (use_gpu, cpus_per_slot, gpus_per_slot)
        super().__init__(min_hosts, max_hosts, change_frequency_s, *slot, verbose, _graceful)


__all__ = ["ElasticRayExecutor", "RayHostDiscovery", "TestDiscovery"]
