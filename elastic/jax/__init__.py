"""Elastic training with JAX: ``import elastic.jax``. See docs/jax.md."""

from elastic.api.compression import Compression
from elastic.api.ops import Adasum, Average, Max, Min, Product, Sum
from elastic.jax import unsupported_modes as _modes
from elastic.jax.collectives import allgather, allreduce, broadcast
from elastic.jax.elastic_run import run
from elastic.jax.gradients import distributed_gradients
from elastic.jax.state import JaxState

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "JaxState",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "distributed_gradients",
    "run",
]

_modes.refuse_initialize()
