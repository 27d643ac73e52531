"""Detection of new gradients that a loader's batches have produced, and zero gradients for placeholder batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class BatchGradients:
    """Gradients of the parameters that a loader's batches train. The set is empty until `parameters` is set."""

    def __init__(self) -> None:
        self.parameters: Callable[[], Iterable[torch.Tensor]] = tuple
        self._before: set[tuple[int, int]] = set()
        self._hooks: list[Any] = []

    def look(self) -> None:
        """Record the current gradients as the reference for `new`."""
        self._before = self._present()

    @property
    def new(self) -> bool:
        """Return whether gradients exist that did not exist at the last `look`."""
        return bool(self._present() - self._before)

    def silence(self) -> None:
        """Set every gradient to zero until `count` is called, so that this rank contributes only zeros."""
        self._hooks = [
            each.register_hook(torch.zeros_like) for each in self.parameters() if each.requires_grad
        ]

    def count(self) -> None:
        """Stop setting gradients to zero."""
        if self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _present(self) -> set[tuple[int, int]]:
        return {
            (id(gradient), 0 if gradient.is_inference() else gradient._version)
            for each in self.parameters()
            if (gradient := each.grad) is not None
        }
