"""Placement strategies for the workers of a static job, as arguments of `elastic.ray.Executor`. Does not import Ray."""

from __future__ import annotations

from typing import Any

from elastic.ray.arguments import CURRENT


class BaseStrategy:
    """Base class of placement strategies. ``arguments`` contains arguments of `elastic.ray.Executor`."""

    def __init__(
        self,
        *,
        settings: Any = None,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = None,
    ) -> None:
        """Check the arguments.

        Raises:
            ValueError: ``gpus_per_worker`` is not positive, or is set without ``use_gpu``.
        """
        if gpus_per_worker and not use_gpu:
            raise ValueError(
                "gpus_per_worker is set, but use_gpu is False: pass use_gpu=True, or omit gpus_per_worker"
            )
        if use_gpu and gpus_per_worker is not None and gpus_per_worker <= 0:
            raise ValueError(
                f"gpus_per_worker must be >= 1: Got {gpus_per_worker}. Pass a positive number, which may be a fraction"
                " such as 0.5, or omit gpus_per_worker for one GPU per worker"
            )
        self.settings = settings
        self.use_gpu = use_gpu
        self.cpus_per_worker = cpus_per_worker
        self.gpus_per_worker = gpus_per_worker or 1

    @property
    def num_workers(self) -> int:
        raise NotImplementedError

    @property
    def resources_per_worker(self) -> dict[str, float]:
        found = {"CPU": self.cpus_per_worker}
        return found | ({"GPU": self.gpus_per_worker} if self.use_gpu else {})

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "resources_per_worker": self.resources_per_worker,
            "use_gpu": self.use_gpu,
        }


class PGStrategy(BaseStrategy):
    """Placement on any free resources, optionally within the given placement group or that of the caller."""

    def __init__(
        self,
        *,
        num_workers: int,
        placement_group: Any = None,
        force_create_placement_group: bool = False,
        **resources: Any,
    ) -> None:
        super().__init__(**resources)
        self._num_workers = num_workers
        self.placement_group = placement_group
        self.force_create_placement_group = force_create_placement_group

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def arguments(self) -> dict[str, Any]:
        group = self.placement_group
        if group is None and not self.force_create_placement_group:
            group = CURRENT
        return super().arguments | {"placement_group": group}


class ColocatedStrategy(BaseStrategy):
    """Placement on an exact number of hosts, with the same number of workers on each."""

    def __init__(self, *, num_hosts: int, num_workers_per_host: int, **resources: Any) -> None:
        """Check the arguments.

        Raises:
            ValueError: a number is less than 1, or the number of GPUs contradicts ``use_gpu``.
        """
        super().__init__(**resources)
        for name, value in (
            ("num_hosts", num_hosts),
            ("num_workers_per_host", num_workers_per_host),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}: pass a whole number of at least 1")
        self.num_hosts = num_hosts
        self.num_workers_per_host = num_workers_per_host

    @property
    def num_workers(self) -> int:
        return self.num_hosts * self.num_workers_per_host

    @property
    def arguments(self) -> dict[str, Any]:
        return super().arguments | {"num_hosts": self.num_hosts, "placement_group": None}
