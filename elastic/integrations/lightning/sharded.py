"""Lightning training steps that are divided into shards, with one optimizer step after all shards.

Lightning passes ``training_step`` a batch, takes the loss, and lets the optimizer step. Here a "batch" is a step of the
loader, divided into shards. ``training_step`` is called for each shard of this rank, directly followed by its backward
pass. When the loop over the shards ends, gradients are the mean over all shards, so the module is not wrapped in DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization

from elastic.data import DataLoader, from_torch
from elastic.errors import Invalid
from elastic.exact.shards import Shards
from elastic.optimizer.shard_sums.reducer import ShardReducer

# A private class is used, because no public class allows changing the order of backward and zero_grad.
Automatic: Any = _AutomaticOptimization
Backward = Callable[[torch.Tensor], object]


class ShardedOptimization(Automatic):
    """Optimization loop without zero_grad and backward. Gradients are complete when ``training_step`` returns."""

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        return None

    def _make_backward_fn(self, optimizer: torch.optim.Optimizer) -> None:
        return None


class ShardedSteps:
    """Methods of `ElasticStrategy` that are used if ``shards`` is given."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        # The list keeps the reducers alive, because the shards reference them weakly.
        self._reducers: list[ShardReducer] = []

    def prepare(self, trainer: Trainer) -> None:
        """Reduce the gradients of the trainer's optimizers over shards.

        Raises Invalid if a setting conflicts with shards.
        """
        if trainer.accumulate_grad_batches != 1:
            raise Invalid(
                "accumulate_grad_batches can't be combined with shards, which are accumulated in each step:"
                " omit accumulate_grad_batches, and use more shards for a larger batch"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self.shards.watch(scaler)
        module = trainer.lightning_module
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._reducers = [
            ShardReducer.of(optimizer, names, self.shards) for optimizer in trainer.optimizers
        ]
        loop = trainer.fit_loop.epoch_loop
        made = ShardedOptimization.__new__(ShardedOptimization)
        made.__dict__.update(loop.automatic_optimization.__dict__)
        loop.automatic_optimization = made

    def loader_of(self, dataloader: Any, order: Mapping[str, Any]) -> DataLoader:
        """Return a loader with the batch size of ``dataloader`` per shard.

        Raises:
            Invalid: the dataloader has other Shards, or no batch size.
        """
        if isinstance(dataloader, DataLoader):
            if dataloader.shards is not self.shards:
                raise Invalid(
                    "the train dataloader does not use the Shards object of ElasticStrategy(shards=...): pass"
                    " the same object to elastic.data.DataLoader, or use torch's DataLoader"
                )
            return dataloader
        size = getattr(dataloader, "batch_size", None)
        if size is None:
            raise Invalid(
                "the train dataloader has no batch_size, so the size of a shard is unknown: pass"
                " elastic.data.DataLoader(dataset, global_batch_size=64, shards=shards)"
            )
        whole = size * self.shards.count
        return from_torch(dataloader, global_batch_size=whole, shards=self.shards, **order)

    def step(
        self,
        trainer: Trainer,
        batches: Iterable[Any],
        forward: Callable[[Any], Any],
        backward: Backward,
    ) -> torch.Tensor:
        """Run the forward and backward passes of all of this rank's shards.

        Returns:
            Mean of the losses of all shards of all ranks, a float32 scalar on the CPU.

        Raises:
            Invalid: ``training_step`` returned no tensor.
            PeerLost: a rank was lost.
        """
        loader, losses = trainer.fit_loop.loader, []
        for batch in self.shards.over(batches):
            results = trainer.fit_loop.epoch_loop.logged
            # The batch size is the weight of a logged mean.
            results.batch, results.batch_size = batch, None
            output = forward(batch)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if not isinstance(loss, torch.Tensor):
                raise Invalid(
                    f"training_step returned {type(loss).__name__} for shard {loader.shard}, but every shard"
                    " needs a loss: return a loss, which may be zero"
                )
            losses.append(loss.detach() * loader.weight)
            backward(loss * loader.weight)
        return torch.tensor(self.shards.mean(losses), dtype=torch.float32, device="cpu")
