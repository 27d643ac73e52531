"""Interface for observing optimizer steps in frameworks other than torch.

The module of each framework registers its observer when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from elastic.script_checks.mistakes import Trained, UsedLoader
from elastic.state.state import State


class StepSource(Protocol):
    """Observer of one training of one framework. Methods must be called from the training thread."""

    def classes(self) -> list[type]:
        """Return the classes whose instances are passed to `meet`, including those of subclasses."""

    def meet(self, found: Iterable[Any]) -> None:
        """Receive the objects that exist before the training."""

    def observe(self, stepped: Callable[[object], None], world: tuple[int, int]) -> None:
        """Start calling ``stepped`` with the optimizer after each step. ``stepped`` may raise.

        Args:
            stepped: the function to call.
            world: rank and size of the current world.
        """

    def forget(self) -> None:
        """Stop observing, and drop all references to the script's objects."""

    def optimizers(self, state: State) -> Iterator[Trained]:
        """Yield the optimizers that have stepped."""

    def loaders(self, state: State) -> Iterator[UsedLoader]:
        """Yield the data sets of the steps' batches, if they are known."""


makers: list[Callable[[], StepSource]] = []
