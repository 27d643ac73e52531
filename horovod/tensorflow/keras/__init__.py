"""``import horovod.tensorflow.keras as hvd``: the same names as `horovod.keras`, for Keras on TensorFlow."""

from horovod import keras as _of_keras
from horovod.keras import *  # noqa: F403

__all__ = list(_of_keras.__all__)
