"""Handler for the position of a data loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from elastic.data.loader import DataLoader
from elastic.state.handlers.part import DictPart


class LoaderStateHandler(DictPart):
    """Handler of an `elastic.data.DataLoader`. Saves the epoch and the samples already used in training."""

    value: DataLoader

    def layout(self) -> list[str]:
        return [f"{self.name} {self.value.layout()}"]

    def attach(self, parameters: Callable[[], Iterable[torch.Tensor]], *, stepped: bool) -> None:
        """Set the parameters that the loader's batches train, and whether an optimizer of the same state does."""
        self.value.attach(parameters, stepped=stepped)

    def reset(self) -> None:
        self.deals_again()

    def deals_again(self) -> bool:
        """Reset the loader after a change of the world, like `reset`.

        Return whether batches since the last optimizer step are distributed again in the new world.
        """
        return self.value.reset()
