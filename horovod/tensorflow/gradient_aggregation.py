"""``LocalGradientAggregationHelper``, under Horovod's module name."""

from elastic.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

__all__ = ["LocalGradientAggregationHelper"]
