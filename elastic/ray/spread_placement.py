"""Placement group for an exact number of nodes, with one bundle per node that holds all of the node's workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray.util

from elastic.errors import Invalid
from elastic.ray.arguments import WorkerRequest


def spread(wanted: WorkerRequest) -> WorkerRequest:
    """Reserve a placement group, and return a request that uses it. Free the group with `give_back`.

    This function may wait for other jobs to release resources.

    Raises:
        Invalid: the workers of a host need a fraction of a GPU in total.
    """
    assert wanted.hosts is not None
    each = wanted.np // wanted.hosts
    bundle = {name: amount * each for name, amount in wanted.resources.items()}
    if bundle.get("GPU", 1.0) % 1 and each > 1:
        raise Invalid(
            f"{each} workers on each host with {wanted.gpus:g} GPU each need {bundle['GPU']:g} GPUs per host,"
            " but Ray grants only whole GPUs: pass a GPU fraction that gives a whole number per host"
        )
    selectors: Any = {}
    if wanted.labels:  # Older releases of Ray lack this argument.
        selectors = {"bundle_label_selector": [dict(wanted.labels)] * wanted.hosts}
    group: Any = ray.util.placement_group(
        [bundle] * wanted.hosts, strategy="STRICT_SPREAD", **selectors
    )
    return replace(wanted, placement_group=group, per_bundle=each, labels={})


def give_back(wanted: WorkerRequest) -> None:
    remove: Any = ray.util.remove_placement_group  # the function in Ray has no type annotations
    remove(wanted.placement_group)
