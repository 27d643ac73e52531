"""Tracing of the training step on a joining worker before its first step.

In TensorFlow, tracing is much slower than running the step. A training worker therefore sends the shapes and dtypes of
its batches through the driver (`StepInput`). A joining worker traces the step for such batches before it reports ready,
so that no worker waits for it. Batches of other shapes are traced when they arrive, as usual. Only Keras 3 on
TensorFlow is supported, and only models in a state.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from elastic.api.keras_version import LEGACY, keras
from elastic.keras import backends
from elastic.protocol.messages import STEP_INPUT_LIMIT
from elastic.runtime import lifecycle

log = logging.getLogger("elastic")
_watched: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def watch(model: keras.Model) -> None:
    """Report the shapes and dtypes of the batches on which the model is trained."""
    if not LEGACY and backends.backend() == "tensorflow":
        _watched.add(model)
        _trace_by_train_function()


def prepare(model: keras.Model, step_input: bytes) -> None:
    """Trace the training step for batches with the given shapes and dtypes, without running it."""
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
    # An error in a script's train_step will recur at the first batch and is reported then.
    except Exception as error:
        log.debug(
            "the training step was not traced before the first batch: %s: %s",
            type(error).__name__,
            error,
        )


def _of_iterators(train_function: Any) -> Any:
    cells = getattr(train_function, "__closure__", None) or ()
    for name, cell in zip(train_function.__code__.co_freevars, cells, strict=True):
        if name == "multi_step_on_iterator":
            return cell.cell_contents
    return None


@functools.cache
def _trace_by_train_function() -> None:
    make = keras.Model.make_train_function

    @functools.wraps(make)
    def made(model: Any, force: bool = False) -> Any:
        before = model.train_function
        result = make(model, force)
        if model.train_function is not before and model in _watched:
            model.train_function = _reporting(model.train_function)
        return result

    keras.Model.make_train_function = made


def _reporting(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    sent = False

    @functools.wraps(step)
    def reporting(iterator: Any) -> Any:
        nonlocal sent
        rt = lifecycle.active()
        if not sent and rt is not None and rt.session.recovery.running:
            # The message is sent only once, even if sending fails, because this function is called at every step.
            sent = True
            rt.worlds.report_step_input(_step_input(iterator))
        return step(iterator)

    return reporting


def _step_input(iterator: Any) -> bytes:
    """Return the serialized element spec of the batches. The result is empty if they cannot be serialized."""
    import tensorflow as tf

    if not isinstance(iterator, tf.data.Iterator):
        return b""
    try:
        proto = tf.data.DatasetSpec(iterator.element_spec).experimental_as_proto()
    except (NotImplementedError, TypeError, ValueError):  # TensorFlow cannot serialize this type.
        return b""
    spec: bytes = proto.SerializeToString(deterministic=True)
    return spec if len(spec) <= STEP_INPUT_LIMIT else b""
