"""Limit on the last steps of an epoch that is resumed in the middle, with Keras's ``steps_per_execution``.

Keras executes the same number of steps in each call until the data ends, and a data set may yield all batches of an
epoch even if some were completed before. The last call is therefore limited to the batches left in the epoch.
"""

from __future__ import annotations

import itertools
from typing import Any

from elastic.api.keras_version import LEGACY, keras
from elastic.keras import backends


def limit(model: keras.Model, left: int) -> None:
    """Limit the next call of the training step to the ``left`` batches of the epoch."""
    own: Any = model._steps_per_execution if LEGACY else model.steps_per_execution
    at_once = int(own)
    if not 0 < left < at_once:
        return
    step = model.train_function

    def fewer(*args: Any) -> Any:
        model.train_function = step
        if not LEGACY:
            return step(*args[:-1], _first(args[-1], left))
        own.assign(left)  # The step of legacy Keras reads this value.
        try:
            return step(*args)
        finally:
            own.assign(at_once)

    model.train_function = fewer


def _first(batches: Any, number: int) -> Any:
    first = itertools.islice(batches, number)
    if backends.backend() != "tensorflow":
        return first
    import tensorflow as tf

    taken = list(first)
    spec = batches.element_spec
    return iter(tf.data.Dataset.from_generator(lambda: iter(taken), output_signature=spec))
