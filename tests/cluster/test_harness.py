"""The control plane and the kubelet of these tests behave like Kubernetes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.api import BROKEN, PATHS, Expired, Namespace, Object, Refused, condition, ready
from cluster.control_plane import ControlPlane, Node, eventually

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

SLEEP = ["sleep", "1000"]


def template(command: list[str], **container: object) -> Object:
    """A pod with one container."""
    own = {"name": "main", "image": "machine", "command": command, **container}
    return {"containers": [own], "terminationGracePeriodSeconds": 5}


def pod(
    name: str, command: list[str], *, spec: Object | None = None, **container: object
) -> Object:
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}, "annotations": {"colour": "blue"}},
        "spec": template(command, **container) | {"restartPolicy": "Never"} | (spec or {}),
    }


def service(name: str, **spec: object) -> Object:
    ports = [{"port": 80, "protocol": "TCP"}]
    return {
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": {"app": name}, "ports": ports, **spec},
    }


def stateful_set(name: str, replicas: int, command: list[str], **spec: object) -> Object:
    return {
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "serviceName": name,
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": template(command) | spec},
        },
    }


def python(text: str) -> list[str]:
    return [sys.executable, "-u", "-c", text]


def field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def test_a_stateful_set_of_two_pods_runs_each_at_its_address(
    control_plane: ControlPlane, namespace: Namespace, node: Node
) -> None:
    text = (
        "import os, time; print(os.environ['IP'], os.uname().nodename, flush=True); time.sleep(99)"
    )
    workers = stateful_set("w", 2, SLEEP)
    container = workers["spec"]["template"]["spec"]["containers"][0]
    container |= {"command": python(text), "env": [field("IP", "status.podIP")]}
    namespace.create(service("w"), workers)
    found = [namespace.wait_pod(f"w-{index}") for index in range(2)]
    addresses = [each["status"]["podIP"] for each in found]
    assert len(set(addresses)) == 2
    assert all(address.startswith(f"{node.subnet}.") for address in addresses)
    expected = [f"{address} w-{index}\n" for index, address in enumerate(addresses)]
    eventually(
        lambda: [control_plane.log(namespace, f"w-{index}") for index in range(2)] == expected,
        f"they say {expected}",
    )


def test_a_job_completes_and_its_exit_codes_are_reported(namespace: Namespace, node: Node) -> None:
    job = {
        "kind": "Job",
        "metadata": {"name": "j"},
        "spec": {
            "completions": 2,
            "parallelism": 2,
            "template": {"spec": template(["true"]) | {"restartPolicy": "Never"}},
        },
    }
    namespace.create(job, pod("p", ["sh", "-c", "echo gone > /dev/termination-log; exit 7"]))
    namespace.wait("Job", "j", lambda found: found and condition(found, "Complete") == "True")
    (container,) = namespace.wait_pod("p", "Failed")["status"]["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 7
    assert container["state"]["terminated"]["message"] == "gone\n"


def test_failed_container_is_restarted(namespace: Namespace, node: Node) -> None:
    namespace.create(pod("p", ["false"], spec={"restartPolicy": "OnFailure"}))

    def twice(found: Object | None) -> bool:
        (status,) = (found or {}).get("status", {}).get("containerStatuses", [{}])
        return bool(status.get("restartCount", 0) >= 2)

    found = namespace.wait("Pod", "p", twice)
    assert found is not None
    assert found["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 1


def test_variables_are_expanded_and_fields_are_set(
    control_plane: ControlPlane, namespace: Namespace, node: Node
) -> None:
    environment = [
        field("POD", "metadata.name"),
        field("COLOUR", "metadata.annotations['colour']"),
        field("WHERE", "spec.nodeName"),
        {"name": "BOTH", "value": "$(POD)-$(COLOUR)-$(NONE)-$$(POD)"},
    ]
    namespace.create(
        {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"FROM": "map"}},
        pod(
            "p",
            ["sh", "-c", 'echo "$0 $1 $BOTH $A_FROM $WHERE"'],
            args=["$(BOTH)", "x"],
            env=environment,
            envFrom=[{"prefix": "A_", "configMapRef": {"name": "c"}}],
        ),
    )
    namespace.wait_pod("p", "Succeeded")
    both = "p-blue-$(NONE)-$(POD)"
    assert control_plane.log(namespace, "p") == f"{both} x {both} map {node.name}\n"


def test_volumes_exist_only_in_the_pod_that_mounts_them(
    control_plane: ControlPlane, namespace: Namespace, node: Node
) -> None:
    text = (
        "set -e; cat /secret-of-a-test/word; stat -c %a -L /secret-of-a-test/word;"
        " touch /memory-of-a-test/x /empty-of-a-test/x; stat -f -c %T /memory-of-a-test;"
        " ls -d /secret-of-a-test; df -k --output=size /dev/shm | tail -n 1;"
        " echo kept > /kept-of-a-test/file; ! touch /secret-of-a-test/y 2>/dev/null"
    )
    mounts = ("secret", "memory", "empty", "kept")
    volumes = [
        {"name": "secret", "secret": {"secretName": "s", "defaultMode": 0o400}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "empty", "emptyDir": {}},
        {"name": "kept", "persistentVolumeClaim": {"claimName": "c"}},
    ]
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    namespace.create(
        {"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"word": "open\n"}},
        {"kind": "PersistentVolumeClaim", "metadata": {"name": "c"}, "spec": claim},
        pod(
            "p",
            ["bash", "-c", text],
            spec={"volumes": volumes},
            volumeMounts=[{"name": name, "mountPath": f"/{name}-of-a-test"} for name in mounts],
        ),
    )
    ended = namespace.wait("Pod", "p", lambda found: found and "ed" in found["status"]["phase"])
    log = control_plane.log(namespace, "p")
    assert ended and ended["status"]["phase"] == "Succeeded", log
    assert log.split() == ["open", "400", "tmpfs", "/secret-of-a-test", "65536"]
    assert (control_plane.claim(namespace, "c") / "file").read_text() == "kept\n"
    assert not any(Path(f"/{name}-of-a-test").exists() for name in mounts)


def test_pod_reaches_the_api_with_its_own_token_unless_disabled(
    control_plane: ControlPlane, namespace: Namespace, node: Node
) -> None:
    text = """
