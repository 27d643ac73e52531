"""Import of the Keras that this process uses: Keras 3, or legacy Keras if TensorFlow uses it as ``tf.keras``."""

from typing import TYPE_CHECKING

from elastic.rendezvous import worker_settings

LEGACY = worker_settings.legacy_keras()

if TYPE_CHECKING or not LEGACY:
    import keras
else:
    import tf_keras as keras

__all__ = ["LEGACY", "keras"]
