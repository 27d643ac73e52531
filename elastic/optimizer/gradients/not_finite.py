"""What the parameters were when reduced gradients first became infinite or NaN: the last moment at which one can tell
whose were damaged.

A step later all replicas are spoilt alike, by the same gradients. But before the optimizer steps the parameters are
still what they were, and those of a rank whose memory has changed a bit differ from all others. Where it was a batch,
or a model that diverges, they are equal everywhere, and nobody is blamed.

What a rank has seen belongs to its state, as a commit does: it outlasts the world, and a way back to an older commit
forgets it.
"""

from __future__ import annotations

import math
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
        self._found: dict[str, int] = {}  # digests of parameters, by what they are of
        self._committed: dict[str, int] = {}  # the same, as of the newest commit
        self._odd: set[str] = set()  # those whose last gradients were not finite
        self._missed = False  # a step of the others, so only of these it is known when they began:
        self._fine: set[str] = set()

    def look(
        self,
        of: str,
        samples: Iterable[torch.Tensor],
        parameters: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """After gradients were reduced, before the optimizer steps. ``samples``: parts of these gradients.

        What was found first stays until they are finite again.
        """
        if all(map(finite, samples)):
            self._fine.add(of)
            self._odd.discard(of)
            self._found.pop(of, None)
            return
        self._odd.add(of)
        if of not in self._found and (of in self._fine or not self._missed):
            self._found[of] = digest((name, each.detach()) for name, each in parameters)

    def began(self) -> None:
        """All ranks have the same new state, whatever they had before."""
        self._missed = False
        for each in (self._found, self._committed, self._odd, self._fine):
            each.clear()

    def missed(self) -> None:
        """The others have stepped without this rank. What it would note may be of another step than what they know, so
        it notes nothing until gradients are finite again.
        """
        self._missed = True
        for each in (self._found, self._committed, self._fine):
            each.clear()

    def saved(self) -> None:
        """A commit was made."""
        self._committed = dict(self._found)

    def stepped_back(self) -> None:
        """To the newest commit."""
        self._found = dict(self._committed)

    def lasts(self) -> bool:
        """Whether the last gradients were not finite."""
        return bool(self._odd)

    def digest(self) -> int | None:
        """Of what was found, equal on ranks whose parameters were; None: nothing was, or of several optimizers, of
        which another rank may have found fewer: a newcomer has not seen what an older plan found.
        """
        found = [*self._found.values()]
        return found[0] if len(found) == 1 else None