import os, ssl, urllib.request, urllib.error
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
if not os.path.exists(folder):
    raise SystemExit("no token")
address = f"{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
url = f"https://{address}/api/v1/namespaces/{open(folder + 'namespace').read()}/pods"
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(folder + "token").read()})
try:
    urllib.request.urlopen(request, context=ssl.create_default_context(cafile=folder + "ca.crt"))
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    without = pod("without", python(text), spec={"automountServiceAccountToken": False})
    namespace.create(pod("with", python(text)), without)
    namespace.wait_pod("with", "Succeeded")
    namespace.wait_pod("without", "Failed")
    log = control_plane.log(namespace, "with")
    assert log.startswith("403") and f"system:serviceaccount:{namespace.name}:default" in log
    assert control_plane.log(namespace, "without") == "no token\n"
    assert not Path("/var/run/secrets/kubernetes.io").exists()


def test_pods_find_each_other_by_the_names_of_services(
    control_plane: ControlPlane, namespace: Namespace, node: Node
) -> None:
    text = f"""
import socket, time
names = ["w", "w-0.w", "w.{namespace.name}.svc", "w-1.w.{namespace.name}.svc.cluster.local"]
while True:
    try:
        found = [sorted({{each[4][0] for each in socket.getaddrinfo(name, 80)}}) for name in names]
        if len(found[0]) == 2:
            break
    except socket.gaierror:
        pass
    time.sleep(0.02)
for each in found:
    print(*each)
"""
    namespace.create(
        service("w", publishNotReadyAddresses=True),
        stateful_set("w", 2, SLEEP),
        pod("asks", python(text)),
    )
    namespace.wait_pod("asks", "Succeeded")
    first, second = (namespace.wait_pod(f"w-{index}")["status"]["podIP"] for index in range(2))
    both = " ".join(sorted([first, second]))
    said = control_plane.log(namespace, "asks").splitlines()
    assert said == [both, first, both, second]


def test_the_log_of_a_pod_is_read_through_the_api(
    control_plane: ControlPlane, namespace: Namespace, node: Node
) -> None:
    namespace.create(pod("p", ["sh", "-c", "echo one; sleep 0.3; echo two"]))
    namespace.wait_pod("p")
    assert control_plane.kubectl("-n", namespace.name, "logs", "-f", "p") == "one\ntwo\n"


