"""Where `ElasticSampler` is imported from by scripts; it stands with what else deals samples."""

from __future__ import annotations

from elastic.data.sampler import ElasticSampler as ElasticSampler
