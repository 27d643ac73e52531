"""``tf.GradientTape`` whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from elastic.errors import Invalid
from elastic.negotiation.process_sets import ProcessSet, global_process_set
from elastic.optimizer import framework_options
from elastic.tensorflow import gradients
from elastic.tensorflow.compression import Compression
from elastic.tensorflow.ops import Average


class DistributedTape:
    """Mixin that reduces the gradients of a tape."""

    _options: framework_options.GradientOptions
    _local_sources: dict[int, Any]  # by ID, which is stable while the objects are referenced here

    def register_local_source(self, source: tf.Variable) -> None:
        """Exclude the gradient of a variable that is local to this rank from the reduction."""
        own = _own(source)
        self._local_sources[id(own)] = own

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Compute gradients like ``tf.GradientTape.gradient``, and reduce them over all ranks.

        Args:
            target, sources, output_gradients, unconnected_gradients: see ``tf.GradientTape.gradient``.

        Returns:
            The reduced gradients, in the structure of ``sources``.

        Raises:
            PeerLost: a worker was lost.
        """
        found = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        flat = tf.nest.flatten(found)
        local = [id(_own(each)) in self._local_sources for each in tf.nest.flatten(sources)]
        reduced = gradients.reduce(flat, self._options, local)
        return tf.nest.pack_sequence_as(found, reduced)


_classes: dict[type, type] = {}


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a tape so that ``gradient()`` returns gradients reduced over all ranks, in one call for all sources.

    Args:
        gradtape: a ``tf.GradientTape``, before or after its ``with`` block.
        compression, sparse_as_dense, op, gradient_predivide_factor, process_set, scale_local_gradients: see
            `elastic.optimizer.framework_options.GradientOptions`.
        num_groups, groups: ignored, since all gradients are reduced together.
        device_dense, device_sparse: ignored.

    Raises:
        Invalid: (a ValueError) an argument is invalid.

    Example::

        with tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise Invalid(f"{type(gradtape).__name__} is not a tf.GradientTape: pass a tf.GradientTape")
    if isinstance(gradtape, DistributedTape):
        raise Invalid("this tape is already a DistributedGradientTape: wrap a tape only once")
    options = framework_options.checked(
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        num_groups or groups,
        process_set,
        scale_local_gradients,
    )
    kind = type(gradtape)
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (DistributedTape, kind), {})
    tape: Any = object.__new__(_classes[kind])
    tape.__dict__.update(gradtape.__dict__)
    tape._options = options
    tape._local_sources = {}
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a tape like `DistributedGradientTape`, but do not reduce the gradients of local layers.

    Args:
        local_layers: a Keras layer, or a list of layers, whose variables belong to this rank.

    Other arguments and errors are those of `DistributedGradientTape`.
    """
    given = dict(locals())
    del given["local_layers"]
    tape = DistributedGradientTape(**given)
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape


def local_variables(local_layers: Any) -> list[Any]:
    """Return the trainable variables of one layer or several. Raises Invalid for other objects."""
    if local_layers is None:
        return []
    layers = list(local_layers) if isinstance(local_layers, Iterable) else [local_layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise Invalid(
                f"local_layers contains a {type(layer).__name__}, which is not a Keras layer: pass one Keras layer, or"
                " a list of them"
            )
    return [each for layer in layers for each in layer.trainable_weights]


def _own(variable: Any) -> Any:
    held = getattr(variable, "value", None)
    return variable if held is None or callable(held) else held
