"""Pods and nodes as in the Kubernetes API, with the fields that the driver reads."""

from __future__ import annotations

import datetime
from typing import Any

Json = dict[str, Any]


def at(seconds: float) -> str:
    """Format a time of the API, in whole seconds."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(
    name: str,
    address: str = "",
    *,
    node: str = "n1",
    phase: str = "Running",
    ends_at: float | None = None,
    gpus: int = 0,
    uid: str = "",
    created: float = 0.0,
    version: int = 1,
    gates: tuple[str, ...] = (),
    conditions: tuple[Json, ...] = (),
) -> Json:
    about: Json = {
        "name": name,
        "namespace": "lab",
        "uid": uid or f"uid of {name}",
        "creationTimestamp": at(created),
        "resourceVersion": str(version),
    }
    if ends_at is not None:
        about |= {"deletionTimestamp": at(ends_at), "deletionGracePeriodSeconds": 30}
    limits = {"nvidia.com/gpu": str(gpus), "cpu": "4"} if gpus else {"cpu": "4"}
    return {
        "metadata": about,
        "spec": {
            "nodeName": node,
            "containers": [{"name": "worker", "resources": {"limits": limits}}],
            **({"schedulingGates": [{"name": name} for name in gates]} if gates else {}),
        },
        "status": {"phase": phase, "conditions": [*conditions]}
        | ({"podIP": address} if address else {}),
    }


def node(
    name: str,
    *,
    ready: str = "True",
    taints: tuple[str, ...] = (),
    cordoned: bool = False,
    conditions: dict[str, str] | None = None,
) -> Json:
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "spec": {
            "taints": [{"key": key, "effect": "NoSchedule"} for key in taints],
            **({"unschedulable": True} if cordoned else {}),
        },
        "status": {
            "conditions": [
                {"type": kind, "status": status}
                for kind, status in {"Ready": ready, **(conditions or {})}.items()
            ]
        },
    }
