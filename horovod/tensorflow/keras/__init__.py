"""Horovod's API for Keras on TensorFlow: ``import horovod.tensorflow.keras as hvd``.

The names are those of `horovod.keras`.
"""

from horovod import keras as _of_keras
from horovod.keras import *  # noqa: F403

__all__ = list(_of_keras.__all__)
