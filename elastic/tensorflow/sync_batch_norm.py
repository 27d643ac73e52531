"""``SyncBatchNormalization``: Keras's batch normalization over the statistics of all ranks' batches.

Each call performs one small, differentiable allreduce of each rank's sums, sums of squares and number of values. See
Ioffe and Szegedy, "Batch Normalization", ICML 2015, arXiv 1502.03167.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from elastic.api.keras_version import LEGACY, keras
from elastic.api.ops import Sum
from elastic.negotiation.process_sets import ProcessSet, global_process_set
from elastic.tensorflow import ops


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Variant of ``keras.layers.BatchNormalization`` with statistics shared by the ranks of ``process_set``.

    TensorFlow only.

    Raises ValueError if ``fused`` is true.
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if fused:
            raise ValueError("fused=True normalizes only the batch of one rank: omit fused")
        super().__init__(**(kwargs | ({"fused": False} if LEGACY else {})))
        self._process_set = process_set

    def _moments(self, inputs: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
        mean, variance = super()._moments(inputs, *args, **kwargs)
        mask = kwargs["mask"] if "mask" in kwargs else args[-1]
        masked = mask is not None
        values = (
            tf.reduce_sum(tf.cast(mask, mean.dtype)) if masked else tf.size(inputs) / tf.size(mean)
        )
        count = tf.fill(tf.shape(mean), tf.cast(values, mean.dtype))
        sums = tf.stack([mean * count, (variance + tf.square(mean)) * count, count])
        of_all = ops.allreduce(sums, op=Sum, process_set=self._process_set)
        wide = tf.maximum(of_all[2], 1.0)
        group_mean = of_all[0] / wide
        group_variance = tf.maximum(of_all[1] / wide - tf.square(group_mean), 0.0)
        return group_mean, group_variance
