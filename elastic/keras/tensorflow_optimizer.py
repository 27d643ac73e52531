"""``hvd.DistributedOptimizer`` for TensorFlow: wraps Keras optimizers and TensorFlow 1 optimizers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from elastic.errors import Invalid
from elastic.keras import distributed_optimizer
from elastic.keras import keras3_optimizer as reducing
from elastic.negotiation.process_sets import ProcessSet, global_process_set
from elastic.optimizer import framework_options
from elastic.tensorflow import v1_optimizer
from elastic.tensorflow.compression import Compression
from elastic.tensorflow.ops import Average


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that applies gradients reduced over all ranks.

    Args:
        optimizer: optimizer of Keras (see `elastic.keras.distributed_optimizer.DistributedOptimizer`), or a
            ``tf.compat.v1.train.Optimizer``, whose ``compute_gradients`` then returns reduced gradients.
        name, use_locking: arguments of the wrapper of a TensorFlow 1 optimizer.
        compression, sparse_as_dense, op, gradient_predivide_factor, process_set, scale_local_gradients: see
            `elastic.optimizer.framework_options.GradientOptions`.
        backward_passes_per_step: number of passes whose gradients are accumulated on each rank before the reduction.
        average_aggregated_gradients: whether to divide accumulated gradients by their number.
        num_groups, groups: ignored, since all gradients are reduced together.
        device_dense, device_sparse: ignored.

    Raises:
        Invalid: (a ValueError) an argument is invalid, or ``optimizer`` is not an optimizer.
    """
    given = dict(locals())
    del given["use_locking"]
    if reducing.is_optimizer(optimizer):
        return distributed_optimizer.DistributedOptimizer(**given)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        options = framework_options.checked(
            op,
            compression,
            sparse_as_dense,
            gradient_predivide_factor,
            num_groups or groups,
            process_set,
            scale_local_gradients,
        )
        return v1_optimizer.distribute(
            optimizer,
            name,
            use_locking,
            backward_passes_per_step,
            average_aggregated_gradients,
            options,
        )
    raise Invalid(
        f"{type(optimizer).__name__} is neither an optimizer of this process's Keras nor of tf.compat.v1.train:"
        " pass one of these. TF_USE_LEGACY_KERAS selects legacy Keras or Keras 3"
    )
