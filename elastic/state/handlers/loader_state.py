"""Handler of the position of a data loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from elastic.data.loader import DataLoader
from elastic.state.handlers.part import DictPart


class LoaderStateHandler(DictPart):
    """Handler of an `elastic.data.DataLoader`, which saves the epoch and the number of trained samples."""

    value: DataLoader

    def layout(self) -> list[str]:
        return [f"{self.name} {self.value.layout()}"]

    def attach(self, parameters: Callable[[], Iterable[torch.Tensor]], *, stepped: bool) -> None:
        """Set the parameters trained on the loader's batches, and whether an optimizer of the state trains them."""
        self.value.attach(parameters, stepped=stepped)

    def reset(self) -> None:
        self.deals_again()

    def deals_again(self) -> bool:
        """Adapt the loader to a change of the world, like `reset`.

        Returns whether the batches since the last optimizer step will be distributed again in the new world.
        """
        return self.value.reset()
