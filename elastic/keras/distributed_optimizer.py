"""``hvd.DistributedOptimizer`` for Keras, and loading of models with it."""

from __future__ import annotations

from typing import Any

from elastic.api.compression import Compression as TorchCompression
from elastic.api.keras_version import LEGACY, keras
from elastic.api.ops import Average
from elastic.errors import Invalid
from elastic.keras import (
    backends,
    observed_steps,  # noqa: F401  script checks see its optimizers' steps
)
from elastic.keras import keras3_optimizer as reducing
from elastic.negotiation.process_sets import ProcessSet, global_process_set
from elastic.optimizer import framework_options


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = TorchCompression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer reduce gradients over all ranks before it applies them, and return it.

    All gradients of a step are reduced in one call. A model saved with it is an ordinary Keras model, which can be
    loaded without Horovod. `load_model` makes its optimizer distributed again.

    Args:
        optimizer: optimizer of Keras 3, on TensorFlow, torch or JAX; or of legacy Keras if TF_USE_LEGACY_KERAS is set.
        compression: ``hvd.Compression.none``, ``fp16``, ``bf16``, or a class with ``compress`` and ``decompress``.
        sparse_as_dense: whether to reduce sparse gradients as dense tensors on TensorFlow. Other backends always
            convert them.
        gradient_predivide_factor: Average divides gradients by this factor before the sum and multiplies by it
            afterwards.
        op: Average, Sum or Adasum.
        backward_passes_per_step: number of steps whose gradients are accumulated on each rank before they are reduced
            and applied: Keras's own ``gradient_accumulation_steps``.
        average_aggregated_gradients: whether to divide accumulated gradients by their number.
        num_groups, groups, name: ignored, since all gradients are reduced together.
        process_set: the ranks among which gradients are reduced. On all other ranks, gradients are not reduced.
        scale_local_gradients: whether to divide gradients of local variables by the number of ranks.
        device_dense, device_sparse: ignored.

    Raises:
        Invalid: (a ValueError) an argument is invalid.

    Example::

        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
        model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
    """
    reducing.check(optimizer)
    options = framework_options.checked(
        op,
        _of_backend(compression),
        sparse_as_dense,
        gradient_predivide_factor,
        num_groups or groups,
        process_set,
        scale_local_gradients,
    )
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise Invalid(
            f"backward_passes_per_step is {backward_passes_per_step!r}: pass a number of 1 or more"
        )
    inner = reducing.inside(optimizer)
    if LEGACY:
        from elastic.keras import legacy_optimizer

        reducing.leave_xla_out()
        legacy_optimizer.distribute(
            inner, options, backward_passes_per_step, average_aggregated_gradients
        )
        return optimizer
    if backward_passes_per_step > 1 and inner.built:
        raise Invalid(
            "backward_passes_per_step requires a new optimizer, but this optimizer was already used: wrap a new"
            " optimizer"
        )
    factor = 1
    if backward_passes_per_step > 1:
        inner.gradient_accumulation_steps = backward_passes_per_step
        factor = 1 if average_aggregated_gradients else backward_passes_per_step
    return reducing.distribute(optimizer, options, factor)


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """Make a Keras optimizer distributed, but do not reduce the gradients of local layers.

    Args:
        optimizer, args, kwargs: arguments of `DistributedOptimizer`.
        local_layers: a Keras layer, or a list of layers, whose variables belong to this rank.

    Returns:
        The distributed optimizer.

    Raises:
        Invalid: ``local_layers`` contains an object that is not a Keras layer, or another argument is invalid.
    """
    made = DistributedOptimizer(optimizer, *args, **kwargs)
    layers = [] if local_layers is None else local_layers
    for layer in layers if isinstance(layers, list | tuple | set) else [layers]:
        if not isinstance(layer, keras.layers.Layer):
            raise Invalid(
                f"local_layers contains a {type(layer).__name__}, which is not a Keras layer: pass one Keras layer, or"
                " a list of them"
            )
        for variable in layer.trainable_weights:
            reducing.inside(made).register_local_var(variable)
    return made


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = TorchCompression.none,
) -> Any:
    """Load a saved Keras model and make its optimizer distributed, keeping its state.

    Args:
        filepath: path of a ``.keras`` or ``.h5`` file.
        custom_optimizers: a list of custom optimizer classes.
        custom_objects: as for ``keras.models.load_model``.
        compression: as for `DistributedOptimizer`.
    """
    objects = {each.__name__: each for each in custom_optimizers or []} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _of_backend(compression: Any) -> Any:
    """Return the equivalent of ``compression`` for tensors of Keras's backend."""
    own: Any = TorchCompression
    if backends.backend() == "tensorflow":
        from elastic.tensorflow.compression import TensorFlowCompression

        own = TensorFlowCompression
    if compression is None:
        return own.none
    for name in ("none", "fp16", "bf16"):
        if compression is getattr(TorchCompression, name):
            return getattr(own, name)
    return compression
