"""The sum of gradients of several passes, under the path that some scripts import it from."""

from elastic.tensorflow.aggregation import LocalGradientAggregationHelper

__all__ = ["LocalGradientAggregationHelper"]
