"""The position of a data loader, as a part of a state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from elastic.data.loader import DataLoader
from elastic.state.handlers.part import DictPart


class LoaderStateHandler(DictPart):
    """An `elastic.data.DataLoader`: its epoch, and what of it is trained on."""

    value: DataLoader

    def layout(self) -> list[str]:
        return [f"{self.name} {self.value.layout()}"]

    def attach(self, parameters: Callable[[], Iterable[torch.Tensor]], *, stepped: bool) -> None:
        """Set the parameters that the loader's batches train, and whether an optimizer of the same state does."""
        self.value.attach(parameters, stepped=stepped)

    def reset(self) -> None:
        self.deals_again()

    def deals_again(self) -> bool:
        """As `reset`. Whether batches since the last optimizer step are dealt to the new world again."""
        return self.value.reset()
