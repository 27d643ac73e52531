"""A second training after the first, the trainer's other calls between: ``fits_again.py lightning|transformers``.

Of two workers, rank 0 dies in the first. Prints ``fit N: STEPS steps SUM`` of each.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

SAMPLES = 96
EXAMPLES = Path(__file__).parents[3] / "examples"


def say(number: int, steps: int, model: torch.nn.Module) -> None:
    total = sum(each.detach().double().sum().item() for each in model.parameters())
    print(f"fit {number}: {steps} steps {total:.9f}", flush=True)


def lightning() -> None:
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from elastic.integrations.lightning import ElasticStrategy

    sys.path.append(str(EXAMPLES))
    from lightning_elastic import Sums

    class Tested(Sums):
        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            if self.trainer.world_size == 2 and self.trainer.is_global_zero and index == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(batch, index)

        def test_step(self, batch: list[torch.Tensor], index: int) -> None:
            self.log("tested", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: list[torch.Tensor], index: int) -> Any:
            return self.net(batch[0])

    def trainer(epochs: int) -> Trainer:
        silent: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        return Trainer(
            strategy=ElasticStrategy(), accelerator="cpu", max_epochs=epochs, num_sanity_val_steps=0, **silent
        )  # fmt: skip

    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches, whole = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=32)
    module, first = Tested(0), trainer(4)
    first.fit(module, batches, whole)
    say(1, first.global_step, module)
    assert first.test(module, whole, verbose=False) == first.test(module, whole, verbose=False)
    assert first.validate(module, whole, verbose=False)
    assert first.predict(module, whole)
    before = first.global_step
    first.fit_loop.max_epochs = 5
    first.fit(module, batches, whole)
    say(2, first.global_step - before, module)
    another, second = Tested(0), trainer(1)
    second.fit(another, batches, whole)
    say(3, second.global_step, another)


def transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    from elastic.integrations.transformers import ElasticTrainer

    class Die(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if args.world_size == 2 and state.is_world_process_zero and state.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    def model() -> Any:
        sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def trainer(epochs: int) -> Any:
        arguments = TrainingArguments(
            output_dir="out/again",
            num_train_epochs=epochs,
            per_device_train_batch_size=4,
            use_cpu=True,
            save_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
        )
        return ElasticTrainer(
            model=model(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[Die()]
        )  # fmt: skip

    rows = [(torch.arange(8) + start) % 32 for start in range(SAMPLES)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    first = trainer(4)
    first.train()
    say(1, first.state.global_step, first.model)
    assert first.evaluate()["eval_loss"] > 0
    assert first.predict(data).predictions.shape[0] == SAMPLES
    before = first.state.global_step
    first.args.num_train_epochs = 5
    first.train(resume_from_checkpoint=True)
    say(2, first.state.global_step - before, first.model)
    second = trainer(1)
    second.train()
    say(3, second.state.global_step, second.model)


if __name__ == "__main__":
    {"lightning": lightning, "transformers": transformers}[sys.argv[1]]()
