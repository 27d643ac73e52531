"""Observer of the steps of scripts that train with JAX, for `elastic.script_checks`.

JAX has no optimizer whose steps can be observed, so each assignment to an attribute of a `JaxState` counts as a step of
this attribute. Arrays are immutable: a parameter was trained if the state holds a different array than at the start.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from elastic.jax import pytrees
from elastic.jax.pytrees import Tree
from elastic.jax.state import JaxState
from elastic.monitoring import moved_tensors
from elastic.runtime.live_objects import live_objects
from elastic.script_checks import step_sources
from elastic.script_checks.mistakes import Trained, UsedLoader
from elastic.state.state import State

METHOD = "__setattr__"
REMEDY = (
    "average the gradients with elastic.jax.allreduce(gradients), or wrap the optax optimizer in"
    " elastic.jax.distributed_gradients"
)
MEMBER = "JaxState(params=params, opt_state=opt_state, ...)"


class JaxSteps:
    """Observer of the steps of one training. Only the training thread uses it."""

    def __init__(self) -> None:
        self._stepped: Callable[[object], None] | None = None
        self._thread = 0
        self._own: Any = None  # original method of JaxState, which is wrapped
        # assigned attributes, each with an object that identifies it
        self._names: dict[str, object] = {}
        self._first: list[weakref.ref[jax.Array]] | None = None  # arrays before the first step

    def classes(self) -> list[type]:
        return []

    def meet(self, found: Iterable[Any]) -> None:
        pass

    def observe(self, stepped: Callable[[object], None], world: tuple[int, int]) -> None:
        self._stepped, self._thread = stepped, threading.get_ident()
        self._own = own = vars(JaxState)[METHOD]

        def assign(state: JaxState, name: str, value: Any) -> None:
            own(state, name, value)
            if not name.startswith("_"):
                self._assigned(state, name)

        setattr(JaxState, METHOD, assign)

    def forget(self) -> None:
        self._stepped = None
        if self._own is not None:
            setattr(JaxState, METHOD, self._own)
            self._own = None
        self._names.clear()
        self._first = None

    def _assigned(self, state: JaxState, name: str) -> None:
        if self._stepped is None or threading.get_ident() != self._thread:
            return
        if self._first is None:
            self._first = [weakref.ref(each) for each in _contents(state)[0]]
        self._stepped(self._names.setdefault(name, object()))

    # ---- results -----------------------------------------------------------------------------------------------------

    def optimizers(self, state: State) -> Iterator[Trained]:
        if self._first is None or not isinstance(state, JaxState):
            return
        held, has_momentum = _contents(state)
        before = {id(each) for ref in self._first if (each := ref()) is not None}
        trained = [each for each in held if id(each) not in before]
        shapes = {each.shape for each in held}
        reduced = {shape for shape in moved_tensors.shapes if math.prod(shape) > 1}
        # If arrays of the state were trained, other shapes are not a mistake: the script may reduce only metrics, or
        # packed gradients.
        outside = [] if trained else sorted(reduced - shapes)
        if len(outside) < len(reduced):
            outside = []
        if not trained and not outside:
            return
        momentum = "" if has_momentum else _live_momentum()
        yield Trained(
            momentum or "the script",
            in_state=not momentum,
            parameters=len(trained) or len(outside),
            uncovered=len(outside),
            example=f"one of shape {list(outside[0])}" if outside else "",
            smallest=min((each.size for each in trained if each.size > 1), default=0),
            member=MEMBER,
            remedy=REMEDY,
        )

    def loaders(self, state: State) -> Iterator[UsedLoader]:
        yield from ()


def _optax_states() -> list[type]:
    """Return the classes of optax states, which are NamedTuples. The result is empty if optax was not imported."""
    if "optax" not in sys.modules:
        return []
    return [
        each
        for each in tuple.__subclasses__()
        if each.__module__.partition(".")[0] == "optax" and each.__name__.endswith("State")
    ]


def _has_slots(value: Any) -> bool:
    """Return whether an optimizer state has arrays other than counts, such as momenta."""
    return any(len(getattr(leaf, "shape", ())) for leaf in jax.tree.leaves(value))


def _live_momentum() -> str:
    """Return the class name of an optimizer state with arrays that the script still holds, or an empty string."""
    kinds = _optax_states()
    if not kinds:
        return ""
    gc.collect()  # Frees objects that the script has dropped.
    found = next(filter(_has_slots, live_objects(*kinds)), None)
    return "" if found is None else f"optax's {type(found).__name__}"


def _contents(state: JaxState) -> tuple[list[jax.Array], bool]:
    """Return the arrays of floats in the trees of a state, and whether the trees contain an optimizer state.

    The arrays of optimizer states are not returned.
    """
    kinds = tuple(_optax_states())
    found: list[jax.Array] = []
    has_optimizer = False

    def is_leaf(value: Any) -> bool:
        return pytrees.is_module(value) or isinstance(value, kinds)

    for member in state.handled():
        value = member.value if isinstance(member, Tree) else member
        for leaf in jax.tree.leaves(value, is_leaf=is_leaf):
            if isinstance(leaf, kinds):
                has_optimizer |= _has_slots(leaf)
            elif pytrees.is_module(leaf):
                from flax import nnx

                for _, variable in nnx.to_flat_state(nnx.state(leaf)):
                    if isinstance(variable, nnx.OptState):
                        has_optimizer = True
                    else:
                        found += jax.tree.leaves(variable)
            else:
                found.append(leaf)
    arrays = [each for each in found if isinstance(each, jax.Array)]
    return [each for each in arrays if jnp.issubdtype(each.dtype, jnp.floating)], has_optimizer


step_sources.makers.append(JaxSteps)
