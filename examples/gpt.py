"""A small GPT learns Python from the standard library's own source, byte by byte, while workers come and go.

    elasticrun -np 4 --min-np 2 python examples/gpt.py      # or `make train`, which adds the trouble and a report
    python examples/gpt.py --steps 50                       # plainly: a world of one

Everything elastic is in `train`: the decorator, the state, `record_batch` and `commit`. Rank 0, whoever that is at
the time, appends one JSON object per step to OUT/metrics.jsonl; where a step was repeated, the later line counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import elastic

VOCABULARY = 256  # bytes


class Attention(nn.Module):
    """Causal, with rotary positions and normalized queries and keys. (B, T, C) -> (B, T, C)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = (F.rms_norm(self.rotate(part), (part.shape[-1],)) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


class Block(nn.Module):
    """Attention, then a squared-ReLU network of four times the width; each reads a normalized stream and adds to it."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads, context)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(F.rms_norm(x, (x.shape[-1],)))
        added: Tensor = self.down(F.relu(self.up(F.rms_norm(x, (x.shape[-1],)))).square())
        return x + added


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            # What writes to the stream starts at zero: at first each block is the identity.
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) int64 bytes -> (B, T, 256) logits of each next byte."""
        x = F.rms_norm(self.embedding(tokens), (self.embedding.embedding_dim,))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.rms_norm(x, (x.shape[-1],)))
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte. ``batch``: (B, T+1) int64."""
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float = 0.6, seed: int = 0) -> str:
        """Continues the prompt by ``length`` bytes."""
        chance = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode())])
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            following = torch.multinomial(logits.softmax(-1), 1, generator=chance)
            tokens = torch.cat((tokens, following), dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


class Windows(Dataset[Tensor]):
    """A text cut into windows of ``context`` + 1 bytes, the last of each being the first of the next."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.bytes[start : start + self.context + 1].long()


def standard_library(limit: int) -> tuple[bytes, bytes]:
    """Python's own source in the order of its paths, at most ``limit`` bytes; every 20th file is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    training, validation = bytearray(), bytearray()
    for index, file in enumerate(sorted(root.rglob("*.py"))):
        if not skipped & set(file.relative_to(root).parts):
            (validation if index % 20 == 0 else training).extend(file.read_bytes())
        if len(training) >= limit:
            break
    return bytes(training[:limit]), bytes(validation)


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
sampler = elastic.ElasticSampler(training, shuffle=True)
loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)


def learning_rate(step: int) -> float:
    """Rises for the first twentieth of the run, then falls along a cosine to a twentieth."""
    rising = min(1.0, (step + 1) / (0.05 * args.steps))
    falling = 0.525 + 0.475 * math.cos(math.pi * step / args.steps)
    return float(args.lr * rising * falling)


def record(**values: Any) -> None:
    """Appends one line to the metrics. ``at`` is on the clock of the driver's journal: one for the whole machine."""
    with (args.out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.monotonic(), **values}) + "\n")


def report(step: int, loss: float, seconds: float) -> None:
    """Rank 0's line for the metrics and, now and then, for the screen. ``seconds``: what the step took."""
    workers = elastic.size()
    tokens_per_s = workers * args.batch_size * args.context / seconds
    record(step=step, loss=loss, workers=workers, tokens_per_s=tokens_per_s)
    if step % args.log_every == 0 or step == 1:
        left = round((args.steps - step) * seconds)
        print(
            f"step {step:4}/{args.steps}  loss {loss:.3f}  {workers} workers"
            f"  {tokens_per_s:6,.0f} tokens/s  {left // 60}:{left % 60:02} left"
        )


@torch.no_grad()
def validation_loss(windows: int = 256) -> float:
    """Nats per byte over the first windows held back, shared out among the workers."""
    mine = range(elastic.rank(), min(windows, len(validation)), elastic.size())
    total = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(mine), args.batch_size):
        batch = torch.stack([validation[i] for i in mine[start : start + args.batch_size]])
        total += torch.tensor([model.loss(batch).item() * len(batch), len(batch)])
    loss, count = elastic.allreduce(total, name="validation", op=elastic.Sum).tolist()
    return float(loss / count)


@elastic.run
def train(state: elastic.TorchState) -> None:
    while state.step < args.steps:
        for index, batch in enumerate(loader):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(state.step)
            optimizer.zero_grad()
            loss = model.loss(batch)
            loss.backward()
            optimizer.step()
            mean = elastic.allreduce(loss.detach(), name="loss").item()
            state.step += 1
            state.sampler.record_batch(index, args.batch_size)
            if elastic.rank() == 0:
                report(state.step, mean, time.perf_counter() - began)
            state.commit()
            if state.step == args.steps:
                break
        else:
            state.sampler.set_epoch(state.sampler.epoch + 1)
    loss_held_back = validation_loss()
    if elastic.rank() == 0:
        text = model.write("def ", 400)
        record(validation_loss=loss_held_back, sample=text)
        print(f"validation loss {loss_held_back:.3f} nats per byte; it writes:\n\n{text}")


args.out.mkdir(parents=True, exist_ok=True)
if elastic.rank() == 0:
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {len(training.bytes):,} bytes of Python")
train(elastic.TorchState(model, optimizer, sampler=sampler, step=0))
