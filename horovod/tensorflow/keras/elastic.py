"""``hvd.elastic`` for Keras on TensorFlow."""

from horovod.keras.elastic import *  # noqa: F403
from horovod.keras.elastic import __all__ as __all__
