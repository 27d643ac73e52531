"""Where `ElasticSampler` is imported from by scripts; it stands with what else deals samples."""

from elastic.data.sampler import ElasticSampler as ElasticSampler
