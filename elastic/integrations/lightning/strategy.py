"""``Trainer(strategy="elastic")``: DDP training that continues when workers fail or join."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

from elastic.data import DataLoader, from_torch
from elastic.data.loader import StepShards
from elastic.errors import Invalid
from elastic.exact.shards import Shards
from elastic.integrations import tested_versions
from elastic.integrations.lightning import torch_process_group
from elastic.integrations.lightning.environment import ElasticEnvironment
from elastic.integrations.lightning.loops import ElasticFitLoop
from elastic.integrations.lightning.sharded import ShardedSteps
from elastic.runtime import lifecycle
from elastic.sharding import unsupported_sharding

NAME = "elastic"


class ElasticStrategy(DDPStrategy):
    """Strategy for Trainer: ``strategy=ElasticStrategy()``, or ``"elastic"`` once this module is imported.

    The state is committed after every ``commit_every``-th optimizer step and at the end of each epoch. After a failure,
    training resumes from the last commit, in the middle of an epoch, including all of Lightning's state: loops,
    optimizers, schedulers, callbacks, scaler, logged means, and the position in the data. ``kwargs`` are the arguments
    of `DDPStrategy`, including those of DDP.

    With ``shards=elastic.Shards(8)`` a step is 8 batches of the train dataloader in any world, and weights are bitwise
    identical to those of an undisturbed run. In this case, the module is not wrapped in DDP. See docs/exact.md.

    Raises:
        Invalid: the process was not started by elasticrun.
    """

    strategy_name = NAME

    def __init__(
        self, commit_every: int = 1, *, shards: Shards | None = None, **kwargs: Any
    ) -> None:
        torch_process_group.refuse(kwargs)
        tested_versions.check("lightning")
        if commit_every < 1:
            raise Invalid(
                f"commit_every is {commit_every}: pass a number of optimizer steps, at least 1"
            )
        if shards is not None and not isinstance(shards, Shards):
            raise Invalid(f"shards is {shards!r}: pass an elastic.Shards")
        if shards is not None and shards.verify:
            raise Invalid(
                "Shards(verify=...) is not supported with Lightning, which would log values of the repeated"
                " training_step calls: omit verify"
            )
        self.commit_every = commit_every
        self.shards = shards
        self._sharded = None if shards is None else ShardedSteps(shards)
        self._deals = False
        super().__init__(
            cluster_environment=ElasticEnvironment(), process_group_backend=NAME, **kwargs
        )

    @property
    def root_device(self) -> torch.device:
        return torch_process_group.device_of(self.parallel_devices)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        torch_process_group.join_process_group(self._timeout)

    def set_world_ranks(self) -> None:
        for each in (rank_zero_only, utilities_rank_zero_only, fabric_rank_zero_only):
            each.rank = self.global_rank

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Broadcast an object.

        A new worker outside the world keeps its own object until the state sends the object of rank 0.
        """
        return obj if lifecycle.current().provisional else super().broadcast(obj, src)

    def setup(self, trainer: Trainer) -> None:
        unsupported_sharding.check_trainer("Lightning", (), [trainer.lightning_module])
        # The loop is replaced first, because a schedule that uses estimated_stepping_batches makes the loop set up its
        # data.
        if trainer.state.fn == TrainerFn.FITTING:
            trainer.fit_loop = ElasticFitLoop.in_place_of(trainer.fit_loop, self)
        super().setup(trainer)
        if self._sharded is not None and trainer.state.fn == TrainerFn.FITTING:
            self._sharded.prepare(trainer)

    def configure_ddp(self) -> None:
        """Wrap the module in DDP. With shards, reduce gradients over shards instead."""
        if self._sharded is None:
            super().configure_ddp()

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch to the device. A step of shards stays unchanged, because its batches are moved one by one."""
        if isinstance(batch, StepShards):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run Lightning's own step, or all of this rank's shards.

        A module with manual optimization receives the whole step.
        """
        module = self.lightning_module
        if self._sharded is None or not module.automatic_optimization:
            return super().training_step(*args, **kwargs)
        (step, *rest), take_step = args, super().training_step

        def forward(batch: Any) -> Any:
            moved = self.batch_to_device(self.precision_plugin.convert_input(batch))
            return take_step(moved, *rest, **kwargs)

        def backward(loss: torch.Tensor) -> None:
            self.backward(loss, self.optimizers[0])

        return self._sharded.step(module.trainer, step, forward, backward)

    def follow(self) -> None:
        """Update this worker's rank and the world size to those of the current world. The state updates DDP."""
        self.set_world_ranks()

    @contextlib.contextmanager
    def dealing(self) -> Iterator[None]:
        """Context manager in which train dataloaders assign samples by the job's position.

        Lightning's samplers are not used.
        """
        connector = self.lightning_module.trainer._accelerator_connector
        asked, connector.use_distributed_sampler = connector.use_distributed_sampler, False
        self._deals = True
        try:
            yield
        finally:
            self._deals = False
            connector.use_distributed_sampler = asked

    def process_dataloader(self, dataloader: object) -> object:
        if self._sharded is None:
            torch_process_group.refuse_shards(dataloader)
        elif self._deals:
            return self._sharded.loader_of(dataloader, torch_process_group.order_of(dataloader))
        if not self._deals or isinstance(dataloader, DataLoader):
            return dataloader
        return from_torch(dataloader, **torch_process_group.order_of(dataloader))

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            NAME, cls, description="DDP that continues when workers are lost or join"
        )
