"""Trains with Lightning's ModelParallelStrategy, or applies fully_shard in a trainer of ours. Writes KIND to
``refused.RANK`` if that is refused, and ``trained.RANK`` after the training.

HOW  fixed: as Lightning does it alone.   run: the same within elastic.run.   ours: with ElasticStrategy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

HOW = os.environ["HOW"]


class Net(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_model(self) -> None:
        if HOW == "ours":
            fully_shard(self.net)
        else:
            mesh: Any = self.device_mesh
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        points, wanted = batch
        return nn.functional.mse_loss(self.net(points), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(strategy: Any) -> None:
    data = DataLoader(TensorDataset(torch.randn(40, 8), torch.randn(40, 1)), batch_size=4)
    trainer = Trainer(
        strategy=strategy,
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), data)
    Path(f"trained.{dist.get_rank()}").touch()


def fit_within_run() -> None:
    import elastic

    dist.init_process_group()

    @elastic.run
    def train(state: elastic.ObjectState) -> None:
        fit(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))

    train(elastic.ObjectState(step=0))


def main() -> None:
    if HOW == "fixed":
        return fit(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    from elastic.errors import NotElastic

    try:
        if HOW == "run":
            fit_within_run()
        else:
            from elastic.integrations.lightning import ElasticStrategy

            fit(ElasticStrategy())
    except NotElastic as refused:
        Path(f"refused.{os.environ['RANK']}").write_text(refused.kind.value)
        sys.exit(1)


if __name__ == "__main__":
    main()
