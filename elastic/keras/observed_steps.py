"""Observer of the steps of Keras optimizers, in ``fit`` and in custom loops, for `elastic.script_checks`.

While a script is checked, three methods are wrapped. An optimizer's ``apply`` runs in each step in eager mode, but only
once in a graph, during tracing. After the call of a ``tf.function``, the optimizers that have stepped are therefore
recognized by their increased step counts. On JAX, the end of a batch in ``fit`` is observed.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from elastic.api import arrays
from elastic.api.keras_version import LEGACY, keras
from elastic.keras import backends
from elastic.keras import keras3_optimizer as reducing
from elastic.runtime.live_objects import live_objects
from elastic.script_checks import step_sources
from elastic.script_checks.mistakes import Trained, UsedLoader
from elastic.state.state import State

APPLY = "apply_gradients" if LEGACY else "apply"


class KerasSteps:
    """Observer of the steps of one training. Only the training thread uses it."""

    def __init__(self) -> None:
        self._stepped: Callable[[object], None] | None = None
        self._thread = 0
        self._world = (0, 1)
        # step counts by optimizer; None if the optimizer's graph has not run yet
        self._known: dict[int, tuple[Any, int | None]] = {}
        self._used: dict[int, Any] = {}  # optimizers that have made a step
        # variables that legacy optimizers have updated, by ID of the optimizer
        self._applied_to: dict[int, list[Any]] = {}
        self._wrapped: list[tuple[type, str, Any]] = []
        # objects that were created before the training
        self._met_optimizers: list[weakref.ref[Any]] = []
        self._sharded: list[weakref.ref[Any]] = []  # data sets that are divided among the ranks
        self._windows = 0

    def classes(self) -> list[type]:
        return [*reducing.kinds(), *_of_tensorflow("shard_op", "_ShardDataset")]

    def meet(self, found: Iterable[Any]) -> None:
        for each in found:
            if reducing.is_optimizer(each):
                self._met_optimizers.append(weakref.ref(each))
            elif isinstance(each, tuple(_of_tensorflow("shard_op", "_ShardDataset"))):
                self._sharded.append(weakref.ref(each))

    def observe(self, stepped: Callable[[object], None], world: tuple[int, int]) -> None:
        self._stepped, self._thread, self._world = stepped, threading.get_ident(), world
        self._windows += 1
        for ref in self._met_optimizers:
            if (each := ref()) is not None:
                self._known[id(each)] = each, _steps_of(each)
        for kind in _owners():
            self._wrap(kind, APPLY, self._apply)
        if backends.backend() == "jax":
            self._wrap(keras.callbacks.CallbackList, "on_train_batch_end", self._end_batch)
        if backends.backend() == "tensorflow":
            import tensorflow as tf

            self._wrap(type(tf.function(lambda: None)), "__call__", self._call)

    def forget(self) -> None:
        self._stepped = None
        for kind, name, own in self._wrapped:
            setattr(kind, name, own)
        self._wrapped.clear()
        self._known.clear()
        self._used.clear()
        self._applied_to.clear()

    # ---- hooks in each step ------------------------------------------------------------------------------------------

    def _wrap(self, kind: type, name: str, around: Callable[..., Any]) -> None:
        own: Any = vars(kind)[name]

        @functools.wraps(own)
        def wrapper(this: Any, *args: Any, **kwargs: Any) -> Any:
            return around(own, this, args, kwargs)

        if backends.backend() == "tensorflow":
            import tensorflow as tf

            wrapper = tf.autograph.experimental.do_not_convert(wrapper)
        self._wrapped.append((kind, name, own))
        setattr(kind, name, wrapper)

    def _observes(self) -> bool:
        return self._stepped is not None and threading.get_ident() == self._thread

    def _apply(self, own: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if LEGACY and args:
            args = [list(args[0]), *args[1:]]
        made = own(optimizer, *args, **kwargs)
        if self._observes():
            if LEGACY and args:
                self._applied_to[id(optimizer)] = [variable for _, variable in args[0]]
            if _in_graph():
                _, steps = self._known.get(id(optimizer), (optimizer, None))
                self._known[id(optimizer)] = optimizer, steps
            else:
                self._known[id(optimizer)] = optimizer, _steps_of(optimizer)
                self._step(optimizer)
        return made

    def _call(self, own: Any, function: Any, args: Any, kwargs: Any) -> Any:
        made = own(function, *args, **kwargs)
        if self._observes() and not _in_graph():
            for key, (optimizer, before) in [*self._known.items()]:
                steps = _steps_of(optimizer)
                self._known[key] = optimizer, steps
                for _ in range(1 if before is None else steps - before):
                    self._step(optimizer)
        return made

    def _end_batch(self, own: Any, callbacks: Any, args: Any, kwargs: Any) -> Any:
        made = own(callbacks, *args, **kwargs)
        if self._observes():
            self._step(callbacks.model.optimizer)
        return made

    def _step(self, optimizer: Any) -> None:
        if self._stepped is not None:
            self._used[id(optimizer)] = optimizer
            self._stepped(optimizer)

    # ---- results -----------------------------------------------------------------------------------------------------

    def optimizers(self, state: State) -> Iterator[Trained]:
        handled = state.handled()
        member = "KerasState(model, optimizer, ...)"
        if any(isinstance(each, list) for each in handled):
            member = "TensorFlowState([*model.variables, *optimizer.variables], ...)"
        inside = {id(reducing.inside(each)) for each in handled if reducing.is_optimizer(each)}
        covered = {id(backends.held(each)) for of in handled for each in _variables(of)}
        for optimizer in self._used.values():
            trained = self._trained(optimizer)
            missing = [each for each in trained if id(backends.held(each)) not in covered]
            # Ignore scalars, such as step counts and the learning rate: the state of a trained variable is not a
            # scalar.
            slots = [each for each in reducing.variables_of(optimizer) if len(each.shape)]
            held = all(id(backends.held(each)) in covered for each in slots)
            yield Trained(
                type(optimizer).__name__,
                in_state=held or id(reducing.inside(optimizer)) in inside,
                parameters=len(trained),
                uncovered=len(missing),
                example=str(getattr(missing[0], "path", missing[0].name)) if missing else "",
                smallest=min((n for n in map(_elements, trained) if n > 1), default=0),
                member=member,
            )

    def _trained(self, optimizer: Any) -> list[Any]:
        inner = reducing.inside(optimizer)
        kept: Any = getattr(inner, "_trainable_variables", ())
        return list(self._applied_to.get(id(optimizer)) or kept)

    def loaders(self, state: State) -> Iterator[UsedLoader]:
        # A reset callback may recreate the data set. Whether it does is known only after the first recovery.
        recovered = self._windows > 1
        before = {id(each) for ref in self._sharded if (each := ref()) is not None}
        if not before or self._world[1] == 1 or (state.calls_back() and not recovered):
            return
        for iterator in live_objects(*_of_tensorflow("iterator_ops", "OwnedIterator")):
            for each in _lineage(getattr(iterator, "_dataset", None)):
                kept = _place_of(each) if id(each) in before else None
                if kept is not None and (kept == self._world) != recovered:
                    yield UsedLoader(
                        "Dataset",
                        in_state=False,
                        keeps_position=True,
                        sampler="tf.data.Dataset.shard()",
                        kept=f"index={kept[0]}, num_shards={kept[1]}",
                        remedy="call shard(hvd.size(), hvd.rank()) in the training function",
                    )
                    return


def _owners() -> list[type]:
    return list({next(k for k in kind.__mro__ if APPLY in vars(k)) for kind in reducing.kinds()})


def _in_graph() -> bool:
    """Return whether this call only traces a graph."""
    if backends.backend() == "tensorflow":
        import tensorflow as tf

        return not tf.executing_eagerly()
    return backends.backend() == "jax"  # Steps of JAX do not store their counts in variables.


def _steps_of(optimizer: Any) -> int:
    counted = getattr(reducing.inside(optimizer), "iterations", None)
    return 0 if counted is None else int(arrays.value_of(counted))


def _variables(value: Any) -> Sequence[Any]:
    if isinstance(value, keras.Model):
        return list(value.weights)
    if reducing.is_optimizer(value):
        return reducing.variables_of(value)
    return value if isinstance(value, list) else ()


def _elements(variable: Any) -> int:
    return math.prod(variable.shape)


def _of_tensorflow(module: str, name: str) -> list[type]:
    """Return a list with the given TensorFlow data set class, or an empty list if its module was not imported."""
    found = getattr(sys.modules.get(f"tensorflow.python.data.ops.{module}"), name, None)
    return [found] if isinstance(found, type) else []


def _lineage(dataset: Any) -> Iterator[Any]:
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        inputs = getattr(each, "_inputs", None)
        if inputs is not None:
            yield each
            waiting += inputs()


def _place_of(shard: Any) -> tuple[int, int] | None:
    index: Any = getattr(shard, "_index", None)
    number: Any = getattr(shard, "_num_shards", None)
    if not hasattr(index, "numpy") or not hasattr(number, "numpy"):
        return None
    return int(index.numpy()), int(number.numpy())


step_sources.makers.append(KerasSteps)
