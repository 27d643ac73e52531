"""Elastic training with torch, available as ``hvd.elastic``: run loop, states and sampler."""

from elastic.run_loop import run
from elastic.runtime.basics import long_phase
from elastic.state import ElasticSampler, ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "long_phase", "run"]
