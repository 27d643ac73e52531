"""The trained model: a GPT of 100M parameters, and a small one on a fake GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpu.workers.notes import SMALL

VOCABULARY = 256
LAYERS, WIDTH, HEADS, CONTEXT = (2, 32, 2, 16) if SMALL else (14, 768, 12, 256)
# Of SGD with momentum 0.9; with ten times as much the large one diverges.
LEARNING_RATE = 0.02 if SMALL else 0.002


class GPT(nn.Module):
    """(B, T) int64 -> (B, T, 256) logits of each next token. Equal on all ranks, and in all runs."""

    def __init__(self, context: int = CONTEXT) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(context, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        later = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("later", later, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places
        for block in self.blocks:
            x = block(x, src_mask=self.later, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats. ``tokens``: (B, T+1) int64."""
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, windows: int = 4 if SMALL else 8) -> Tensor:
    """(B, T+1) int64 of a step, the same everywhere; a quarter of all tokens occur."""
    chosen = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY // 4, (windows, CONTEXT + 1), generator=chosen)