def test_a_pod_is_ready_when_its_probe_succeeds(
    control_plane: ControlPlane, namespace: Namespace, node: Node, tmp_path: Path
) -> None:
    probe = {"exec": {"command": ["test", "-e", "/there/ready"]}, "periodSeconds": 1}
    volume = {"name": "v", "hostPath": {"path": str(tmp_path)}}
    namespace.create(
        pod(
            "p",
            SLEEP,
            spec={"volumes": [volume]},
            readinessProbe=probe,
            volumeMounts=[{"name": "v", "mountPath": "/there"}],
        )
    )
    found = namespace.wait("Pod", "p", lambda each: each and each["status"]["phase"] == "Running")
    assert found and not ready(found)
    (tmp_path / "ready").touch()
    namespace.wait_pod("p")
    (tmp_path / "ready").unlink()
    namespace.wait("Pod", "p", lambda each: each and not ready(each))


def test_evicted_pod_gets_sigterm_and_its_grace_period(
    control_plane: ControlPlane, namespace: Namespace, node: Node
) -> None:
    text = """
import signal, time
def leave(*_):
    print("told", flush=True)
    time.sleep(0.5)
    print("left", flush=True)
    raise SystemExit(3)
signal.signal(signal.SIGTERM, leave)
print("here", flush=True)
while True:
    time.sleep(10)
"""
    namespace.create(pod("p", python(text)))
    namespace.wait_pod("p")
    eventually(lambda: "here" in control_plane.log(namespace, "p"), "the pod has its handler")
    namespace.evict("p")
    leaving = namespace.wait(
        "Pod", "p", lambda each: each and "deletionTimestamp" in each["metadata"]
    )
    assert leaving and leaving["metadata"]["deletionGracePeriodSeconds"] == 5
    namespace.wait_gone("Pod", "p")
    assert control_plane.log(namespace, "p").split() == ["here", "told", "left"]


def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(
    namespace: Namespace, node: Node
) -> None:
    namespace.create(pod("p", SLEEP))  # as process 1 it has no handler, so the signal is ignored
    namespace.wait_pod("p")
    began = time.monotonic()
    namespace.delete("Pod", "p", grace_s=1)
    namespace.wait_gone("Pod", "p")
    assert time.monotonic() - began > 0.9
    assert node.pids() == []


def test_forced_deletion_kills_all_processes_of_a_pod(namespace: Namespace, node: Node) -> None:
    namespace.create(pod("p", ["sh", "-c", "sleep 1000 & sleep 1000; true"]))
    namespace.wait_pod("p")
    node.wait_pids(3)
    namespace.delete("Pod", "p", grace_s=0)
    node.wait_pids(0)


def test_pod_survives_a_forced_deletion_on_a_kubelet_that_does_not_kill(
    namespace: Namespace, add_node: Callable[..., Node]
) -> None:
    node = add_node(heartless=True)
    namespace.create(service("w"), stateful_set("w", 1, SLEEP))
    first = namespace.wait_pod("w-0")
    before = node.wait_pids(1)
    namespace.delete("Pod", "w-0", grace_s=0)
    namespace.wait(
        "Pod",
        "w-0",
        lambda each: each and each["metadata"]["uid"] != first["metadata"]["uid"] and ready(each),
    )
    assert set(before) <= set(node.wait_pids(2))  # both have the name w-0
    node.remove()
    assert node.pids() == []


def test_pod_of_a_frozen_node_is_stuck_until_deleted_by_force(
    namespace: Namespace, add_node: Callable[..., Node]
) -> None:
    lost = add_node()
    soon = [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute"}
        | {"tolerationSeconds": 0}
        for what in ("unreachable", "not-ready")
    ]
    namespace.create(service("w"), stateful_set("w", 1, SLEEP, tolerations=soon))
    first = namespace.wait_pod("w-0")
    (process,) = lost.wait_pids(1)
    other = add_node()
    lost.freeze()
    stuck = namespace.wait(
        "Pod", "w-0", lambda each: each and "deletionTimestamp" in each["metadata"]
    )
    assert stuck and stuck["metadata"]["uid"] == first["metadata"]["uid"]
    os.kill(process, 0)
    namespace.delete("Pod", "w-0", grace_s=0)
    second = namespace.wait(
        "Pod",
        "w-0",
        lambda each: each and each["metadata"]["uid"] != first["metadata"]["uid"] and ready(each),
    )
    assert second and second["spec"]["nodeName"] == other.name
    os.kill(process, 0)
    lost.thaw()
    lost.wait_pids(0)  # a node that returns kills deleted pods


