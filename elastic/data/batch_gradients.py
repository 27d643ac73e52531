"""The gradients that batches lead to: whether there are new ones, and that those of a placeholder are zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class BatchGradients:
    """Of the parameters that a loader's batches train; of none, until `parameters` is set."""

    def __init__(self) -> None:
        self.parameters: Callable[[], Iterable[torch.Tensor]] = tuple
        self._before: set[tuple[int, int]] = set()
        self._hooks: list[Any] = []

    def look(self) -> None:
        """From here on, gradients are `new`."""
        self._before = self._present()

    @property
    def new(self) -> bool:
        """Whether there are gradients that were not there when this was last looked at."""
        return bool(self._present() - self._before)

    def silence(self) -> None:
        """Until `count`, every gradient becomes zeros, as those of a rank that has joined."""
        self._hooks = [
            each.register_hook(torch.zeros_like) for each in self.parameters() if each.requires_grad
        ]

    def count(self) -> None:
        """Gradients are what they are."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _present(self) -> set[tuple[int, int]]:
        """One that was added to, or is another tensor, is another element."""
        return {
            (id(gradient), 0 if gradient.is_inference() else gradient._version)
            for each in self.parameters()
            if (gradient := each.grad) is not None
        }
