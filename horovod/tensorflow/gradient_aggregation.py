"""Sum of the gradients of several passes, under a path from which some scripts import it."""

from elastic.tensorflow.aggregation import LocalGradientAggregationHelper

__all__ = ["LocalGradientAggregationHelper"]
