"""What the parameters were when reduced gradients first became infinite or NaN: the last moment at which one can tell
whose were damaged.

A step later all replicas are spoilt alike, by the same gradients. But before the optimizer steps the parameters are
still what they were, and those of a rank whose memory has changed a bit differ from all others. Where it was a batch,
or a model that diverges, they are equal everywhere, and nobody is blamed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable

import torch

from elastic.state.snapshots.digest import digest

SAMPLE = 4096  # elements of a bucket that are looked at: what is not finite spreads to nearly all gradients


def finite(tensor: torch.Tensor) -> bool:
    """Whether all its elements are; one of integers always is."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    numbers = tensor.float() if tensor.itemsize == 1 else tensor  # torch compares no float8
    return all(map(math.isfinite, torch.aminmax(numbers)))


class FirstNotFinite:
    """Of one worker. Every rank that takes part sees the same reduced gradients, so all note the same step."""

    def __init__(self) -> None:
        self._generation = -1
        self._missed = False  # a step of the others, and all gradients since were not finite
        self._found: dict[str, int] = {}  # digests of parameters, by what they are of

    def look(
        self,
        generation: int,
        of: str,
        samples: Iterable[torch.Tensor],
        parameters: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """After gradients were reduced, before the optimizer steps. ``samples``: parts of these gradients.

        What was found first stays until they are finite again, or the world is another one.
        """
        if generation != self._generation:
            self._generation, self._missed = generation, False
            self._found.clear()
        if all(map(finite, samples)):
            self._found.pop(of, None)
            self._missed = False
        elif of not in self._found and not self._missed:
            self._found[of] = digest((f"{of} {name}", each.detach()) for name, each in parameters)

    def missed(self, generation: int) -> None:
        """The others have stepped without this rank. What it knows may be of another step than what they know, so it
        says nothing until gradients are finite again.
        """
        self._generation, self._missed = generation, True
        self._found.clear()

    def digest(self, generation: int) -> int | None:
        """Of all that was found, equal on ranks whose parameters were; None: gradients of this world are finite."""
        if generation != self._generation or not self._found:
            return None
        return functools.reduce(operator.xor, self._found.values())
