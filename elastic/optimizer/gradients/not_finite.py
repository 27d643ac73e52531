"""Record of the first step whose reduced gradients were infinite or NaN, with a digest of the parameters in that step.

The optimizer step with these gradients corrupts all replicas in the same way. Before that step, the parameters of a
rank with faulty memory still differ from those of all other ranks, which identifies the rank. If the cause is a batch
or a diverging model, the parameters are equal on all ranks, and no worker is identified as faulty.

The observations of a rank belong to its state: they survive a change of the world, and restoring a commit discards
later ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from elastic.state.snapshots.digest import digest

# Size in bytes above which a gradient on the CPU is only sampled: reading all of it takes up to a tenth of a step.
WHOLE_BYTES = 1 << 20
# A sample consists of evenly spaced runs of adjacent elements. Each run costs one cache miss.
RUNS, RUN = 1024, 8
# Number of elements of a bucket to check. A few suffice, because a non-finite value spreads to nearly all gradients.
SAMPLE = 4096


def finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite. The result is always True for integers."""
    return all(map(math.isfinite, extremes(tensor)))


def extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return two scalars that are finite if and only if all elements of the gradient are finite.

    For integers the result is empty. This function does not synchronize with the device.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel() or not tensor.is_floating_point():
        return ()
    # convert first: torch cannot compare float8
    numbers = tensor.float() if tensor.itemsize == 1 else tensor
    return tuple(torch.aminmax(numbers))


def examined(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of a shard's gradient to examine. All ranks examine the same elements."""
    if gradient.is_cuda or gradient.nbytes <= WHOLE_BYTES or not gradient.is_contiguous():
        return gradient
    return gradient.as_strided((RUNS, RUN), (gradient.numel() // RUNS, 1))


class FirstNotFinite:
    """Record of the first non-finite gradients on one worker.

    All ranks receive the same reduced gradients and therefore record the same step.
    """

    def __init__(self) -> None:
        # digest of the parameters at the first non-finite gradient, for each reducer
        self._found: dict[str, int] = {}
        self._committed: dict[str, int] = {}  # copy of `_found` at the newest commit
        self._odd: set[str] = set()  # reducers whose most recent gradients were not finite
        self._missed = False  # whether the other ranks have taken a step without this rank
        self._fine: set[str] = set()  # reducers whose gradients have been finite since then

    def look(
        self,
        of: str,
        samples: Iterable[torch.Tensor],
        parameters: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """Check reduced gradients before the optimizer applies them.

        The first observation is kept until the gradients are finite again.

        Args:
            of: name of the reducer.
            samples: parts of the reduced gradients.
            parameters: parameters by name, for the digest.
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
        """Discard all observations. This method is called when all ranks have received the same new state."""
        self._missed = False
        for each in (self._found, self._committed, self._odd, self._fine):
            each.clear()

    def missed(self) -> None:
        """Record that the other ranks took a step without this rank.

        The gradients may have become non-finite in that step, so this rank records nothing until they are finite again.
        """
        self._missed = True
        for each in (self._found, self._committed, self._fine):
            each.clear()

    def saved(self) -> None:
        """Save the observations for `stepped_back`. This method is called at a commit."""
        self._committed = dict(self._found)

    def stepped_back(self) -> None:
        """Restore the observations as of the newest commit."""
        self._found = dict(self._committed)

    def lasts(self) -> bool:
        """Return whether the most recent gradients of any reducer were not finite."""
        return bool(self._odd)

    def digest(self) -> int | None:
        """Return the digest of the parameters at the first non-finite step. Equal parameters have equal digests.

        Returns None unless exactly one reducer has an observation: with several, the ranks' digests can't be compared,
        because a joined rank has not seen those of older plans.
        """
        found = [*self._found.values()]
        return found[0] if len(found) == 1 else None
