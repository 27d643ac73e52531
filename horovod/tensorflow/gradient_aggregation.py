"""Sum of the gradients of several passes, at a path that some scripts import."""

from elastic.tensorflow.aggregation import LocalGradientAggregationHelper

__all__ = ["LocalGradientAggregationHelper"]
