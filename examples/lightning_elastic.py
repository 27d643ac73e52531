"""Train with Lightning's Trainer, whose workers may leave and join. The two lines for hvd-elastic are marked by (*).

    elasticrun -np 3 --min-np 1 python examples/lightning_elastic.py

Kill any of its processes, even rank 0: training continues in the middle of the epoch. See docs/lightning.md.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

import elastic
from elastic.integrations.lightning import ElasticStrategy  # (*)


class Sums(LightningModule):
    """Learn to add eight numbers."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        time.sleep(self.pause_s)  # leaves time to kill a process
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.global_step % 10 == 0:
            self.print(f"step {self.global_step} of {self.trainer.world_size} workers")

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("error", self.loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.print(
            f"epoch {self.current_epoch} loss {metrics['loss']:.5f} error {metrics['error']:.5f}"
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.1, 1 - step / steps)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=960)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds in each step")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument(
        "--shards", type=int, help="batches of a step, in every world: docs/exact.md"
    )
    parser.add_argument(
        "--device", default="cpu", help="as Lightning's accelerator: cpu, gpu, auto"
    )
    options = parser.parse_args()
    shards = elastic.Shards(options.shards, seed=1) if options.shards else None
    seed_everything(1)
    inputs = torch.randn(options.samples, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = Trainer(
        strategy=ElasticStrategy(shards=shards),  # (*)
        accelerator=options.device,
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        precision=options.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Sums(options.pause)
    trainer.fit(
        module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=64)
    )
    total = sum(each.detach().double().sum().item() for each in module.parameters())
    print(f"ended after {trainer.global_step} steps with {total:.9f}")


if __name__ == "__main__":
    main()
