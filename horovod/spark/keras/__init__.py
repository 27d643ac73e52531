"""Training of Keras models on Spark DataFrames, with ``KerasEstimator`` and ``KerasModel``."""

from horovod.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
