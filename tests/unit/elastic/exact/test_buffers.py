"""Allowed and forbidden changes in a forward pass: each worker runs it as often as it has shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastic.errors import Invalid
from elastic.exact.shards import Shards
from harness.golden import raises


class LargestNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, 2, max_norm=0.1)

    def forward(self) -> torch.Tensor:
        found: torch.Tensor = self.words(torch.tensor([1]))
        return found


class AveragedWeights(nn.Module):
    """As of a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self) -> None:
        self.average.data = self.average.data * 0.9


class Cached(nn.Module):
    def forward(self) -> None:
        if not hasattr(self, "sines"):
            self.register_buffer("sines", torch.linspace(0, 1, 4), persistent=False)


class Emptied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2))

    def forward(self) -> None:
        self.cache = None


class Late(nn.Module):
    def forward(self) -> None:
        if not hasattr(self, "norm"):
            self.norm = nn.BatchNorm1d(2)


@pytest.mark.parametrize("model", [LargestNorm, AveragedWeights, Cached, Emptied, Late])
def test_buffers_that_would_differ_between_workers_are_refused(model):
    shards, module = Shards(2), model()
    shards.watch(module)
    with raises(Invalid):
        for _ in shards:
            module()


def test_frozen_module_created_under_inference_mode_is_accepted():
    """torch counts no writes to its tensors."""
    with torch.inference_mode():
        frozen = nn.BatchNorm1d(2).eval()
    shards = Shards(2)
    shards.watch(frozen)
    for _ in shards:
        with torch.inference_mode():
            frozen(torch.ones(1, 2))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(3).to_sparse())
        self.register_buffer("seen", torch.tensor(0))
        self.layer = nn.Linear(3, 1)

    def forward(self) -> torch.Tensor:
        self.get_buffer("seen").add_(1)
        found: torch.Tensor = self.layer(
            torch.sparse.mm(self.get_buffer("edges"), torch.ones(3, 3))
        )
        return F.mse_loss(found, torch.zeros_like(found))


def test_sparse_buffers_may_be_constant_and_counters_count_steps():
    shards, module = Shards(4), Graph()
    shards.watch(module)
    for _ in range(3):
        for _ in shards:
            module().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert int(module.get_buffer("seen")) == 3
