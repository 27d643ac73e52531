"""``Fabric(strategy="elastic")``: a custom loop under ``elastic.run``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import TBroadcast
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch.nn.parallel import DistributedDataParallel

from elastic.integrations import tested_versions
from elastic.integrations.lightning import torch_process_group
from elastic.integrations.lightning.environment import ElasticEnvironment
from elastic.runtime import lifecycle
from elastic.sharding import unsupported_sharding


class ElasticFabricStrategy(DDPStrategy):
    """Strategy for Fabric: ``strategy=ElasticFabricStrategy()``, or ``"elastic"`` once this module is imported.

    Fabric has no training loop, so the script determines what is committed and when, with a `TorchState`,
    ``elastic.run`` and ``commit()``. ``kwargs`` are the arguments of `DDPStrategy`, including those of DDP.

    Raises:
        Invalid: the process was not started by elasticrun.
    """

    strategy_name = "elastic"

    def __init__(self, **kwargs: Any) -> None:
        torch_process_group.refuse(kwargs)
        tested_versions.check("lightning")
        super().__init__(
            cluster_environment=ElasticEnvironment(),
            process_group_backend=torch_process_group.BACKEND,
            **kwargs,
        )

    @property
    def root_device(self) -> torch.device:
        return torch_process_group.device_of(self.parallel_devices)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        unsupported_sharding.check_trainer("Lightning", (), [module])
        return super().setup_module(module)

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        torch_process_group.join_process_group(self._timeout)

    def _set_world_ranks(self) -> None:
        for each in (rank_zero_only, utilities_rank_zero_only):
            each.rank = self.global_rank

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Broadcast an object. A new worker that has not joined the world yet keeps its own object."""
        return obj if lifecycle.current().provisional else super().broadcast(obj, src)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            cls.strategy_name, cls, description="DDP that continues when workers are lost or join"
        )
