"""Check, before a job is installed, whether Kueue can admit its pods. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Any

from elastic.driver.discovery.kubernetes.api_objects import Json

GROUP, LOCAL_QUEUES = "kueue.x-k8s.io", "localqueues"
QUEUE_LABEL, MANAGED_LABEL = f"{GROUP}/queue-name", f"{GROUP}/managed"


def served_version(groups: Json) -> str | None:
    """Return the preferred version of Kueue's API, or None if the API server does not serve it.

    Args:
        groups: the ``APIGroupList`` of the API server.
    """
    for group in groups.get("groups") or ():
        if group["name"] == GROUP:
            return str(group["preferredVersion"]["version"])
    return None


def probe_pod(queue: str) -> dict[str, Any]:
    """Return a pod for a dry run, to which Kueue's webhook adds a label if it manages the namespace's pods.

    The pod satisfies the restricted Pod Security Standard and has resource limits, so that no other admission rule
    rejects it.
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "hvd-elastic-probe-", "labels": {QUEUE_LABEL: queue}},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "probe",
                    "image": "probe",
                    "resources": {"limits": {"cpu": "1m", "memory": "1Mi"}},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def is_managed(pod: Json) -> bool:
    """Return whether Kueue manages a pod, given the pod in the API server's response."""
    return (pod["metadata"].get("labels") or {}).get(MANAGED_LABEL) == "true"


def why_inactive(queue: Json) -> str:
    """Return the reason why a LocalQueue currently admits no workloads, or an empty string."""
    for condition in (queue.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Active" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "unknown")
    return ""
