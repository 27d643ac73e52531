"""Elastic training with Keras on TensorFlow, available as ``hvd.elastic``."""

from horovod.keras.elastic import *  # noqa: F403
from horovod.keras.elastic import __all__ as __all__
