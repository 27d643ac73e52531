"""The first training step of a worker that joins: TensorFlow takes far longer to trace and plan it than to run it.

A worker that trains says of what its batches consist, shapes and dtypes, through the driver (`StepInput`). One that
joins traces the step for such batches before it says that it is ready, so that nobody waits for that. Batches that are
of another kind after all are traced when they come, as ever. For Keras 3 on TensorFlow, and models of a state.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from elastic.api.which_keras import LEGACY, keras
from elastic.keras import tensors
from elastic.protocol.messages import STEP_INPUT_LIMIT
from elastic.runtime import lifecycle

log = logging.getLogger("elastic")
_watched: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def watch(model: keras.Model) -> None:
    """From now on this worker says what the model is trained on."""
    if not LEGACY and tensors.backend() == "tensorflow":
        _watched.add(model)
        _tell_by_train_function()


def prepare(model: keras.Model, step_input: bytes) -> None:
    """Traces the training step for batches of this kind. Nothing of it is run."""
    if model not in _watched or not step_input or model.run_eagerly or not model.compiled:
        return
    import tensorflow as tf

    try:
        kind = tf.data.DatasetSpec.experimental_type_proto()
        spec = tf.data.DatasetSpec.experimental_from_proto(kind.FromString(step_input)).element_spec
        none = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)
        model.make_train_function()
        step = _of_iterators(inspect.unwrap(model.train_function))
        if step is not None:
            step.get_concrete_function(iter(none))
    # Whatever a script's train_step raises: it will again, at the first batch.
    except Exception as error:
        log.debug(
            "the training step could not be traced ahead: %s: %s", type(error).__name__, error
        )


def _of_iterators(train_function: Any) -> Any:
    """The ``tf.function`` that Keras 3.15 calls with an iterator over batches; None of a Keras that does otherwise."""
    cells = getattr(train_function, "__closure__", None) or ()
    for name, cell in zip(train_function.__code__.co_freevars, cells, strict=True):
        if name == "multi_step_on_iterator":
            return cell.cell_contents
    return None


@functools.cache
def _tell_by_train_function() -> None:
    make = keras.Model.make_train_function

    @functools.wraps(make)
    def made(model: Any, force: bool = False) -> Any:
        before = model.train_function
        result = make(model, force)
        if model.train_function is not before and model in _watched:
            model.train_function = _telling(model.train_function)
        return result

    keras.Model.make_train_function = made


def _telling(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    told = False

    @functools.wraps(step)
    def telling(iterator: Any) -> Any:
        nonlocal told
        rt = lifecycle.active()
        if not told and rt is not None and rt.session.recovery.running:
            told = True  # once, also where it can't be said: this is called at every step
            rt.worlds.tell_step_input(_step_input(iterator))
        return step(iterator)

    return telling


def _step_input(iterator: Any) -> bytes:
    """Of what the batches consist. Empty where that can't be said."""
    import tensorflow as tf

    if not isinstance(iterator, tf.data.Iterator):
        return b""
    try:
        proto = tf.data.DatasetSpec(iterator.element_spec).experimental_as_proto()
    except (NotImplementedError, TypeError, ValueError):  # of a type that TensorFlow can't write
        return b""
    said: bytes = proto.SerializeToString(deterministic=True)
    return said if len(said) <= STEP_INPUT_LIMIT else b""
