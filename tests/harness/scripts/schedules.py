"""The learning rate when the number of steps changes: ``schedules.py trainer|own|lightning|joins-lightning|joins``.

Of two workers, rank 0 dies in the second of four epochs (24 samples, 1 in a batch: 12 steps, then 24). Each worker
prints ``rate STEP RATE`` before its steps. ``trainer``: linear, the Trainer's. The others: a schedule of the script's.

``joins``, ``joins-lightning``: a ``LambdaLR`` of a function over the number of steps of the world in which it is made.
Nobody dies. Rank 0 ends training when another worker has trained with it, or once the file ``stop`` is in OUT_DIR.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

SAMPLES, EPOCHS, DIES = 24, 4, 14


def strike(size: int, rank: int, step: int) -> None:
    if size == 2 and rank == 0 and step == DIES:
        os.kill(os.getpid(), signal.SIGKILL)


def say(step: int, optimizer: Any) -> None:
    print(f"rate {step} {optimizer.param_groups[0]['lr']:.8f}", flush=True)


def trainer(*, own: bool = False) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    from elastic.integrations.transformers import ElasticTrainer

    class Say(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, _: Any, optimizer: Any, **__: Any) -> None:
            say(state.global_step, optimizer)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            strike(args.world_size, 0 if state.is_world_process_zero else 1, state.global_step)

    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    rows = [(torch.arange(8) + start) % 32 for start in range(SAMPLES)]
    given: dict[str, Any] = {}
    if own:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=48)
        given = {"optimizers": (optimizer, linear)}
    arguments = TrainingArguments(
        output_dir=str(Path(os.environ.get("OUT_DIR", "out")) / "schedules"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=1,
        learning_rate=0.01,
        max_grad_norm=0.0,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    ElasticTrainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Say()],
        **given,
    ).train()


def over(size: int) -> bool:
    """Called at the beginning of a step, on every rank."""
    return size > 1 or (Path(os.environ.get("OUT_DIR", "out")) / "stop").exists()


def joins() -> None:
    import horovod.torch as hvd

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 6000 // hvd.size()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        together = 0
        while together < 3 and not (over(1) and state.step > 5):
            say(state.step, wrapped)
            wrapped.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            wrapped.step()
            schedule.step()
            together += hvd.size() > 1
            state.step += 1
            state.commit()
            time.sleep(0.05)

    train(hvd.elastic.TorchState(model=model, optimizer=wrapped, schedule=schedule, step=0))
    print("trained to the end", flush=True)


def lightning(*, joining: bool = False) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from elastic.integrations.lightning import ElasticStrategy

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            self.together = 0

        def training_step(self, batch: Any, _: int) -> Any:
            if joining:
                time.sleep(0.05)
                self.together += self.trainer.world_size > 1
                self.trainer.should_stop = self.together > 3 or over(1)
            strike(self.trainer.world_size, self.trainer.global_rank, self.trainer.global_step)
            say(self.trainer.global_step, self.trainer.optimizers[0])
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            steps = int(self.trainer.estimated_stepping_batches)
            if joining:
                factor = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
                return [optimizer], [{"scheduler": factor, "interval": "step"}]
            linear = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
            return [optimizer], [{"scheduler": linear, "interval": "step"}]

    silent: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    loader = DataLoader(TensorDataset(torch.randn(SAMPLES, 4)), batch_size=1)
    epochs = 1000 if joining else EPOCHS
    Trainer(strategy=ElasticStrategy(), accelerator="cpu", max_epochs=epochs, **silent).fit(
        Module(), loader
    )


if __name__ == "__main__":
    {
        "trainer": trainer,
        "own": lambda: trainer(own=True),
        "lightning": lightning,
        "joins": joins,
        "joins-lightning": lambda: lightning(joining=True),
    }[sys.argv[1]]()
