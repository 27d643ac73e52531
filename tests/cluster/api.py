"""A small client of the Kubernetes API for tests: it shares no code with the product, and hides no answer."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

PATHS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Endpoints": "/api/v1/namespaces/{}/endpoints",
    "Event": "/api/v1/namespaces/{}/events",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
    "PodDisruptionBudget": "/apis/policy/v1beta1/namespaces/{}/poddisruptionbudgets",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "Namespace": "/api/v1/namespaces",
    "Node": "/api/v1/nodes",
    "PersistentVolume": "/api/v1/persistentvolumes",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}
MERGE = "application/merge-patch+json"
STRATEGIC_MERGE = "application/strategic-merge-patch+json"
# Errors of a server that dies or restarts: retry.
BROKEN = (OSError, http.client.HTTPException, json.JSONDecodeError)


class Refused(Exception):
    """An answer other than 2xx."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Expired(Exception):
    """A watch has ended with an error, usually because its version is too old: list again."""


class Api:
    """One user's access to the API server; each call has a separate connection. Thread-safe."""

    def __init__(self, host: str, port: int, ca: Path, token: str) -> None:
        self.host = host
        self.port = port
        self._token = token
        self._context = ssl.create_default_context(cafile=str(ca))

    @classmethod
    def of(cls, kubeconfig: Path) -> Api:
        """Use the first cluster and the first user of a file from `ControlPlane.kubeconfig`."""
        content = yaml.safe_load(kubeconfig.read_text())
        cluster = content["clusters"][0]["cluster"]
        server = urllib.parse.urlsplit(cluster["server"])
        token = content["users"][0]["user"]["token"]
        return cls(
            server.hostname or "", server.port or 443, cluster["certificate-authority"], token
        )

    def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        content: str = "application/json",
        timeout_s: float = 10.0,
    ) -> Any:
        """Return the answer: an object, or text if it isn't JSON."""
        with self._asked(method, path, body, content, timeout_s) as response:
            text = response.read()
            if response.headers.get_content_type() == "application/json":
                return json.loads(text)
            return text.decode()

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", with_query(path, query))

    def create(self, path: str, body: Object) -> Any:
        return self.call("POST", path, body)

    def patch(self, path: str, body: Object, *, content: str = MERGE) -> Any:
        return self.call("PATCH", path, body, content=content)

    def delete(self, path: str, *, grace_s: int | None = None, uid: str | None = None) -> Any:
        options: Object = {"propagationPolicy": "Background"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        return self.call("DELETE", path, options)

    def watch(
        self, path: str, version: str, *, timeout_s: float = 300.0, **query: Any
    ) -> Iterator[tuple[str, Object]]:
        """Iterate over ``ADDED``, ``MODIFIED`` or ``DELETED`` with the object, until the server or the time ends it."""
        query |= {"watch": 1, "resourceVersion": version, "timeoutSeconds": max(1, int(timeout_s))}
        with self._asked("GET", with_query(path, query), None, "", timeout_s + 1) as response:
            while line := response.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise Expired(event["object"].get("message"))
                yield event["type"], event["object"]

    def wait(
        self, path: str, until: Callable[[Object | None], Any], *, timeout_s: float = 30.0
    ) -> Object | None:
        """The object at the path as it is when ``until`` is first true of it, None where there is none.

        It is watched; a server that goes away meanwhile is asked again.
        """
        collection, _, name = path.rpartition("/")
        query = {"fieldSelector": f"metadata.name={name}"}
        deadline = time.monotonic() + timeout_s
        current: Object | None = None
        while True:
            try:
                found = self.get(collection, **query)
                current = found["items"][0] if found["items"] else None
                if until(current):
                    return current
                left = max(0.1, deadline - time.monotonic())
                version = found["metadata"]["resourceVersion"]
                for kind, seen in self.watch(collection, version, timeout_s=left, **query):
                    current = None if kind == "DELETED" else seen
                    if until(current):
                        return current
            except (*BROKEN, Expired):
                time.sleep(0.1)
            except Refused as error:
                if error.code < 429:
                    raise
                time.sleep(0.1)
            shown = json.dumps(current, indent=1)
            assert time.monotonic() < deadline, (
                f"waited {timeout_s} s for {path}; now it is\n{shown}"
            )

    @contextlib.contextmanager
    def _asked(
        self, method: str, path: str, body: Object | None, content: str, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content
        connection = http.client.HTTPSConnection(
            self.host, self.port, timeout=timeout_s, context=self._context
        )
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status >= 300:
                raise Refused(response.status, response.read().decode(errors="replace"))
            with response:
                yield response


class Namespace:
    """A namespace of a test, with short operations."""

    def __init__(self, name: str, api: Api) -> None:
        self.name = name
        self.api = api

    def path(self, kind: str, name: str = "", subresource: str = "") -> str:
        parts = (PATHS[kind].format(self.name), name, subresource)
        return "/".join(part for part in parts if part)

    def create(self, *manifests: Object) -> Any:
        """Create the objects in this order; return the last one."""
        made: Object = {}
        for manifest in manifests:
            made = self.api.create(self.path(manifest["kind"]), manifest)
        return made

    def get(self, kind: str, name: str, subresource: str = "") -> Any:
        return self.api.get(self.path(kind, name, subresource))

    def list(self, kind: str, selector: str = "") -> list[Object]:
        found: list[Object] = self.api.get(self.path(kind), labelSelector=selector)["items"]
        return found

    def patch(self, kind: str, name: str, body: Object) -> Any:
        return self.api.patch(self.path(kind, name), body)

    def delete(self, kind: str, name: str, *, grace_s: int | None = None) -> Any:
        return self.api.delete(self.path(kind, name), grace_s=grace_s)

    def evict(self, pod: str) -> Any:
        """Evict a pod, as a drain of its node does."""
        body = {
            "apiVersion": "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.name},
        }
        return self.api.create(self.path("Pod", pod, "eviction"), body)

    def wait(
        self,
        kind: str,
        name: str,
        until: Callable[[Object | None], Any],
        *,
        timeout_s: float = 30.0,
    ) -> Object | None:
        return self.api.wait(self.path(kind, name), until, timeout_s=timeout_s)

    def wait_pod(self, name: str, phase: str = "Running", *, timeout_s: float = 30.0) -> Object:
        """Wait for a pod in this phase; if it is Running, also for its readiness."""
        wanted = ready if phase == "Running" else lambda pod: pod["status"].get("phase") == phase
        pod = self.wait("Pod", name, lambda pod: pod and wanted(pod), timeout_s=timeout_s)
        assert pod is not None
        return pod

    def wait_gone(self, kind: str, name: str, *, timeout_s: float = 30.0) -> None:
        self.wait(kind, name, lambda found: found is None, timeout_s=timeout_s)


def ready(found: Object) -> bool:
    """Return the conditions of pods and nodes."""
    return condition(found, "Ready") == "True"


def condition(found: Object, kind: str) -> str | None:
    """Return ``True``, ``False`` or ``Unknown``, and None without this condition."""
    said = {each["type"]: each["status"] for each in found["status"].get("conditions", [])}
    return said.get(kind)


def with_query(path: str, query: dict[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urllib.parse.urlencode(given)}" if given else path


def decoded(secret: Object) -> dict[str, bytes]:
    """Return the content of a Secret, or of a ConfigMap's binaryData."""
    return {name: base64.b64decode(value) for name, value in (secret or {}).items()}
