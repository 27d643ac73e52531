"""``LocalGradientAggregationHelper``, under Horovod's module name."""

from elastic.tensorflow.aggregation import LocalGradientAggregationHelper

__all__ = ["LocalGradientAggregationHelper"]
