"""ElasticSampler, under Horovod's module name."""

from elastic.state import ElasticSampler

__all__ = ["ElasticSampler"]
