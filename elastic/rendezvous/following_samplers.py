"""Gives torch's ``DistributedSampler`` the number of replicas and the rank of the present world. Acts: wraps methods.

A sampler follows if it was made with the size and the rank of the world of that moment, explicitly or by default. One
made with other numbers is the script's own choice, as is one that the script has changed since, or whose class computes
``num_samples`` and ``total_size`` differently from torch's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from elastic.protocol.messages import Place

MADE_FOR = (
    "elastic_made_for"  # attribute of a sampler that follows: its numbers, as they were set last
)


class Numbers(NamedTuple):
    """``num_replicas`` and ``rank`` of a sampler."""

    replicas: int
    rank: int


_place: Callable[[], Place | None] | None = None
_made: dict[int, weakref.ref[Any]] = {}
_theirs: dict[str, Callable[..., Any]] = {}  # torch's own methods, by name


def install(place: Callable[[], Place | None]) -> None:
    """Samplers that are made from now on follow. ``place``: where this worker is at present. Idempotent."""
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
    """Gives torch its own methods back."""
    global _place
    _place = None
    from torch.utils.data import DistributedSampler

    for name, method in _theirs.items():
        setattr(DistributedSampler, name, method)
    _theirs.clear()
    _made.clear()


def follow() -> None:
    """The world has changed. A subclass may read the numbers in methods of its own, so they are set here at once."""
    for made in [*_made.values()]:
        sampler = made()
        if sampler is not None:
            bring(sampler)


def bring(sampler: Any) -> None:
    """Sets the numbers of a sampler that follows to those of the present world."""
    now = _present()
    if now is None or getattr(sampler, MADE_FOR, now) == now or not follows(sampler):
        return
    sampler.num_samples, sampler.total_size = _lengths(sampler, now)
    sampler.num_replicas, sampler.rank = now
    setattr(sampler, MADE_FOR, tuple(now))


def follows(sampler: Any) -> bool:
    """Whether a sampler has the numbers of the present world, or is given them when it is asked next."""
    made_for = getattr(sampler, MADE_FOR, None)
    if made_for is None or not _theirs or _numbers(sampler) != made_for:
        return False
    return (sampler.num_samples, sampler.total_size) == _lengths(sampler, made_for)


def count() -> int:
    """Samplers alive that were made to follow."""
    return len(_made)


def _numbers(sampler: Any) -> Numbers:
    return Numbers(sampler.num_replicas, sampler.rank)


def _present() -> Numbers | None:
    place = None if _place is None else _place()
    return None if place is None else Numbers(max(place.size, 1), place.rank)


def _lengths(sampler: Any, numbers: Numbers) -> tuple[int, int]:
    """``num_samples`` and ``total_size``, as torch computes them."""
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
            setattr(self, MADE_FOR, tuple(numbers))  # pickled, it needs nothing of this package
            key = id(self)
            _made[key] = weakref.ref(self, lambda _: _made.pop(key, None))

    return wrapper


def _first(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Copies of a sampler, which were never made by ``__init__``, follow too."""

    @functools.wraps(method)
    def wrapper(self: Any) -> Any:
        bring(self)
        return method(self)

    return wrapper
