"""Train with Hugging Face's Trainer, whose workers may leave and join. The line for hvd-elastic is marked by (*).

    elasticrun -np 3 --min-np 1 python examples/transformers_elastic.py

A small GPT-2 with random weights learns to count. Kill any of its processes: training continues. See
docs/transformers.md.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from elastic.integrations.transformers import ElasticTrainer  # (*) in place of transformers.Trainer


class Steps(TrainerCallback):
    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        time.sleep(self.pause_s)  # leaves time to kill a process
        if state.global_step % 10 == 0 and state.is_world_process_zero:
            print(f"step {state.global_step} of {args.world_size} workers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=960)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds in each step")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cuda: each worker's own GPU (%(default)s)")
    options = parser.parse_args()
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=8,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    rows = [(torch.arange(8) + start) % 32 for start in range(options.samples)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = ElasticTrainer(
        model=model,
        args=TrainingArguments(
            output_dir="out/transformers",
            num_train_epochs=options.epochs,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=options.accumulate,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            use_cpu=options.device == "cpu",
            logging_steps=20,
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data[:32],
        callbacks=[Steps(options.pause)],
    )
    trainer.train()
    total = sum(each.detach().double().sum().item() for each in model.parameters())
    print(f"ended after {trainer.state.global_step} steps with {total:.9f}")


if __name__ == "__main__":
    main()
