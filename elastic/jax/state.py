"""States of scripts that train with JAX."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from elastic.api.arrays import to_numpy, to_torch
from elastic.errors import Invalid, StateMismatch, UnsupportedType
from elastic.jax import arrays, pytrees, unsupported_modes
from elastic.jax.pytrees import Flat, Leaf, Tree
from elastic.state import handler_registry
from elastic.state.handled_state import HandledState
from elastic.state.handlers.part import Part


class TreePart(Part):
    """Handler of a `Tree` in a state.

    Arrays are committed as tensors, numbers and strings as values. All other leaves remain unchanged.
    """

    value: Tree
    _flat: Flat  # tree structure without leaves
    _leaves: tuple[Leaf, ...]

    def _adopt_value(self) -> None:
        flat = pytrees.flatten(self.value.value)
        self._flat, self._leaves = flat.without_leaves(), self._described(flat)

    def _described(self, flat: Flat) -> tuple[Leaf, ...]:
        """Describe the leaves of a flattened tree.

        Raises:
            Invalid: an array is on several devices, is traced, or is a torch tensor.
        """
        described = tuple(map(Leaf.of, flat.leaves))
        if described != getattr(self, "_leaves", None):
            for path, leaf in zip(flat.paths, flat.leaves, strict=True):
                if isinstance(leaf, jax.Array):
                    arrays.check_device(leaf, self._named(path))
                elif isinstance(leaf, torch.Tensor):
                    raise Invalid(
                        f"{self._named(path)} is a torch tensor in a JAX tree: convert it with jnp.asarray(), or"
                        " pass it to the state as a separate value"
                    )
        return described

    def _named(self, path: str) -> str:
        return f"{self.what}.{path}" if path else self.what

    def layout(self) -> list[str]:
        return [
            f"{self.name}.{path} {leaf}"
            for path, leaf in zip(self._flat.paths, self._leaves, strict=True)
        ]

    def seems_unchanged(self) -> bool:
        return False  # torch does not detect writes by JAX, so the value always counts as changed.

    def own(self) -> Any:
        # After an interrupted step, the live tree may have another layout than the committed one.
        return self._flat, self._leaves

    def pack(self) -> tuple[Any, dict[str, torch.Tensor]]:
        flat = self.look()
        self._flat = flat.without_leaves()
        return self._contents(flat)

    def check(self) -> None:
        self.look()

    def save(self) -> None:
        super().save()
        # After this returns, the script may donate its arrays, and JAX is not aware of copies that are in flight from a
        # GPU.
        self.snapshot.complete()

    def look(self) -> Flat:
        """Flatten the current tree and check its layout.

        Raises:
            Invalid: the tree has another layout than before, which a joining worker could not have, or an array was
                donated.
        """
        flat = pytrees.flatten(self.value.value, self._flat)
        leaves = self._described(flat)
        if flat.paths is not self._flat.paths or leaves != self._leaves:
            differs = pytrees.first_difference(
                (self._flat.paths, self._leaves), (flat.paths, leaves)
            )
            if differs is not None:
                path, before, now = differs
                raise Invalid(
                    f"{self._named(path)} was {before} when the state was created, but is {now} now. A joining"
                    " worker starts with the layout at creation. Create the state with trees of their final"
                    " layout"
                )
        for path, leaf in zip(flat.paths, flat.leaves, strict=True):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise Invalid(
                    f"{self._named(path)} was donated to a compiled function, so JAX has deleted it: assign the"
                    " function's result to the state before the commit"
                )
        self._leaves = leaves
        return flat

    def _contents(self, flat: Flat) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for path, leaf, described in zip(flat.paths, flat.leaves, self._leaves, strict=True):
            if described.shape is not None:
                try:
                    held = described.sharding is not None
                    tensors[path] = arrays.view(leaf) if held else to_torch(np.asarray(leaf))
                except UnsupportedType as error:
                    raise UnsupportedType(f"{self._named(path)}: {error}") from error
            elif described.kept is None:
                values[path] = leaf
        return {"values": values}, tensors

    def described(self, structure: Any, own: Any, tensors: dict[str, torch.Tensor]) -> Any:
        return {**tensors, **structure["values"]}

    def place(
        self, structure: Any, fresh: dict[str, torch.Tensor], own: Any, *, restoring: bool
    ) -> None:
        if restoring:
            flat, leaves = own
        else:
            flat, leaves = self._flat, self._leaves
        found = {**fresh, **structure["values"]}
        made = []
        for path, leaf in zip(flat.paths, leaves, strict=True):
            if leaf.shape is None and leaf.kept is not None:
                made.append(leaf.kept)
            elif path in found:
                made.append(_value(found[path], leaf))
            else:
                raise StateMismatch(
                    f"{self._named(path)} is missing from the state of the other workers or from the checkpoint:"
                    " run the same script on all workers"
                )
        self.value.value = flat.rebuild(made)

    def equal_everywhere(self, structure: Any) -> set[str] | None:
        return set()  # Empty, because values such as batch statistics may differ between workers.

    def bytes_to_come(self) -> int:
        _, tensors = self._contents(self.look())
        return sum(each.nbytes for each in tensors.values() if not each.is_cuda)


def _value(found: Any, leaf: Leaf) -> Any:
    if leaf.sharding is not None:
        return arrays.array_like(found, leaf.sharding, weak=leaf.weak, key=leaf.key)
    if leaf.shape is None:
        return found
    array = to_numpy(found)
    return array[()] if leaf.scalar else array


class JaxState(HandledState):
    """State of a script that trains with JAX: trees of arrays and other values, given by keyword.

    A tree is any pytree that contains a JAX array (dicts, lists, NamedTuples, optax states, Equinox modules), or that
    contains modules, optimizers, metrics or Rngs of Flax NNX. Assign the new tree in each step, as in ``state.params =
    params``. Flax objects are restored in place. Arrays, PRNG keys, numpy arrays, numbers and strings in a tree are
    committed, restored and sent to joining workers. Other leaves, such as functions, are left unchanged. All other
    values are copied, like those of an `elastic.ObjectState`.

    ``commit`` copies the arrays to host memory, so that they may be donated to compiled functions. ``restore`` makes
    new arrays with exactly the committed bits, on the same device.

    Args:
        rng: whether to commit and restore this worker's random generators (numpy, random, torch). JAX has no global
            generator, so keep PRNG keys in the state, also as ``rng=jax.random.key(0)``.
        **kwargs: the trees and other values, available as attributes.

    Raises:
        UnsupportedType: an array has a dtype that torch does not have (4-bit integers, strings).
        Invalid: an array is on several devices, was donated, is traced, or is a torch tensor; a value can't be copied.
            ``commit()`` raises it also if a tree has another layout than when the state was created, with the path of
            the first difference.
        NotElastic: ``jax.distributed`` is initialized.

    Example::

        state = elastic.jax.JaxState(params=params, opt_state=optimizer.init(params), step=0)
        state.params, state.opt_state = update(state.params, state.opt_state, batch)
        state.step += 1
        state.commit()  # a failure from here on restores this step
    """

    def __init__(self, *, rng: Any = False, **kwargs: Any) -> None:
        unsupported_modes.check_not_distributed()
        if not isinstance(rng, bool):
            kwargs, rng = {**kwargs, "rng": rng}, False
        values = {n: Tree(v) if pytrees.has_arrays(v) else v for n, v in kwargs.items()}
        super().__init__(values, rng)
        for name in (each for each, value in values.items() if isinstance(value, Tree)):
            # Removed from the attributes, so that `__getattr__` returns the tree instead of its holder.
            del self.__dict__[name]

    def _tree(self, name: str) -> TreePart | None:
        part = self.__dict__.get("_handlers", {}).get(name)
        return part if isinstance(part, TreePart) else None

    def __getattr__(self, name: str) -> Any:
        if (part := self._tree(name)) is not None:
            return part.value.value
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}: pass the value as a keyword"
            " argument when you create the state"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        part = self._tree(name)
        if part is None or isinstance(value, Tree):
            super().__setattr__(name, value)
        else:
            part.value.value = value


handler_registry.set_handler_registry([(Tree, TreePart), *handler_registry.get_handler_registry()])
