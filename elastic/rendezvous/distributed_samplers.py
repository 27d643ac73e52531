"""Wrappers that keep the rank and size in torch's ``DistributedSampler`` equal to those of the current world.

A sampler is updated in each world if its ``num_replicas`` and ``rank`` were those of the world when it was created,
explicitly or by default. A sampler is left unchanged if it was created with other values, if the script has changed
them, or if its class computes ``num_samples`` and ``total_size`` differently from torch.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from elastic.protocol.messages import Place

# attribute of a following sampler: the values that were set last
MADE_FOR = "elastic_made_for"


class SamplerRanks(NamedTuple):
    """Values of ``num_replicas`` and ``rank`` of a sampler."""

    replicas: int
    rank: int


_place: Callable[[], Place | None] | None = None
_made: dict[int, weakref.ref[Any]] = {}
_theirs: dict[str, Callable[..., Any]] = {}  # torch's original methods, keyed by name


def install(place: Callable[[], Place | None]) -> None:
    """Update, in each world, the samplers that are created after this call. Idempotent.

    Args:
        place: function that returns this worker's current place, or None.
    """
    global _place
    _place = place
    from torch.utils.data import DistributedSampler

    kind: Any = DistributedSampler
    if _theirs:
        return
    for name, wrapped in (("__init__", _registering), ("__iter__", _first), ("__len__", _first)):
        _theirs[name] = getattr(kind, name)
        setattr(kind, name, wrapped(_theirs[name]))


def uninstall() -> None:
    """Restore torch's original sampler methods."""
    global _place
    _place = None
    from torch.utils.data import DistributedSampler

    for name, method in _theirs.items():
        setattr(DistributedSampler, name, method)
    _theirs.clear()
    _made.clear()


def follow() -> None:
    """Update all registered samplers after a change of the world, in case a subclass reads the values directly."""
    for made in [*_made.values()]:
        sampler = made()
        if sampler is not None:
            bring(sampler)


def bring(sampler: Any) -> None:
    """Set a registered sampler's values to those of the current world."""
    now = _present()
    if now is None or getattr(sampler, MADE_FOR, now) == now or not follows(sampler):
        return
    sampler.num_samples, sampler.total_size = _lengths(sampler, now)
    sampler.num_replicas, sampler.rank = now
    setattr(sampler, MADE_FOR, tuple(now))


def follows(sampler: Any) -> bool:
    """Return whether a sampler has the current world's values, or will have them at its next use."""
    made_for = getattr(sampler, MADE_FOR, None)
    if made_for is None or not _theirs or _numbers(sampler) != made_for:
        return False
    return (sampler.num_samples, sampler.total_size) == _lengths(sampler, made_for)


def count() -> int:
    """Return the number of existing samplers that are updated in each world."""
    return len(_made)


def _numbers(sampler: Any) -> SamplerRanks:
    return SamplerRanks(sampler.num_replicas, sampler.rank)


def _present() -> SamplerRanks | None:
    place = None if _place is None else _place()
    return None if place is None else SamplerRanks(max(place.size, 1), place.rank)


def _lengths(sampler: Any, numbers: SamplerRanks) -> tuple[int, int]:
    from torch.utils.data import DistributedSampler

    made: Any = DistributedSampler.__new__(DistributedSampler)
    _theirs["__init__"](made, sampler.dataset, *numbers, drop_last=sampler.drop_last)
    return made.num_samples, made.total_size


def _registering(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        initialize(self, *args, **options)
        numbers = _numbers(self)
        if numbers == _present():
            # a plain tuple, so that a pickled sampler can be loaded without this package
            setattr(self, MADE_FOR, tuple(numbers))
            key = id(self)
            _made[key] = weakref.ref(self, lambda _: _made.pop(key, None))

    return wrapper


def _first(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a sampler's method so that the sampler is updated first.

    This also covers copies of a sampler, which are created without ``__init__``.
    """

    @functools.wraps(method)
    def wrapper(self: Any) -> Any:
        bring(self)
        return method(self)

    return wrapper
