"""ElasticSampler, at a path that some scripts import."""

from elastic.state import ElasticSampler

__all__ = ["ElasticSampler"]
