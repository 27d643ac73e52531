"""Public import location of `ElasticSampler`."""

from elastic.data.sampler import ElasticSampler as ElasticSampler
