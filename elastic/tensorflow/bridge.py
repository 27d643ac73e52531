"""TensorFlow's tensors as torch's and back, when TensorFlow runs eagerly and in a ``tf.function`` or graph. Knows no
collective.

On the CPU inputs are views of TensorFlow's memory, and it takes large results over as they are; where it runs eagerly
small tensors are copied. On a GPU all are copied over the host.
XLA can't call Python: what comes through here can't be compiled with ``jit_compile=True``.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
import torch.utils.dlpack

from elastic.api.arrays import to_numpy, to_torch, value_of
from elastic.rendezvous import environment

Compute = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

LARGE = 1 << 20  # bytes, from which a view is worth its price
KEPT = 64  # errors on their way through TensorFlow; each is taken once, or never

_raised: OrderedDict[int, BaseException] = OrderedDict()
_numbers = itertools.count(1)

environment.keep_tensors()


def call(
    compute: Compute,
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
    dtypes: Sequence[tf.DType] | None = None,
    name: str = "elastic",
) -> list[tf.Tensor]:
    """``compute`` of these tensors: now, or each time that the graph comes by. It takes and returns torch's on the CPU.

    ``shapes`` are those of the results, as far as they are known; ``dtypes`` are those of ``tensors`` by default.
    What ``compute`` raises is raised here, or, out of a graph, an error of TensorFlow's from which `original` finds it.
    """
    if not tensors and dtypes is None:
        return []
    if tf.executing_eagerly():
        return [_given(result) for result in compute([_view(tensor) for tensor in tensors])]

    def run(*arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        try:
            found = compute([to_torch(np.asarray(array)) for array in arrays])
            return [to_numpy(each) for each in found]
        except BaseException as error:
            # TensorFlow logs it, with its causes, each time; `original` has the whole of it.
            raise RuntimeError(f"{type(error).__name__}: {error} {_keep(error)}") from None

    wanted = list(dtypes or [tensor.dtype for tensor in tensors])
    made = tf.numpy_function(run, list(tensors), wanted, stateful=True, name=name)
    results: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def _view(tensor: tf.Tensor) -> torch.Tensor:
    size = tensor.shape.num_elements() * tensor.dtype.size
    if size < LARGE or not tensor.dtype.is_floating or "CPU" not in tensor.backing_device:
        return value_of(tensor)
    return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def _given(result: torch.Tensor) -> tf.Tensor:
    if result.nbytes < LARGE or not result.is_floating_point():
        return tf.convert_to_tensor(to_numpy(result))
    return tf.experimental.dlpack.from_dlpack(result.contiguous().__dlpack__())


def asked(answer: Callable[[], int], name: str) -> tf.Tensor:
    """An int32 that is asked for when it runs: a graph outlives a world."""

    def compute(_: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor(int(answer()), dtype=torch.int32, device="cpu")]

    return call(compute, [], [tf.TensorShape([])], [tf.int32], name)[0]


def named(kind: str, name: str | None) -> str | None:
    """What a collective is matched by. Without a name of its own it is matched by its order: a ``tf.function`` runs
    what has side effects in the order in which it was written. A graph of TensorFlow 1 runs whatever is ready, so there
    it is named after its place in the graph, which all ranks build alike. Each that runs occupies a thread until all
    ranks have come: as many as a session has (``inter_op_parallelism_threads``) may be under way at once.
    """
    if name is not None or tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    return None if graph.building_function else str(graph.unique_name(f"elastic_{kind}"))


def original(error: tf.errors.OpError) -> BaseException | None:
    """What was raised inside a graph, where this error of TensorFlow's is due to it; None if to something else."""
    message = str(error)
    for number in reversed(_raised):
        if _mark(number) in message:
            return _raised.pop(number)
    return None


def _keep(error: BaseException) -> str:
    number = next(_numbers)
    _raised[number] = error
    while len(_raised) > KEPT:
        _raised.popitem(last=False)
    return _mark(number)


def _mark(number: int) -> str:
    return f"(error {number} of this process)"
