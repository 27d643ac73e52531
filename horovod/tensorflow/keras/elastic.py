"""``hvd.elastic`` for Keras on TensorFlow."""

from __future__ import annotations

from horovod.keras.elastic import *  # noqa: F403
from horovod.keras.elastic import __all__ as __all__
