"""Leaves of a pytree or of a Flax module: their paths, descriptions and replacement."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from elastic.jax import arrays
from elastic.state.handlers.python_values import ATOMS


class Tree:
    """Holder of a pytree, so that a state can replace it as a whole."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Leaf:
    """Description of a leaf, without its content.

    Args:
        dtype: of an array, for example ``float32`` or ``key<fry>``; else the name of the leaf's type.
        shape: of an array, else None.
        sharding: of an array of JAX; None: a numpy array, or no array.
        weak: whether the dtype is weak.
        key: the implementation of PRNG keys; None: no keys.
        kept: a leaf that is neither an array, a number nor a string, for example a function. It is never copied.
    """

    dtype: str
    shape: tuple[int, ...] | None = None
    sharding: Any = None
    weak: bool = False
    key: Any = None
    kept: Any = None

    @classmethod
    def of(cls, value: Any) -> Leaf:
        if isinstance(value, jax.Array):
            key = jax.random.key_impl(value) if arrays.is_key(value) else None
            weak = key is None and value.weak_type
            return cls(str(value.dtype), value.shape, value.sharding, weak, key)
        if isinstance(value, np.ndarray):
            return cls(str(value.dtype), value.shape)
        kind = type(value)
        return cls(kind.__name__, kept=None if kind in ATOMS else value)

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Flat:
    """A flattened tree.

    Args:
        structure: of the tree.
        paths: of the leaves, such as ``layers.0.kernel``, all different.
        leaves: their values.
        module: the Flax module whose state the tree is; None: the tree is the value itself.
    """

    structure: Any
    paths: tuple[str, ...]
    leaves: list[Any]
    module: Any = None

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the value with other leaves. A Flax module is updated in place."""
        tree = jax.tree.unflatten(self.structure, leaves)
        if self.module is None:
            return tree
        from flax import nnx

        nnx.update(self.module, tree)
        return self.module

    def without_leaves(self) -> Flat:
        """Return the structure alone, so that no array is kept in memory."""
        return replace(self, leaves=[])


def has_arrays(value: Any) -> bool:
    """Return whether a value is a tree with an array of JAX, or a Flax module."""
    return is_module(value) or any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))


def is_module(value: Any) -> bool:
    """Return whether the value is a module or an optimizer of Flax NNX. Does not import Flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Module | nnx.Optimizer)


def flatten(value: Any, known: Flat | None = None) -> Flat:
    """Return the leaves of a pytree, or of the state of a Flax module.

    ``known``: an earlier result, whose paths are used again if the structure is the same.
    """
    module = None
    if is_module(value):
        from flax import nnx

        value, module = nnx.state(value), value
    leaves, structure = jax.tree.flatten(value)
    if known is not None and known.structure == structure:
        return Flat(structure, known.paths, leaves, module)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
    return Flat(structure, _names(paths), leaves, module)


def _names(paths: Sequence[Any]) -> tuple[str, ...]:
    short = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path in paths)
    if len({*short}) == len(short):
        return short
    return tuple(map(jax.tree_util.keystr, paths))  # keys that contain dots


def first_difference(
    before: tuple[Sequence[str], Sequence[Leaf]], now: tuple[Sequence[str], Sequence[Leaf]]
) -> tuple[str, str, str] | None:
    """Return the path of the first leaf in which two layouts differ, and its description in both; None if they agree.

    Values that are neither arrays, numbers nor strings are not compared.
    """
    old, new = (dict(zip(*each, strict=True)) for each in (before, now))
    for path in {**old, **new}:
        one, other = (str(each[path]) if path in each else "absent" for each in (old, new))
        if one != other:
            return path, one, other
    return None
