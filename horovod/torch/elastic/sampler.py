"""ElasticSampler, under the path that some scripts import it from."""

from __future__ import annotations

from elastic.state import ElasticSampler

__all__ = ["ElasticSampler"]
