"""Rejection of JAX's multi-process mode, in which the workers form a single JAX program."""

from __future__ import annotations

import functools
from typing import Any

import jax

from elastic.errors import Fixed, NotElastic
from elastic.rendezvous import worker_settings


def _refusal() -> NotElastic:
    return NotElastic(
        "jax.distributed joins the workers to one JAX program, which ends when a worker is lost: remove"
        " jax.distributed.initialize(), let each worker use its own device, and average gradients with"
        " elastic.jax.allreduce() or elastic.jax.distributed_gradients()",
        Fixed.JAX_PROGRAM,
    )


def check_not_distributed() -> None:
    """Raise NotElastic if the workers form one JAX program."""
    if jax.distributed.is_initialized():
        raise _refusal()


def refuse_initialize() -> None:
    """Patch ``jax.distributed.initialize`` so that it raises NotElastic in the workers of an elastic job."""
    initialize = jax.distributed.initialize
    if hasattr(initialize, "__wrapped__"):
        return

    @functools.wraps(initialize)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        if worker_settings.read().driver is not None:
            raise _refusal()
        return initialize(*args, **kwargs)

    jax.distributed.initialize = refusing
