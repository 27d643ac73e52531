"""Interface for observing the optimizer steps of frameworks other than torch.

Each framework's module registers its observer when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from elastic.script_checks.mistakes import Trained, UsedLoader
from elastic.state.state import State


class StepSource(Protocol):
    """Observer of one training in one framework. All methods must be called from the training thread."""

    def classes(self) -> list[type]:
        """Return the classes whose instances, including those of subclasses, are passed to `meet`."""

    def meet(self, found: Iterable[Any]) -> None:
        """Receive the relevant objects that exist before the training."""

    def observe(self, stepped: Callable[[object], None], world: tuple[int, int]) -> None:
        """Start calling ``stepped`` with the optimizer after each step. ``stepped`` may raise.

        Args:
            stepped: function to call with the optimizer that has stepped.
            world: rank and size of the current world.
        """

    def forget(self) -> None:
        """Stop observing, and drop all references to the script's objects."""

    def optimizers(self, state: State) -> Iterator[Trained]:
        """Yield the optimizers that have taken steps."""

    def loaders(self, state: State) -> Iterator[UsedLoader]:
        """Yield the loaders that provide the steps' batches, if they are known."""


makers: list[Callable[[], StepSource]] = []
