"""A kubelet whose pods are processes of this machine: ``python -m cluster.kubelet KUBECONFIG NODE FOLDER ...``.

It keeps a Node and its Lease, runs the first container of each pod that is bound to it, and says what becomes of it. A
pod has an address on loopback and namespaces of its own for mounts, processes, IPC and the host's name; networks are
not separated. Left out: init containers, more than one container, exec through the API, volumes that change
while they are mounted, limits of resources, and pods of a kubelet that was here before.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster import pod_logs
from cluster.api import (
    BROKEN,
    PATHS,
    STRATEGIC_MERGE,
    Api,
    Expired,
    Namespace,
    Object,
    Refused,
    ready,
)
from cluster.pod import RETRY_S, Pod, now, say

BEAT_S = 1.0
LEASES = PATHS["Lease"].format("kube-node-lease")
PODS = "/api/v1/pods"


class Kubelet:
    """A node. Each pod has separate threads; those here follow the server's changes."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.api = Api.of(given.kubeconfig)
        self.node: str = given.node
        self.folder: Path = given.folder
        self.logs: Path = given.logs
        self.claims: Path = given.claims
        self.shared: list[Path] = given.share
        self.back_off_s: float = given.back_off
        self.images: dict[str, list[str]] = json.loads(given.images)
        self.image_environment: dict[str, str] = json.loads(given.environment)
        self.labels: dict[str, str] = json.loads(given.labels)
        self.mark = dict([given.mark.split("=", 1)]) if given.mark else {}
        self.pod_mark: str = given.pod_mark
        self.lock = threading.Lock()
        self._subnet: str = given.subnet
        self._bind: bool = given.bind
        self._heartless: bool = given.heartless
        self._pods: dict[str, Pod] = {}
        self._seen: set[str] = set()  # uids of pods that were, or are, here
        self._addresses = 1
        self._services: dict[tuple[str, str], Object] = {}
        self._everybody: dict[str, Object] = {}  # all pods of the cluster
        self._resource: Object = {"cpu": "64", "memory": "256Gi", "pods": "200"}

    def run(self) -> None:
        for folder in (self.folder, self.logs, self.claims):
            folder.mkdir(parents=True, exist_ok=True)
        self._log_port = pod_logs.serve(self.folder, self.logs, self._writes_no_more)
        for target in (self._beat, self._watch_services, self._watch_claims):
            threading.Thread(target=target, daemon=True).start()
        for kind, pod in self._changes(PODS, self._compare):
            uid = pod["metadata"]["uid"]
            with self.lock:
                if kind == "DELETED":
                    self._everybody.pop(uid, None)
                else:
                    self._everybody[uid] = pod
            if kind == "DELETED":
                self._deleted(uid)
            else:
                self._changed(pod)
            self._write_all()

    def _changes(
        self, path: str, listed: Callable[[list[Object]], None], **query: Any
    ) -> Iterator[tuple[str, Object]]:
        """Follow all changes forever; whenever the watch breaks, ``listed`` gets all objects."""
        while True:
            try:
                found = self.api.get(path, **query)
                listed(found["items"])
                yield from self.api.watch(path, found["metadata"]["resourceVersion"], **query)
            except (*BROKEN, Expired, Refused) as error:
                say("again:", path, repr(error))
                time.sleep(RETRY_S)

    # The node

    def _beat(self) -> None:
        while True:
            try:
                self._renew()
            except Refused as error:
                if error.code == 404:
                    self._register()
                    continue
                say(repr(error))
            except BROKEN as error:
                say(repr(error))
            time.sleep(BEAT_S)

    def _register(self) -> None:
        node = {
            "metadata": {
                "name": self.node,
                "labels": {"kubernetes.io/hostname": self.node, **self.labels},
            }
        }
        lease = {
            "metadata": {"name": self.node},
            "spec": {"holderIdentity": self.node, "leaseDurationSeconds": 4},
        }
        for path, body in ((PATHS["Node"], node), (LEASES, lease)):
            try:
                self.api.create(path, body)
            except Refused as error:
                if error.code != 409:
                    raise
        self._renew()

    def _renew(self) -> None:
        moment = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        time_now = now()
        conditions = [
            {"type": name, "status": status, "reason": "Harness", "lastHeartbeatTime": time_now}
            for name, status in (
                ("Ready", "True"),
                ("MemoryPressure", "False"),
                ("DiskPressure", "False"),
                ("PIDPressure", "False"),
            )
        ]
        status = {
            "conditions": conditions,
            "capacity": self._resource,
            "allocatable": self._resource,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._log_port}},
        }
        path = f"{PATHS['Node']}/{self.node}/status"
        self.api.patch(path, {"status": status}, content=STRATEGIC_MERGE)
        self.api.patch(f"{LEASES}/{self.node}", {"spec": {"renewTime": moment}})

    # Its pods

    def _writes_no_more(self, namespace: str, name: str) -> bool:
        with self.lock:
            found = [
                pod["status"]["phase"]
                for pod in self._everybody.values()
                if pod["metadata"]["name"] == name and pod["metadata"]["namespace"] == namespace
            ]
        return not found or found[0] in ("Succeeded", "Failed")

    def _compare(self, pods: list[Object]) -> None:
        listed = {pod["metadata"]["uid"]: pod for pod in pods}
        with self.lock:
            self._everybody = listed
        for uid in [uid for uid in self._pods if uid not in listed]:
            self._deleted(uid)
        for pod in pods:
            self._changed(pod)
        self._write_all()

    def _changed(self, pod: Object) -> None:
        metadata = pod["metadata"]
        node = pod["spec"].get("nodeName")
        leaves = "deletionTimestamp" in metadata
        if not node and self._bind and not leaves:
            self._take(pod)
        if node != self.node:
            return
        ours = self._pods.get(metadata["uid"])
        if ours is None and leaves:
            if metadata["uid"] not in self._seen:  # it was here before this process
                threading.Thread(target=self._delete, args=(pod,), daemon=True).start()
        elif ours is None and pod["status"].get("phase", "Pending") == "Pending":
            if metadata["uid"] in self._seen:
                return
            self._seen.add(metadata["uid"])
            ours = Pod(self, pod, self._address())
            with self.lock:
                self._pods[ours.uid] = ours
            ours.start()
        elif ours is not None:
            ours.object = pod
            if not leaves and not self._heartless:
                ours.compare(pod)
            if leaves:
                grace_s = metadata.get("deletionGracePeriodSeconds", 30)
                if grace_s > 0 or not self._heartless:
                    ours.stop(grace_s)

    def _take(self, pod: Object) -> None:
        metadata = pod["metadata"]
        name = metadata["name"]
        binding = {
            "metadata": {"name": name, "uid": metadata["uid"]},
            "target": {"kind": "Node", "name": self.node},
        }
        with contextlib.suppress(Refused):  # another node was first
            path = Namespace(metadata["namespace"], self.api).path("Pod", name, "binding")
            self.api.create(path, {"apiVersion": "v1", "kind": "Binding", **binding})

    def _deleted(self, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is not None:
            say(pod.name, "was deleted", "and lives on" if self._heartless else "")
            pod.forget(kill=not self._heartless)
            with self.lock:
                del self._pods[uid]

    def remove(self, pod: Pod) -> None:
        """It has ended, by request of the API."""
        self._delete(pod.object)
        say(pod.name, "is gone")

    def _delete(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = Namespace(metadata["namespace"], self.api).path("Pod", metadata["name"])
        while True:
            try:
                self.api.delete(path, grace_s=0, uid=metadata["uid"])
                return
            except Refused as error:
                if error.code in (404, 409):
                    return
                say(repr(error))
            except BROKEN as error:
                say(repr(error))
            time.sleep(RETRY_S)

    def _address(self) -> str:
        used = {pod.address for pod in self._pods.values()}
        while True:
            self._addresses = 2 + (self._addresses - 1) % 252
            address = f"{self._subnet}.{self._addresses}"
            if address not in used:
                return address

    # Names of services. The API accepts no loopback address in Endpoints, so they come from services and pods
    # themselves.

    def _watch_services(self) -> None:
        def listed(found: list[Object]) -> None:
            with self.lock:
                self._services = {key(each): each for each in found}
            self._write_all()

        for kind, service in self._changes("/api/v1/services", listed):
            with self.lock:
                if kind == "DELETED":
                    self._services.pop(key(service), None)
                else:
                    self._services[key(service)] = service
            self._write_all()

    def _names(self) -> Iterator[tuple[str, str, list[str]]]:
        """An address, its namespace, and its names in it."""
        for (namespace, name), service in sorted(self._services.items()):
            selector = service["spec"].get("selector")
            if not selector:
                continue
            for pod in self._everybody.values():
                metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
                if metadata["namespace"] != namespace or "podIP" not in status:
                    continue
                if not selector.items() <= metadata.get("labels", {}).items():
                    continue
                serves = ready(pod) and "deletionTimestamp" not in metadata
                if not serves and not service["spec"].get("publishNotReadyAddresses"):
                    continue
                if status["phase"] in ("Succeeded", "Failed"):
                    continue
                own = spec.get("hostname") if spec.get("subdomain") == name else None
                yield status["podIP"], namespace, [name, f"{own}.{name}"] if own else [name]

    def _write_all(self) -> None:
        with self.lock:
            pods = list(self._pods.values())
        for pod in pods:
            if pod.hosts.exists():
                self.write_hosts(pod)

    def write_hosts(self, pod: Pod) -> None:
        """Write in place: the pod has this very file mounted."""
        with self.lock:
            own = f"{pod.address} {pod.object['spec'].get('hostname') or pod.name}"
            lines = ["127.0.0.1 localhost", own, f"{self.api.host} kubernetes.default.svc"]
            for address, namespace, names in self._names():
                suffixes = [f".{namespace}.svc.cluster.local", f".{namespace}.svc", f".{namespace}"]
                if namespace == pod.namespace.name:
                    suffixes.append("")
                full = " ".join(name + suffix for name in names for suffix in suffixes)
                lines.append(f"{address} {full}")
            content = ("\n".join(lines) + "\n").encode()
            if pod.hosts.read_bytes() == content:
                return
            with open(pod.hosts, "r+b") as file:
                file.write(content)
                file.truncate()

    # Claims

    def claim(self, namespace: str, name: str) -> Path:
        path = self.claims / f"{namespace}_{name}"
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
        return path

    def _watch_claims(self) -> None:
        def listed(found: list[Object]) -> None:
            for each in found:
                self._provide(each)

        for _, claim in self._changes("/api/v1/persistentvolumeclaims", listed):
            self._provide(claim)

    def _provide(self, claim: Object) -> None:
        """Create a volume for this claim only; the controller binds them. All nodes try, and one succeeds."""
        metadata, spec = claim["metadata"], claim["spec"]
        if claim["status"].get("phase") != "Pending" or spec.get("volumeName"):
            return
        volume = {
            "metadata": {"name": f"pvc-{metadata['uid']}"},
            "spec": {
                "accessModes": spec["accessModes"],
                "capacity": spec["resources"]["requests"],
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": metadata["namespace"],
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                },
                "hostPath": {"path": str(self.claim(metadata["namespace"], metadata["name"]))},
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": spec.get("storageClassName", ""),
            },
        }
        try:
            self.api.create(PATHS["PersistentVolume"], volume)
        except Refused as error:
            if error.code != 409:
                say(repr(error))


def key(found: Object) -> tuple[str, str]:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster.kubelet")
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument("node")
    parser.add_argument("folder", type=Path, help="of this node alone")
    parser.add_argument("--subnet", default="127.0.1", help="its pods have addresses in here")
    parser.add_argument("--logs", type=Path, required=True, help="NAMESPACE_POD.log goes here")
    parser.add_argument("--claims", type=Path, required=True, help="folders of claims go here")
    parser.add_argument("--bind", action="store_true", help="takes pods that have no node yet")
    parser.add_argument("--heartless", action="store_true", help="who is deleted by force lives on")
    parser.add_argument("--back-off", type=float, default=10.0, help="of a second restart, seconds")
    parser.add_argument("--share", type=Path, action="append", default=[], help="seen by all pods")
    parser.add_argument("--images", default="{}", help="JSON: the commands that images have")
    parser.add_argument("--environment", default="{}", help="JSON: the variables of all images")
    parser.add_argument("--labels", default="{}", help="JSON: of the node")
    parser.add_argument("--mark", default="", help="NAME=VALUE in all environments")
    parser.add_argument("--pod-mark", default="POD=1", help="NAME=VALUE in those of pods alone")
    return parser


if __name__ == "__main__":
    # For whom tests are interrupted, the fixture ends all.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Kubelet(arguments().parse_args(sys.argv[1:])).run()
