"""Lookup of detached jobs' driver actors by job name. Makes no decisions."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic.errors import Invalid

NAMESPACE = "hvd-elastic"
WITHIN_S = 20.0


def actor_name(job: str) -> str:
    return f"hvd-elastic-driver:{job}"


def find_actor(job: str) -> Any | None:
    """Return the driver actor of a job, or None if the job does not exist.

    This process must have joined the cluster.
    """
    try:
        return ray.get_actor(actor_name(job), namespace=NAMESPACE)
    except ValueError:
        return None


def desk_of(job: str) -> tuple[str, bytes]:
    """Return the address and the key with which operators reach the driver of a detached job.

    Joins the cluster in RAY_ADDRESS if necessary.

    Raises:
        Invalid: the cluster or the job does not exist.
    """
    try:
        if not ray.is_initialized():
            address = os.environ.get("RAY_ADDRESS", "auto")
            ray.init(address=address, log_to_driver=False, logging_level=40)
    except (ConnectionError, RayError, RuntimeError) as error:
        raise Invalid(
            f"no Ray cluster was found: {error}. Set RAY_ADDRESS to its address"
        ) from None
    actor = find_actor(job)
    if actor is None:
        raise Invalid(f"the Ray cluster has no detached job {job}: see `ray list actors`")
    try:
        desk: tuple[str, bytes] | None = ray.get(actor.desk.remote(), timeout=WITHIN_S)
    except (GetTimeoutError, RayError) as error:
        raise Invalid(
            f"the driver of job {job} did not respond within {WITHIN_S:g} s ({type(error).__name__}): see its actor in"
            " `ray list actors`"
        ) from None
    if desk is None:
        raise Invalid(f"job {job} has not started yet, or has already ended: see `ray list actors`")
    return desk
