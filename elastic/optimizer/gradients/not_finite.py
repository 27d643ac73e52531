"""Record of the step in which reduced gradients first became infinite or NaN, with a digest of the parameters.

One step later, these gradients have corrupted all replicas in the same way. Before that, the parameters of a rank with
faulty memory still differ from those of all other ranks. If the cause is a batch or a diverging model, the parameters
are equal everywhere and no worker is blamed.

The observations of a rank belong to its state, like a commit: they outlast the world, and restoring an older commit
discards them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from elastic.state.snapshots.digest import digest

# Number of elements above which a CPU gradient is sampled, because reading all of it takes up to a tenth of a step.
WHOLE_BYTES = 1 << 20
# A sample consists of evenly spaced runs of adjacent elements. Each run costs one miss of the processor's cache.
RUNS, RUN = 1024, 8
# Number of elements of a bucket to check. A non-finite value spreads to nearly all gradients.
SAMPLE = 4096


def finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite. Always True for integers."""
    return all(map(math.isfinite, extremes(tensor)))


def extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return two scalars that are finite if and only if all elements are.

    The result is empty for integers. Does not synchronize.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.numel() or not tensor.is_floating_point():
        return ()
    numbers = tensor.float() if tensor.itemsize == 1 else tensor  # torch cannot compare float8.
    return tuple(torch.aminmax(numbers))


def examined(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of a shard's gradient that are examined. They are the same on all ranks."""
    if gradient.is_cuda or gradient.nbytes <= WHOLE_BYTES or not gradient.is_contiguous():
        return gradient
    return gradient.as_strided((RUNS, RUN), (gradient.numel() // RUNS, 1))


class FirstNotFinite:
    """Record of the first non-finite gradients on one worker.

    All ranks receive the same reduced gradients and therefore record the same step.
    """

    def __init__(self) -> None:
        # for each reducer, the digest of its parameters at its first non-finite gradient
        self._found: dict[str, int] = {}
        self._committed: dict[str, int] = {}  # content of `_found` at the newest commit
        self._odd: set[str] = set()  # reducers whose last gradients were not finite
        self._missed = False  # whether other ranks have stepped without this one
        self._fine: set[str] = set()  # reducers whose gradients have been finite since then

    def look(
        self,
        of: str,
        samples: Iterable[torch.Tensor],
        parameters: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """Check reduced gradients before the optimizer's step.

        The first observation is kept until the gradients are finite again.

        Args:
            of: name of the gradients' reducer.
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
        """Discard all observations, because all ranks have received the same new state."""
        self._missed = False
        for each in (self._found, self._committed, self._odd, self._fine):
            each.clear()

    def missed(self) -> None:
        """Record that the other ranks took a step without this rank.

        This rank can no longer identify the first non-finite step, so nothing is recorded until gradients are finite
        again.
        """
        self._missed = True
        for each in (self._found, self._committed, self._fine):
            each.clear()

    def saved(self) -> None:
        """Record that a commit was made."""
        self._committed = dict(self._found)

    def stepped_back(self) -> None:
        """Restore the observations of the newest commit."""
        self._found = dict(self._committed)

    def lasts(self) -> bool:
        """Return whether the most recent gradients were non-finite."""
        return bool(self._odd)

    def digest(self) -> int | None:
        """Return the digest of the parameters at the first non-finite step. Ranks with equal parameters have equal
        digests.

        Returns None without an observation, or with several optimizers. A joined rank has not seen the observations of
        an older plan, so ranks may have observed different numbers of optimizers.
        """
        found = [*self._found.values()]
        return found[0] if len(found) == 1 else None
