"""Bridge between TensorFlow and torch tensors, for eager mode, ``tf.function`` and graphs.

On the CPU, inputs are views of TensorFlow's memory, and large results are passed to TensorFlow without a copy. Small
tensors are copied in eager mode. In a graph, threads of TensorFlow wait for other ranks only briefly: see
`graphs.async_op`. On a GPU all tensors are copied through host memory.

XLA cannot call Python, so functions that use this module cannot be compiled with ``jit_compile=True``.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
import torch.utils.dlpack

from elastic.api.arrays import to_numpy, to_torch, value_of
from elastic.negotiation import submission
from elastic.negotiation.completion_callbacks import Completions
from elastic.rendezvous import worker_settings
from elastic.tensorflow.graphs import async_op, error_classes

Compute = Callable[[list[torch.Tensor]], "Sequence[torch.Tensor] | InFlight"]

# Disables AutoGraph for nested functions, which run each time a graph runs. Conversion would take milliseconds.
as_written: Any = tf.autograph.experimental.do_not_convert

LARGE = 1 << 20  # minimum size in bytes for which a view is cheaper than a copy
# maximum number of errors to keep until `original` retrieves them
KEPT = 64

_raised: OrderedDict[int, BaseException] = OrderedDict()
_numbers = itertools.count(1)
_completions = Completions()

worker_settings.keep_tensors()
async_op.available()  # registers the operation, so that saved graphs that contain it can be loaded


class InFlight:
    """Submitted collective. ``results`` converts the collective's result to the results of `call`."""

    def __init__(
        self, handle: int, results: Callable[[Any], Sequence[torch.Tensor]] = list
    ) -> None:
        self.handle = handle
        self._results = results

    def finish(self) -> Sequence[torch.Tensor]:
        """Wait for the collective, and return the results of `call`."""
        return self._results(submission.synchronize(self.handle))


@as_written
def call(
    compute: Compute,
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
    dtypes: Sequence[tf.DType] | None = None,
    name: str = "elastic",
    *,
    blocks: bool = False,
) -> list[tf.Tensor]:
    """Call ``compute`` with these tensors: immediately in eager mode, otherwise each time the graph runs.

    ``compute`` takes and returns torch tensors on the CPU.

    Args:
        compute: function that returns the results, or an `InFlight`, for which no thread of TensorFlow waits.
        shapes: shapes of the results, as far as known.
        dtypes: dtypes of the results; by default the dtypes of ``tensors``.
        blocks: whether ``compute`` itself waits for other ranks. In a graph, it then runs in a separate thread.

    Raises:
        Exception: any error of ``compute``, converted by `error_classes.for_eager`. A graph raises an error of
            TensorFlow instead, from which `original` finds it.
    """
    if not tensors and dtypes is None:
        return []
    if tf.executing_eagerly():
        with error_classes.for_eager():
            return [_given(each) for each in _finished(compute([_view(t) for t in tensors]))]
    wanted = list(dtypes or [tensor.dtype for tensor in tensors])
    if async_op.available():
        results = async_op.add(functools.partial(_start, compute, blocks), tensors, wanted, name)
    else:
        results = _waiting(compute, tensors, wanted, name)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def _finished(made: Sequence[torch.Tensor] | InFlight) -> Sequence[torch.Tensor]:
    return made.finish() if isinstance(made, InFlight) else made


def _start(compute: Compute, blocks: bool, running: async_op.AsyncCall) -> None:
    def end(results: Callable[[], Sequence[torch.Tensor]]) -> None:
        try:
            found = list(results())
        except BaseException as error:
            running.fail(error_classes.code_of(error), _kept(error))
        else:
            running.succeed(found)

    def finish() -> Sequence[torch.Tensor]:
        return _finished(compute(running.inputs()))

    if blocks:
        threading.Thread(target=end, args=(finish,), name="elastic-call", daemon=True).start()
        return
    try:
        made = compute(running.inputs())
    except BaseException as error:
        running.fail(error_classes.code_of(error), _kept(error))
        return
    if isinstance(made, InFlight):
        _completions.when_over(made.handle, functools.partial(end, made.finish))
    else:
        running.succeed(list(made))


def _waiting(
    compute: Compute, tensors: Sequence[tf.Tensor], wanted: list[tf.DType], name: str
) -> list[tf.Tensor]:
    """Run ``compute`` in ``tf.numpy_function``, which blocks a thread of TensorFlow's pool.

    This is the fallback if TensorFlow does not support `async_op`.
    """

    def run(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        try:
            found = _finished(compute([to_torch(np.asarray(array)) for array in arrays]))
            return [to_numpy(each) for each in found]
        except BaseException as error:
            # Raise without a cause, because TensorFlow would log it each time. `original` returns the complete error.
            raise error_classes.for_numpy_function(error)(_kept(error)) from None

    made = tf.numpy_function(run, list(tensors), wanted, stateful=True, name=name)
    return list(made) if isinstance(made, list | tuple) else [made]


def _view(tensor: tf.Tensor) -> torch.Tensor:
    size = tensor.shape.num_elements() * tensor.dtype.size
    if size < LARGE or not tensor.dtype.is_floating or "CPU" not in tensor.backing_device:
        return value_of(tensor)
    return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def _given(result: torch.Tensor) -> tf.Tensor:
    if result.nbytes < LARGE or not result.is_floating_point():
        return tf.convert_to_tensor(to_numpy(result))
    return tf.experimental.dlpack.from_dlpack(result.contiguous().__dlpack__())


@as_written
def asked(answer: Callable[[], int], name: str, *, blocks: bool = False) -> tf.Tensor:
    """Return an int32 tensor that is computed each time the graph runs, because a graph outlives a world.

    Args:
        answer: function that computes the value.
        name: name of the operation.
        blocks: whether ``answer`` waits for other ranks; see `call`.
    """

    def compute(_: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor(int(answer()), dtype=torch.int32, device="cpu")]

    return call(compute, [], [tf.TensorShape([])], [tf.int32], name, blocks=blocks)[0]


def named(kind: str, name: str | None) -> str | None:
    """Return the name by which ranks match a collective, or None if they match it by order.

    Unnamed collectives are matched by order, since a ``tf.function`` runs operations with side effects in the order in
    which they were written. A TensorFlow 1 graph runs any operation that is ready, so there the name is derived from
    the place in the graph, which is the same on all ranks.
    """
    if name is not None or tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    return None if graph.building_function else str(graph.unique_name(f"elastic_{kind}"))


def original(error: tf.errors.OpError) -> BaseException | None:
    """Return the error of a collective that TensorFlow reported as ``error``, or None for any other error."""
    message = str(error)
    for number in reversed(_raised):
        if _mark(number) in message:
            return _raised.pop(number)
    return None


def _kept(error: BaseException) -> str:
    """Store the error. Return a message for TensorFlow's error, by which `original` finds the stored error."""
    return f"{type(error).__name__}: {error} {_keep(error)}"


def _keep(error: BaseException) -> str:
    number = next(_numbers)
    _raised[number] = error
    while len(_raised) > KEPT:
        _raised.popitem(last=False)
    return _mark(number)


def _mark(number: int) -> str:
    return f"(error {number} of this process)"