def test_a_killed_api_server_is_restarted(
    control_plane: ControlPlane, namespace: Namespace, node: Node
) -> None:
    namespace.create(pod("p", SLEEP))
    before = namespace.wait_pod("p")
    (process,) = node.wait_pids(1)
    version = namespace.api.get(namespace.path("Pod"))["metadata"]["resourceVersion"]
    watch = namespace.api.watch(namespace.path("Pod"), version)
    control_plane.kill_api_server()
    with pytest.raises((*BROKEN, StopIteration)):
        next(watch)
    control_plane.start_api_server()
    after = namespace.wait_pod("p")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert node.pids() == [process]
    with pytest.raises((Expired, Refused)):  # its history of changes restarts
        next(namespace.api.watch(namespace.path("Pod"), "1"))
    namespace.delete("Pod", "p", grace_s=1)
    namespace.wait_gone("Pod", "p")


def test_while_etcd_is_frozen_writes_hang(
    control_plane: ControlPlane, namespace: Namespace
) -> None:
    body = {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {}}
    with control_plane.etcd_frozen(), pytest.raises(TimeoutError):
        namespace.api.call("POST", namespace.path("ConfigMap"), body, timeout_s=1)
    with pytest.raises(Refused, match="AlreadyExists"):
        eventually(lambda: not namespace.create(body), "it is there, since the server went on")


def test_a_user_without_rights_is_refused(
    control_plane: ControlPlane, namespace: Namespace
) -> None:
    for token, code in ((control_plane.user_token, 403), ("made up", 401)):
        with pytest.raises(Refused) as refused:
            control_plane.api_of(token).get(namespace.path("Pod"))
        assert refused.value.code == code


def test_helm_installs_a_chart(
    control_plane: ControlPlane, namespace: Namespace, node: Node, tmp_path: Path
) -> None:
    chart = {"apiVersion": "v2", "name": "two", "version": "0.1.0"}
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text(json.dumps(chart))
    (tmp_path / "values.yaml").write_text("replicas: 1\n")
    workers = stateful_set("w", 1, SLEEP) | {"apiVersion": "apps/v1"}
    text = json.dumps(workers).replace('"replicas": 1', '"replicas": {{ .Values.replicas }}')
    (tmp_path / "templates" / "workers.yaml").write_text(text)
    (tmp_path / "templates" / "service.yaml").write_text(
        json.dumps(service("w") | {"apiVersion": "v1"})
    )
    where = ("--namespace", namespace.name)
    control_plane.helm("install", "r", str(tmp_path), *where, "--set", "replicas=2", "--wait")
    assert [ready(namespace.get("Pod", f"w-{index}")) for index in range(2)] == [True, True]
    assert "w-1" in control_plane.kubectl("get", "pods", *where)
    control_plane.helm("uninstall", "r", *where)
    namespace.wait_gone("StatefulSet", "w")


def test_the_scheduler_spreads_pods_over_nodes(
    namespace: Namespace, add_node: Callable[..., Node]
) -> None:
    nodes = {add_node(wait=False).name for _ in range(2)}
    apart = {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "labelSelector": {"matchLabels": {"app": "w"}},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
    }
    namespace.create(service("w"), stateful_set("w", 2, SLEEP, affinity={"podAntiAffinity": apart}))
    assert {namespace.wait_pod(f"w-{index}")["spec"]["nodeName"] for index in range(2)} == nodes


def test_no_process_is_left_of_a_node_that_is_removed(
    control_plane: ControlPlane, namespace: Namespace
) -> None:
    node = control_plane.add_node()
    namespace.create(pod("p", SLEEP))
    namespace.wait_pod("p")
    node.wait_pids(1)
    node.freeze()
    node.remove()
    assert node.pids() == []
    assert not [each for each in control_plane.api.get(PATHS["Node"])["items"] if ready(each)]
