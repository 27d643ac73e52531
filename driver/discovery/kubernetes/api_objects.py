"""Extraction of the properties of pods and nodes from the JSON of the Kubernetes API. Pure: no I/O, no clock.

Missing fields and fields of an unexpected type are ignored, so that no object can crash the driver.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]

# Taints that announce the end of a node, each with its meaning and, if the cloud specifies it, the time in seconds
# until the end.
ENDING: dict[str, tuple[str, float | None]] = {
    "aws-node-termination-handler/spot-itn": ("its spot instance is being reclaimed", 120.0),
    "aws-node-termination-handler/scheduled-maintenance": ("AWS maintenance", None),
    "aws-node-termination-handler/asg-lifecycle-termination": ("its group scales down", None),
    "cloud.google.com/impending-node-termination": ("Google Cloud terminates it", 30.0),
    "remediator.kubernetes.azure.com/unschedulable": ("Azure repairs or reclaims it", None),
    "karpenter.sh/disrupted": ("Karpenter removes it", None),
    "karpenter.sh/disruption": ("Karpenter removes it", None),
    "ToBeDeletedByClusterAutoscaler": ("the cluster autoscaler removes it", None),
    "node.kubernetes.io/out-of-service": ("it is marked out of service", 0.0),
    "node.cloudprovider.kubernetes.io/shutdown": ("it is shutting down", 0.0),
}

# Node conditions that announce a permanent problem or scheduled maintenance, each with the status that signals the
# problem, and its meaning.
PROBLEMS: dict[str, tuple[str, str]] = {
    # set by the monitoring agent of EKS
    "AcceleratedHardwareReady": ("False", "its accelerators failed"),
    "GPUMissing": ("True", "a GPU is missing"),  # set by AKS's node problem detector
    "NVLinkStatusInactive": ("True", "NVLink is inactive"),
    "VMEventScheduled": ("True", "Azure scheduled maintenance"),
    "KernelDeadlock": ("True", "its kernel is deadlocked"),  # set by the node problem detector
    "ReadonlyFilesystem": ("True", "a file system is read-only"),
}
# Pod conditions that announce the end of a pod: of Kubernetes (since 1.26), and of Kueue.
DISRUPTION, KUEUE_STOPS = "DisruptionTarget", "TerminationTarget"
# subject and verb of a sentence about a pod's end, by the reason in the pod's condition
DISRUPTED_BY: dict[str, str] = {
    "PreemptionByScheduler": "the scheduler preempts",
    "DeletionByTaintManager": "a taint of the node evicts",
    "EvictionByEvictionAPI": "an eviction removes",
    "TerminationByKubelet": "the kubelet terminates",
}
# prefix of the scheduling gates that Kueue removes when it admits a pod
QUEUE_GATES = "kueue.x-k8s.io/"


@dataclass(frozen=True)
class Pod:
    """Properties of a pod that the driver uses.

    Args:
        ends_at: time, in seconds since the epoch, at which Kubernetes kills the pod. None if the pod is not being
            deleted.
        ended_by: cause of the pod's end, if a condition of the pod announces the end; otherwise empty.
        queued: whether the pod waits for admission by Kueue.
    """

    uid: str
    name: str
    created: str
    address: str = ""
    node: str = ""
    phase: str = ""
    gpus: int = 0
    ends_at: float | None = None
    ended_by: str = ""
    queued: bool = False

    @property
    def runs(self) -> bool:
        return self.phase == "Running" and bool(self.address)


@dataclass(frozen=True)
class KubernetesNode:
    """Properties of a Kubernetes node that the driver uses.

    Args:
        ending: taints and conditions that announce the end of the node.
        reachable: whether the node's kubelet reports to the API server.
    """

    name: str
    reachable: bool = True
    cordoned: bool = False
    ending: tuple[str, ...] = ()


def pod_of(object: Json) -> Pod | None:
    """Convert a JSON object of the API to a pod. Return None if the object has no name."""
    about, spec, status = (_part(object, key) for key in ("metadata", "spec", "status"))
    uid, name = _text(about, "uid"), _text(about, "name")
    if not uid or not name:
        return None
    return Pod(
        uid=uid,
        name=name,
        created=_text(about, "creationTimestamp"),
        address=_text(status, "podIP"),
        node=_text(spec, "nodeName"),
        phase=_text(status, "phase"),
        gpus=sum(_gpus(each) for each in _list(spec, "containers")),
        ends_at=_time(_text(about, "deletionTimestamp")),
        ended_by=_ended_by(_list(status, "conditions")),
        queued=is_queued(object),
    )


def is_queued(pod: Json) -> bool:
    """Return whether a pod waits for admission by Kueue."""
    gates = _list(_part(pod, "spec"), "schedulingGates")
    return any(_text(gate, "name").startswith(QUEUE_GATES) for gate in gates)


def _ended_by(conditions: list[Json]) -> str:
    true = {_text(each, "type"): each for each in conditions if _text(each, "status") == "True"}
    if KUEUE_STOPS in true:
        return "Kueue evicts"
    if DISRUPTION in true:
        return DISRUPTED_BY.get(_text(true[DISRUPTION], "reason"), "Kubernetes deletes")
    return ""


def node_of(object: Json, notices: Collection[str] = ()) -> KubernetesNode | None:
    """Convert a JSON object of the API to a node. Return None if the object has no name.

    Args:
        notices: further taints and conditions that announce the end of a node.
    """
    about, spec, status = (_part(object, key) for key in ("metadata", "spec", "status"))
    name = _text(about, "name")
    if not name:
        return None
    conditions = {
        _text(each, "type"): _text(each, "status") for each in _list(status, "conditions")
    }
    taints = [_text(each, "key") for each in _list(spec, "taints")]
    ending = [key for key in taints if key in ENDING or key in notices]
    ending += [key for key, state in conditions.items() if _is_problem(key, state, notices)]
    return KubernetesNode(
        name=name,
        reachable=conditions.get("Ready") != "Unknown",
        cordoned=spec.get("unschedulable") is True,
        ending=tuple(ending),
    )


def _is_problem(condition: str, status: str, notices: Collection[str]) -> bool:
    if condition in PROBLEMS:
        return status == PROBLEMS[condition][0]
    # By convention, a condition signals a problem with status True, or with status False if its type ends in Ready.
    return condition in notices and status == ("False" if condition.endswith("Ready") else "True")


def meaning_of(notice: str) -> tuple[str, float | None]:
    """Return the meaning of a taint or condition that announces the end of a node, and the seconds until the end.

    The number of seconds is None if the cloud does not specify it.
    """
    if notice in PROBLEMS:
        return PROBLEMS[notice][1], None
    return ENDING.get(notice, (f"it has {notice}", None))


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a natural sort key, with which worker-10 follows worker-9."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts)


def _gpus(container: Json) -> int:
    limits = _part(_part(container, "resources"), "limits")
    counts = [str(count) for name, count in limits.items() if str(name).endswith("/gpu")]
    return sum(int(count) for count in counts if count.isdecimal())


def _part(object: Json, key: str) -> Json:
    part = object.get(key)
    return part if isinstance(part, Mapping) else {}


def _list(object: Json, key: str) -> list[Json]:
    items = object.get(key)
    return [each for each in items if isinstance(each, Mapping)] if isinstance(items, list) else []


def _text(object: Json, key: str) -> str:
    text = object.get(key)
    return text if isinstance(text, str) else ""


def _time(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
