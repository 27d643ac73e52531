"""ElasticSampler, under the path that some scripts import it from."""

from elastic.state import ElasticSampler

__all__ = ["ElasticSampler"]
