"""A small GPT over bytes, and its training text, Python's standard library. It does not depend on the workers."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 256  # bytes
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


class Attention(nn.Module):
    """Causal attention with rotary positions and normalized queries and keys. (B, T, C) -> (B, T, C)."""

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
            # Output weights are initially zero, so that each block begins as the identity.
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute (B, T) int64 bytes -> (B, T, 256) logits of each next byte."""
        x = F.rms_norm(self.embedding(tokens), (self.embedding.embedding_dim,))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.rms_norm(x, (x.shape[-1],)))
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte.

        Args:
            batch: (B, T+1) int64.
        """
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def write(self, prompt: str, length: int, temperature: float = 0.6, seed: int = 0) -> str:
        """Continue the prompt by ``length`` bytes."""
        chance = torch.Generator().manual_seed(seed)
        tokens = torch.tensor([list(prompt.encode())])
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            following = torch.multinomial(logits.softmax(-1), 1, generator=chance)
            tokens = torch.cat((tokens, following), dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


class Windows(Dataset[Tensor]):
    """A text divided into windows of ``context`` + 1 bytes; the last byte of each is the first of the next."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.bytes[start : start + self.context + 1].long()


def standard_library(limit: int) -> tuple[bytes, bytes]:
    """Return Python's source in the order of its paths, at most ``limit`` bytes; every 20th file is for validation."""
    training, validation = bytearray(), bytearray()
    for index, file in enumerate(sources(Path(sysconfig.get_path("stdlib")))):
        (validation if index % 20 == 0 else training).extend(file.read_bytes())
        if len(training) >= limit:
            break
    return bytes(training[:limit]), bytes(validation)


def sources(folder: Path) -> Iterator[Path]:
    """Iterate over the sources, without skipped folders, which may contain tens of thousands of files."""
    for entry in sorted(folder.iterdir()):
        if entry.suffix == ".py":
            yield entry
        elif entry.is_dir() and entry.name not in SKIPPED:
            yield from sources(entry)
