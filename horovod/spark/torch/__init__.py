"""``TorchEstimator`` and ``TorchModel``: train a torch model on a DataFrame of Spark."""

from horovod.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
