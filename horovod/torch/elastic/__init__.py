"""``hvd.elastic``: the run loop, states and the sampler."""

from elastic.run_loop import run
from elastic.runtime.basics import long_phase
from elastic.state import ElasticSampler, ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "long_phase", "run"]
