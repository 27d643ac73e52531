"""Frameworks beside torch whose optimizer steps are observed. Each registers its own when it is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from elastic.script_checks.mistakes import Trained, UsedLoader
from elastic.state.state import State


class StepSource(Protocol):
    """Observes one training of one framework. Methods are for the training thread."""

    def classes(self) -> list[type]:
        """Objects of these and their subclasses that exist before the training are given to `meet`."""

    def meet(self, found: Iterable[Any]) -> None:
        """The training has not begun yet."""

    def observe(self, stepped: Callable[[object], None], world: tuple[int, int]) -> None:
        """Call ``stepped`` with the optimizer after each step from now on; it may raise. ``world``: rank and size."""

    def forget(self) -> None:
        """Stop observing, and hold nothing of the script any more."""

    def optimizers(self, state: State) -> Iterator[Trained]:
        """Those that have stepped."""

    def loaders(self, state: State) -> Iterator[UsedLoader]:
        """Data sets from which the steps took their batches, as far as they can be judged."""


makers: list[Callable[[], StepSource]] = []
