"""Local aggregation of the gradients of several backward passes, so that they are reduced once.

This module works eagerly, in a ``tf.function``, and in a graph of TensorFlow 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from elastic.errors import Invalid

Gradient = Any  # a tf.Tensor, tf.IndexedSlices or None


class GradientAggregation:
    """Aggregator that sums gradients over several passes and reduces the sums in the last pass of a step.

    Call `compute_gradients` and `apply_gradients` in each pass.

    Args:
        passes: number of passes per step.
        reduce: ``reduce(gradients, variables)`` returns the gradients reduced over the ranks, in the same order.
        sparse_as_dense: whether to sum IndexedSlices as dense tensors. Otherwise IndexedSlices are rejected.
        average: whether to divide the sum by ``passes``.

    Raises:
        Invalid: (a ValueError) ``passes`` is below 1.

    The sums are variables. In a graph of TensorFlow 1, they are local variables, which
    ``tf.compat.v1.local_variables_initializer()`` initializes.
    """

    def __init__(
        self,
        passes: int,
        reduce: Callable[[list[Gradient], Any], list[Gradient]],
        sparse_as_dense: bool,
        average: bool,
    ) -> None:
        if not isinstance(passes, int) or passes < 1:
            raise Invalid(f"backward_passes_per_step is {passes!r}: pass a number of 1 or more")
        self.backward_passes_per_step = passes
        self._reduce = reduce
        self._sparse_as_dense = sparse_as_dense
        self._average = average
        self.counter: tf.Variable | None = None  # number of passes summed so far
        # sums, keyed by the index of the gradient
        self.locally_aggregated_grads: dict[int, tf.Variable] = {}

    def build(self, like: Sequence[Any]) -> None:
        """Create the counter and the sums outside of any ``tf.function``, with the shapes and dtypes of ``like``.

        Without this call, the first `compute_gradients` creates them for the gradients that are not None.
        """
        if self.counter is not None:
            return
        with tf.init_scope():
            self.counter = _local(tf.zeros([], tf.int32), "aggregation_counter")
            self.locally_aggregated_grads = {
                place: _local(tf.zeros(each.shape, each.dtype), f"aggregated_{place}")
                for place, each in enumerate(like)
                if each is not None
            }

    def variables(self) -> list[tf.Variable]:
        """Return the variables created so far: the counter, then the sums."""
        made = [] if self.counter is None else [self.counter]
        return [*made, *self.locally_aggregated_grads.values()]

    def compute_gradients(self, grads: Sequence[Gradient], vars: Any) -> list[Gradient]:
        """Add gradients to the sums. Return the reduced sums in the last pass of a step, otherwise the input."""
        given = {place: self._dense(each) for place, each in enumerate(grads) if each is not None}
        if not given:
            return list(grads)
        self.build([given.get(place) for place in range(len(grads))])
        counter = self.counter
        assert counter is not None
        sums = self.locally_aggregated_grads
        added = [sums[place].assign_add(each) for place, each in given.items()]
        # TensorFlow 1 needs explicit control dependencies.
        with _after(added):
            counted = counter.assign_add(1)
        with _after([counted]):
            made = tf.cond(
                tf.equal(counter.read_value(), self.backward_passes_per_step),
                lambda: self._reduced(list(grads), list(given), vars),
                lambda: [tf.identity(each) for each in given.values()],
            )
        found: list[Gradient] = list(grads)
        for place, each in zip(given, made, strict=True):
            found[place] = each
        return found

    def apply_gradients(
        self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the closure in the last pass of a step. Call this method after `compute_gradients`.

        In other passes, only ``optimizer.iterations`` and ``kwargs["global_step"]`` are incremented, if they exist.
        """
        counter = self.counter
        if counter is None:
            return apply_grads_closure()
        counted = [getattr(optimizer, "iterations", None), kwargs.get("global_step")]

        def apply() -> tf.Tensor:
            with _after([apply_grads_closure()]):
                return tf.constant(True)

        def count() -> tf.Tensor:
            with _after([each.assign_add(1) for each in counted if each is not None]):
                return tf.constant(False)

        gradients = [each for each, _ in args[0] if each is not None] if args else []
        with _after(gradients):
            return tf.cond(tf.equal(counter.read_value(), 0), apply, count)

    def _reduced(self, grads: list[Gradient], places: list[int], vars: Any) -> list[tf.Tensor]:
        sums = [self.locally_aggregated_grads[place] for place in places]
        for place, total in zip(places, sums, strict=True):
            grads[place] = total.read_value()
        made = self._reduce(grads, vars)
        found = [made[place] for place in places]
        if self._average:
            found = [each / tf.cast(self.backward_passes_per_step, each.dtype) for each in found]
        assert self.counter is not None
        with _after(found):
            cleared = [total.assign(tf.zeros_like(total)) for total in sums]
            cleared.append(self.counter.assign(0))
        with _after(cleared):
            return [tf.identity(each) for each in found]

    def _dense(self, gradient: Gradient) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            raise Invalid(
                "tf.IndexedSlices can't be accumulated over several backward passes: use sparse_as_dense=True"
            )
        return tf.convert_to_tensor(gradient)


class LocalGradientAggregationHelper(GradientAggregation):
    """Variant of `GradientAggregation` with Horovod's arguments.

    ``rank`` and ``optimizer_type`` are ignored. So are ``process_set`` and ``scale_local_gradients``, because
    ``allreduce_func`` implements them.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Gradient], Any], list[Gradient]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int | None = None,
        optimizer_type: str | None = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(
            backward_passes_per_step, allreduce_func, sparse_as_dense, average_aggregated_gradients
        )


def _local(value: tf.Tensor, name: str) -> tf.Variable:
    local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(
        value, trainable=False, collections=local, name=name, use_resource=True
    )


def _after(operations: Sequence[Any]) -> Any:
    return tf.control_dependencies([each for each in operations if each is not None])
