"""The Keras of this process: Keras 3, or the legacy one, where TensorFlow was told to use that for ``tf.keras``."""

from typing import TYPE_CHECKING

from elastic.rendezvous import environment

LEGACY = environment.legacy_keras()

if TYPE_CHECKING or not LEGACY:
    import keras
else:
    import tf_keras as keras

__all__ = ["LEGACY", "keras"]
