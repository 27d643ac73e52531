"""``KerasEstimator`` and ``KerasModel``: train a Keras model on a DataFrame of Spark."""

from horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
