"""Train a small GPT on the source of Python's standard library, byte by byte, while workers join and leave.

    elasticrun -np 4 --min-np 2 python examples/gpt.py      # or `make train`, which adds faults and a report
    python examples/gpt.py --steps 50                       # without a launcher: a world of one

All code for elasticity is in `train`: the decorator, the state that contains the loader, and `commit`. Rank 0 of the
current world appends one JSON object per step to OUT/metrics.jsonl. A repeated step has several lines, of which the
last one counts. Rank 0 also reports the same values for the page that `elasticrun --report FILE` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

import elastic
from gpt_model import GPT, Windows, standard_library

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--out", type=Path, default=Path("out"), help="folder for metrics.jsonl")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch-size", type=int, default=4, help="windows per worker and step")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--context", type=int, default=128, help="bytes per window")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--corpus-bytes", type=int, default=4_000_000)
parser.add_argument("--log-every", type=int, default=20, help="steps between two lines")
args = parser.parse_args()

elastic.init()
torch.manual_seed(0)
model = GPT(args.layers, args.width, args.heads, args.context)
optimizer = elastic.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1),
    named_parameters=model.named_parameters(),
)
training, validation = (Windows(text, args.context) for text in standard_library(args.corpus_bytes))
loader = elastic.data.DataLoader(training, batch_size=args.batch_size, shuffle=True)


def learning_rate(step: int) -> float:
    """Return the rate of a step: it rises for a twentieth of the run, then falls along a cosine to a twentieth."""
    rising = min(1.0, (step + 1) / (0.05 * args.steps))
    falling = 0.525 + 0.475 * math.cos(math.pi * step / args.steps)
    return float(args.lr * rising * falling)


def record(**values: Any) -> None:
    """Report values for the page of the run, and write them to a file; ``at`` is on the journal's clock."""
    elastic.report({**values, "steps": args.steps})
    with (args.out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.monotonic(), **values}) + "\n")


def line_of(step: int, loss: float, seconds: float) -> dict[str, float]:
    """Return the metrics of a step that took ``seconds``."""
    workers = elastic.size()
    tokens_per_s = workers * args.batch_size * args.context / seconds
    return {"step": step, "loss": loss, "workers": workers, "tokens_per_s": tokens_per_s}


def show(step: int, loss: float, workers: int, tokens_per_s: float, seconds: float) -> None:
    """Print some of the steps."""
    if step % args.log_every == 0 or step == 1:
        left = round((args.steps - step) * seconds)
        print(
            f"step {step:4}/{args.steps}  loss {loss:.3f}  {workers} workers"
            f"  {tokens_per_s:6,.0f} tokens/s  {left // 60}:{left % 60:02} left"
        )


@torch.no_grad()
def validation_loss(windows: int = 256) -> float:
    """Return the loss in nats per byte over the first validation windows, which are divided between the workers."""
    mine = range(elastic.rank(), min(windows, len(validation)), elastic.size())
    total = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(mine), args.batch_size):
        batch = torch.stack([validation[i] for i in mine[start : start + args.batch_size]])
        total += torch.tensor([model.loss(batch).item() * len(batch), len(batch)])
    loss, count = elastic.allreduce(total, name="validation", op=elastic.Sum).tolist()
    return float(loss / count)


@elastic.run
def train(state: elastic.TorchState) -> None:
    if elastic.rank() == 0 and state.line:
        record(**state.line)  # a rank 0 that died may not have recorded it
    while state.step < args.steps:
        for batch in loader:
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(state.step)
            optimizer.zero_grad()
            loss = model.loss(batch)
            loss.backward()
            optimizer.step()
            mean = elastic.allreduce(loss.detach(), name="loss").item()
            state.step += 1
            seconds = time.perf_counter() - began
            state.line = line_of(state.step, mean, seconds)
            if elastic.rank() == 0:
                record(**state.line)
                show(**state.line, seconds=seconds)
            state.commit()
            if state.step == args.steps:
                break
    loss_held_back = validation_loss()
    if elastic.rank() == 0:
        text = model.write("def ", 400)
        record(validation_loss=loss_held_back, sample=text)
        print(f"validation loss {loss_held_back:.3f} nats per byte; it writes:\n\n{text}")


args.out.mkdir(parents=True, exist_ok=True)
if elastic.rank() == 0:
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {len(training.bytes):,} bytes of Python")
train(elastic.TorchState(model, optimizer, loader=loader, step=0, line={}))
