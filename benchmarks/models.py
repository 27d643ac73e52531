"""Models of the benchmarks, each with its data and its optimizer.

    mlp      25 M parameters in 5 linear layers, 8 samples, SGD: little work for its gradients
    gpt      the GPT of examples/gpt.py: 0.85 M parameters, 4 windows of 128 bytes, AdamW
    convnet  residual, 2.8 M parameters, 8 pictures of 3 x 32 x 32, SGD with momentum: much work for its gradients
    tiny     two layers of 64, SGD: a step of a millisecond, so that any cost per step is visible

The convnet normalizes groups of channels and so keeps no running statistics, which DDP would send before each step.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCHES = 8  # per rank; used in turn
GPT_LR = 3e-3
GPT_WINDOWS = 4  # of a rank in a step
COURSE_BYTES = 4_000_000
EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Training:
    """One training. ``loss`` takes the model or its wrapper, and one batch: inputs and targets."""

    model: nn.Module
    optimizer: Callable[[], torch.optim.Optimizer]
    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]


def mlp(rank: int) -> Training:
    model = nn.Sequential(*linear_layers(5, 2240))
    draw = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(BATCHES):
        batches.append((torch.randn(8, 2240, generator=draw), torch.zeros(8, 2240)))

    def loss(predict: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(predict(inputs), targets)

    return Training(model, lambda: torch.optim.SGD(model.parameters(), lr=0.01), batches, loss)


def linear_layers(count: int, width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return layers[:-1]


def gpt(rank: int) -> Training:
    sys.path.append(str(EXAMPLES))
    from gpt_model import GPT, Windows, standard_library

    model = GPT(layers=4, width=128, heads=4, context=128)
    windows = Windows(standard_library(400_000)[0], model.context)
    draw = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(BATCHES):
        chosen = torch.randint(len(windows), (4,), generator=draw).tolist()
        batch = torch.stack([windows[index] for index in chosen])
        batches.append((batch[:, :-1].contiguous(), batch[:, 1:].contiguous()))

    def loss(predict: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(predict(inputs).flatten(0, 1), targets.flatten())

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=GPT_LR, betas=(0.9, 0.95), weight_decay=0.1)

    return Training(model, optimizer, batches, loss)


class Elsewhere(nn.Module):
    """A model whose forward pass sleeps, and whose gradients are random."""

    def __init__(self, model: nn.Module, step_s: float) -> None:
        super().__init__()
        self.model, self.step_s = model, step_s

    def forward(self) -> Tensor:
        time.sleep(self.step_s)
        return torch.stack(
            [(each * torch.randn_like(each)).sum() for each in self.model.parameters()]
        ).sum()


class GptCourse:
    """Training of the GPT from random parameters for ``steps`` steps, with the learning rates of examples/gpt.py.

    Args:
        rank: whose windows are drawn. The initial parameters depend only on ``seed``.
        highest: highest learning rate.
        windows: number of windows in a step.
    """

    def __init__(
        self, rank: int, steps: int, seed: int, highest: float = GPT_LR, windows: int = GPT_WINDOWS
    ) -> None:
        sys.path.append(str(EXAMPLES))
        from gpt_model import GPT, Windows, standard_library

        torch.manual_seed(seed)
        self.model = GPT(layers=4, width=128, heads=4, context=128)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=highest, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.steps, self.highest, self.windows = steps, highest, windows
        self._training = Windows(standard_library(COURSE_BYTES)[0], self.model.context)
        self._draw = torch.Generator().manual_seed(1000 * seed + rank)

    def backward(self, step: int, predict: nn.Module | None = None) -> None:
        """Set the learning rate of a step, and compute its gradients. ``predict`` wraps the model."""
        rate = learning_rate(step, self.steps, self.highest)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        chosen = torch.randint(len(self._training), (self.windows,), generator=self._draw).tolist()
        batch = torch.stack([self._training[index] for index in chosen])
        logits = (predict or self.model)(batch[:, :-1])
        self.optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()


@torch.no_grad()
def validation_loss(gpt: Any) -> float:
    """Return the mean loss of a GPT in nats per byte, on text that `GptCourse` does not train."""
    from gpt_model import Windows, standard_library

    windows = Windows(standard_library(COURSE_BYTES)[1], gpt.context)
    return statistics.fmean(
        gpt.loss(windows[index][None]).item() for index in range(min(256, len(windows)))
    )


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Return the rate of examples/gpt.py, which rises to ``highest`` and then falls."""
    rising = min(1.0, (step + 1) / (0.05 * steps))
    return highest * rising * (0.525 + 0.475 * math.cos(math.pi * step / steps))


class Residual(nn.Module):
    """Two convolutions with a shortcut. (B, from, H, W) -> (B, to, H / stride, W / stride)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, after) for _ in range(2))
        self.around: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.around(x) + self.norms[1](self.second(inner)))


def convnet(rank: int) -> Training:
    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()]
    blocks: list[nn.Module] = []
    before = 32
    for width, stride in ((32, 1), (64, 2), (128, 2), (256, 2)):
        blocks += [Residual(before, width, stride), Residual(width, width, 1)]
        before = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    model = nn.Sequential(*stem, *blocks, *head)
    draw = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(BATCHES):
        pictures = torch.randn(8, 3, 32, 32, generator=draw)
        batches.append((pictures, torch.randint(10, (8,), generator=draw)))

    def loss(predict: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(predict(inputs), targets)

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    return Training(model, optimizer, batches, loss)


def tiny(rank: int) -> Training:
    model = nn.Sequential(*linear_layers(2, 64))
    batches = [(torch.randn(8, 64), torch.zeros(8, 64)) for _ in range(BATCHES)]

    def loss(predict: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(predict(inputs), targets)

    return Training(model, lambda: torch.optim.SGD(model.parameters(), lr=0.01), batches, loss)


MODELS: dict[str, Callable[[int], Training]] = {
    "mlp": mlp,
    "gpt": gpt,
    "convnet": convnet,
    "tiny": tiny,
}


def make(name: str, rank: int) -> Training:
    """Create a training. Models are equal on all ranks and in all calls; the data differ between ranks."""
    torch.manual_seed(0)
    return MODELS[name](rank)


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers to shard separately: the elements of the model's lists, or else its linear layers."""
    blocks = [
        each for child in model.children() if isinstance(child, nn.ModuleList) for each in child
    ]
    return blocks or [each for each in model.modules() if isinstance(each, nn.Linear)]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def bytes_of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the size of a snapshot: parameters, buffers, and the optimizer's state."""
    tensors = [*model.parameters(), *model.buffers()]
    for entry in optimizer.state.values():
        tensors += [value for value in entry.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Steps:
    """Training steps, one per call, which use the batches in turn."""

    def __init__(
        self, training: Training, predict: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.model = training.model
        self.optimizer = optimizer
        self._training = training
        self._predict = predict
        self._number = 0

    def __call__(self) -> None:
        inputs, targets = self._training.batches[self._number % BATCHES]
        self._number += 1
        self.optimizer.zero_grad()
        self._training.loss(self._predict, inputs, targets).backward()
        self.optimizer.step()
