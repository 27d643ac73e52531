"""ElasticSampler, under a path from which some scripts import it."""

from elastic.state import ElasticSampler

__all__ = ["ElasticSampler"]
