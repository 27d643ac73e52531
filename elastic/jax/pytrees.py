"""Flattening and rebuilding of pytrees and Flax modules, and descriptions of their leaves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from elastic.errors import Invalid
from elastic.jax import arrays
from elastic.state.handlers.python_values import ATOMS


class Tree:
    """Holder of a pytree, which allows a state to replace the whole tree."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class Leaf:
    """Description of a leaf, without its content.

    Args:
        dtype: dtype of an array, for example ``float32`` or ``key<fry>``; otherwise the name of the leaf's type.
        shape: shape of an array, otherwise None.
        sharding: sharding of a JAX array. None means a numpy array, or no array.
        weak: whether the dtype is weak.
        key: implementation of PRNG keys. None means that the leaf contains no keys.
        scalar: whether the leaf is a numpy scalar, whose shape is ``()``.
        kept: whether the leaf is of another kind than array, number or string, for example a function. It is never
            copied.
    """

    dtype: str
    shape: tuple[int, ...] | None = None
    sharding: Any = None
    weak: bool = False
    key: Any = None
    scalar: bool = False
    kept: Any = field(default=None, compare=False)

    @classmethod
    def of(cls, value: Any) -> Leaf:
        """Describe a leaf.

        Raises:
            Invalid: the leaf is an array in a function that JAX is tracing.
        """
        if arrays.is_traced(value):
            raise Invalid(
                "an array that JAX is tracing can't be part of a state: return the array from the function, and"
                " assign the result to the state"
            )
        if isinstance(value, jax.Array):
            key = jax.random.key_impl(value) if arrays.is_key(value) else None
            weak = key is None and value.weak_type
            return cls(str(value.dtype), value.shape, value.sharding, weak, key)
        if isinstance(value, np.ndarray):
            return cls(str(value.dtype), value.shape)
        if isinstance(value, np.number | np.bool_):
            return cls(str(value.dtype), (), scalar=True)
        kind = type(value)
        return cls(kind.__name__, kept=None if kind in ATOMS or kind is complex else value)

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Flat:
    """A flattened tree.

    Args:
        structure: structure of the tree, in which each Flax module is replaced by its state.
        paths: paths of the leaves, such as ``layers.0.kernel``, all different.
        leaves: values of the leaves.
        modules: the Flax modules in the tree, by their index among the leaves of ``outer``.
        outer: the structure of the value, whose Flax modules are leaves.
    """

    structure: Any
    paths: tuple[str, ...]
    leaves: list[Any]
    modules: dict[int, Any] = field(default_factory=dict)
    outer: Any = None

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the value with its leaves replaced. Flax modules are updated in place."""
        tree = jax.tree.unflatten(self.structure, leaves)
        if not self.modules:
            return tree
        from flax import nnx

        parts = self.outer.flatten_up_to(tree)
        for index, module in self.modules.items():
            nnx.update(module, parts[index])
            parts[index] = module
        return jax.tree.unflatten(self.outer, parts)

    def without_leaves(self) -> Flat:
        """Return the tree without its leaves, so that no array is kept in memory."""
        return replace(self, leaves=[])


def has_arrays(value: Any) -> bool:
    """Return whether a value is a tree that contains a JAX array or a Flax module."""
    try:
        leaves = jax.tree.leaves(value, is_leaf=is_module)
    # If the keys of a dictionary cannot be sorted, JAX does not accept it as a tree.
    except ValueError:
        return False
    return any(isinstance(leaf, jax.Array) or is_module(leaf) for leaf in leaves)


def is_module(value: Any) -> bool:
    """Return whether the value is a module, optimizer, metric or Rngs of Flax NNX.

    This function does not import Flax.
    """
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


def flatten(value: Any, known: Flat | None = None) -> Flat:
    """Flatten a pytree. The leaves of a Flax module are the leaves of its state.

    Args:
        known: an earlier result. Its paths are reused if the structure is the same.
    """
    if known is not None and not known.modules:
        leaves, structure = jax.tree.flatten(value)
        if known.structure == structure:
            return Flat(structure, known.paths, leaves)
    parts, outer = jax.tree.flatten(value, is_leaf=is_module)
    modules = {index: part for index, part in enumerate(parts) if is_module(part)}
    if modules:
        from flax import nnx

        for index, module in modules.items():
            parts[index] = nnx.state(module)
        value = jax.tree.unflatten(outer, parts)
    leaves, structure = jax.tree.flatten(value)
    if known is not None and known.structure == structure:
        return Flat(structure, known.paths, leaves, modules, outer)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
    return Flat(structure, _names(paths), leaves, modules, outer)


def _names(paths: Sequence[Any]) -> tuple[str, ...]:
    short = tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path in paths)
    if len({*short}) == len(short):
        return short
    # Quoted, because a path with a key that contains dots would be ambiguous.
    return tuple(map(jax.tree_util.keystr, paths))


def first_difference(
    before: tuple[Sequence[str], Sequence[Leaf]], now: tuple[Sequence[str], Sequence[Leaf]]
) -> tuple[str, str, str] | None:
    """Compare two layouts. Return the path and both descriptions of the first leaf that differs, or None.

    Leaves other than arrays, numbers and strings are not compared.
    """
    old, new = (dict(zip(*each, strict=True)) for each in (before, now))
    for path in {**old, **new}:
        one, other = (str(each[path]) if path in each else "absent" for each in (old, new))
        if one != other:
            return path, one, other
    return None
