"""``LocalGradientAggregationHelper``, at a path that some scripts import."""

from elastic.tensorflow.aggregation import LocalGradientAggregationHelper

__all__ = ["LocalGradientAggregationHelper"]
