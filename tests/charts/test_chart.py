"""The chart renders valid objects, and refuses invalid values before anything is installed."""

from __future__ import annotations

import base64
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import yaml

from charts.rendering import (
    BASE,
    CHART,
    JOB,
    ROOT,
    Helm,
    Json,
    Objects,
    Refused,
    everywhere,
    merged,
)
from elastic.driver.commandline.agent_cli import AgentOptions, agent_parser
from elastic.driver.commandline.options.flags import parse
from elastic.driver.events import CheckpointMade
from elastic.driver.monitoring.job_view import JobView
from elastic.driver.monitoring.prometheus_metrics import JobMetrics, families
from elastic.driver.monitoring.time_accounting import TimeSpent
from elastic.protocol.messages import Commit
from harness import wording
from harness.program import stdout_of

VERSIONS = [f"1.{minor}" for minor in range(25, 38)]
SOME_VERSIONS = ["1.25", "1.26", "1.37"]
# No schemas of the first two are at hand. `test_jobset_has_only_documented_fields` checks the JobSet.
OTHERS = ("cert-manager.io/v1", "monitoring.coreos.com/v1", "jobset.x-k8s.io/v1alpha2")

GPUS = {"worker": {"gpus": 8, "rdma": {"resource": "rdma/hca", "count": 2}, "ipcLock": True}}
HOST_NETWORK = {"worker": {"hostNetwork": True}}
ETCD = {
    "journal": {
        "kind": "etcd",
        "etcd": {
            "endpoints": ["etcd-0:2379", "etcd-1:2380"],
            "user": "me",
            "passwordSecret": {"name": "etcd"},
            "tlsSecret": "etcd-tls",
            "clientCertificate": True,
        },
    }
}
POLICY = {"networkPolicy": {"enabled": True, "restrictEgress": True}}
WATCHED = {
    "metrics": {"enabled": True, "podMonitor": {"enabled": True}, "dashboard": {"enabled": True}}
}
JOBSET: Json = {
    "jobset": {"enabled": True, "jobs": 2, "exclusiveTopology": "cloud.google.com/gke-nodepool"},
    "worker": {"number": 8},
}
BUDGET = {"disruptionBudget": {"enabled": True}}
EXTRAS: Json = {
    "image": {"tag": "7", "digest": "sha256:" + "a" * 64, "pullSecrets": [{"name": "registry"}]},
    "job": {
        "maxWorkers": 64,
        "workingDir": "/work",
        "checkpointDir": "/data/checkpoints",
        "env": [{"name": "HOME", "value": "/tmp"}],
        "envFrom": [{"secretRef": {"name": "storage"}}],
    },
    "worker": {
        "flags": ["--log-level", "DEBUG"],
        "serviceAccountName": "reader",
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "16Gi"}},
    },
    "driver": {
        "flags": ["--summary"],
        "ttlSecondsAfterFinished": 0,
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "high",
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
    },
    "kueue": {"queue": "training", "priorityClass": "high", "driverQueue": "drivers"},
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
}

# One of each group is used; the matrix has every combination.
JOURNALS = [{"journal": {"kind": kind}} for kind in ("volume", "emptyDir", "none")] + [ETCD]
TLS: list[Json] = [{"tls": {"kind": kind}} for kind in ("none", "chart", "certManager")]
TLS.append({"tls": {"kind": "existing", "existingSecret": "mine"}})
NETWORKS = [{}, HOST_NETWORK, POLICY]
WORKERS: list[Json] = [{}, GPUS]
OPTIONS = [{}, merged(EXTRAS, WATCHED, BUDGET)]
MATRIX = [*itertools.product(JOURNALS, TLS, NETWORKS, WORKERS, OPTIONS)]

HANDFUL: dict[str, tuple[Json, ...]] = {
    "defaults": (),
    "gpus on the node's network": (GPUS, HOST_NETWORK, BUDGET),
    "etcd, policies and chart's certificates": (ETCD, POLICY, TLS[1]),
    "everything": (EXTRAS, WATCHED, BUDGET, POLICY, ETCD, GPUS, TLS[2]),
    "a JobSet": (
        JOBSET,
        GPUS,
        {"kueue": {"queue": "training"}, "driver": {"ttlSecondsAfterFinished": 60}},
    ),
    "no rights": (
        {"rbac": {"create": False}, "serviceAccount": {"create": False, "name": "mine"}},
    ),
}


def invalid(objects: Iterable[Json], version: str) -> list[str]:
    """Return what the API of that version would refuse."""
    import kubernetes_validate

    utils = kubernetes_validate.utils  # otherwise, it would read a megabyte for each object
    utils.schema_contents = _read_once(utils)
    found = []
    for each in objects:
        if each["apiVersion"] not in OTHERS:
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{each['kind']}: {error.message} at {[*error.path]}")
    return found


@functools.cache
def _read_once(utils):
    return functools.cache(utils.schema_contents)


@pytest.fixture(scope="module")
def handful(helm: Helm) -> dict[str, Objects]:
    rendered = helm.render_all(HANDFUL.values(), version="1.37")
    return dict(zip(HANDFUL, rendered, strict=True))


@pytest.fixture(scope="module")
def defaults(handful: dict[str, Objects]) -> Objects:
    return handful["defaults"]


# ---- what Kubernetes takes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SOME_VERSIONS)
@pytest.mark.parametrize("which", HANDFUL)
def test_rendered_objects_are_valid_for_the_api(helm, which, version):
    pytest.importorskip("kubernetes_validate")
    rendered = helm.render(*HANDFUL[which], version=version)
    assert not invalid([*rendered.all, *rendered.jobs()], version)


def test_jobset_has_only_documented_fields(handful):
    """By the models that Kubeflow generates from the schemas. They ignore unknown fields, which are missing then."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    jobset = handful["a JobSet"]["JobSet", "r"]
    known = models.JobsetV1alpha2JobSet.from_dict(jobset)
    assert known.to_dict() == jobset


def test_jobset_replaces_lost_pods_without_restarting_all(handful):
    jobset = handful["a JobSet"]["JobSet", "r"]
    spec = jobset["spec"]
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["driver"]}
    assert spec["ttlSecondsAfterFinished"] == 60
    driver, worker = spec["replicatedJobs"]
    assert driver["replicas"] == 1 and worker["replicas"] == 2
    job = worker["template"]
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == 4
    assert job["spec"]["backoffLimit"] == 2**31 - 1
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    topology = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert job["metadata"]["annotations"] == topology
    assert "annotations" not in driver["template"]["metadata"]


def test_jobset_replaces_only_job_and_stateful_set(helm, handful):
    plain, jobset = helm.render(GPUS, {"worker": {"number": 8}}), handful["a JobSet"]
    assert plain.kinds() - jobset.kinds() == {"Job", "StatefulSet"}
    assert jobset.kinds() - plain.kinds() == {"JobSet"}
    assert jobset.arguments() == plain.arguments()
    assert jobset.pods()[0] == plain.pods()[0]
    for service, pod in zip(("r-driver", "r-workers"), jobset.pods(), strict=True):
        selector = jobset["Service", service]["spec"]["selector"]
        assert selector.items() <= pod["metadata"]["labels"].items()


def test_kueue_label_is_set_on_the_jobset_only(handful):
    queue = "kueue.x-k8s.io/queue-name"
    jobset = handful["a JobSet"]
    assert jobset["JobSet", "r"]["metadata"]["labels"][queue] == "training"
    parts = [each["metadata"]["labels"] for each in (*jobset.jobs(), *jobset.pods())]
    assert all(queue not in labels for labels in parts)


def first_alike(version: str) -> str:
    """Return the first version with the same objects: the templates compare with few versions only."""
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    compared = re.findall(r'semverCompare ">=1\.(\d+)-0" \$?\.Capabilities\.KubeVersion', templates)
    assert len(compared) == templates.count("Capabilities") > 0, "it asks otherwise too"
    before = [minor for minor in map(int, compared) if minor <= int(version.partition(".")[2])]
    return f"1.{max(before)}"


@pytest.fixture(scope="module")
def combinations(helm: Helm) -> Callable[[str], dict[str, Sequence[Json]]]:
    """Return every object of every combination for a version, as JSON, each once; and values that create it."""

    @functools.cache
    def of_first(version: str) -> dict[str, Sequence[Json]]:
        found: dict[str, Sequence[Json]] = {}
        for values, objects in zip(MATRIX, helm.render_all(MATRIX, version=version), strict=True):
            for each in objects.all:
                found.setdefault(json.dumps(each, sort_keys=True), values)
        return found

    return lambda version: of_first(first_alike(version))


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_rendered_objects_of_every_combination_are_valid_for_the_api(combinations, version):
    pytest.importorskip("kubernetes_validate")
    for text, values in combinations(version).items():
        assert not invalid([json.loads(text)], version), values


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_versions_with_the_same_features_get_the_same_objects(helm, version):
    first, own = (
        helm.render(*HANDFUL["everything"], version=v) for v in (first_alike(version), version)
    )
    assert first.kinds() == own.kinds()
    for kind, name in ((each["kind"], each["metadata"]["name"]) for each in own.all):
        assert kind == "Secret" or first[kind, name] == own[kind, name]  # its bytes are random


def test_cluster_of_1_20_gets_only_fields_of_its_version(helm):
    old, new = (helm.render(BUDGET, version=version) for version in ("1.20", "1.26"))
    assert "podFailurePolicy" not in old["Job", "r-driver"]["spec"]
    assert "podFailurePolicy" in new["Job", "r-driver"]["spec"]
    assert old["PodDisruptionBudget", "r-worker"]["apiVersion"] == "policy/v1beta1"
    assert new["PodDisruptionBudget", "r-worker"]["apiVersion"] == "policy/v1"


@pytest.mark.parametrize("which", HANDFUL)
def test_every_port_has_a_protocol(handful, which):
    """Some versions merge lists of ports by it."""
    ports = [
        port
        for value in everywhere(handful[which].all)
        if isinstance(value, dict)
        for port in (value.get("ports") or [])
    ]
    assert ports
    assert all(port["protocol"] in ("TCP", "UDP") for port in ports)


@pytest.mark.parametrize("which", HANDFUL)
def test_every_object_has_owner_labels(handful, which):
    for each in handful[which].all:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "hvd-elastic"
        assert labels["app.kubernetes.io/instance"] == "r"
        assert labels["app.kubernetes.io/component"] in ("driver", "worker")
        assert {"app.kubernetes.io/managed-by", "helm.sh/chart"} <= labels.keys()


def test_selectors_match_only_their_pods(defaults):
    driver, worker = (pod["metadata"]["labels"].items() for pod in defaults.pods())
    to_driver = defaults["Service", "r-driver"]["spec"]["selector"].items()
    to_workers = defaults["Service", "r-workers"]["spec"]["selector"].items()
    assert to_driver <= driver and not to_driver <= worker
    assert to_workers <= worker and not to_workers <= driver


def test_pod_labels_do_not_contain_the_chart_version(handful):
    """A Job's pods can't be changed."""
    assert all(
        "helm.sh/chart" not in pod["metadata"]["labels"] for pod in handful["everything"].pods()
    )


def test_number_of_workers_does_not_change_the_driver(helm):
    few, many = (helm.render({"worker": {"number": number}}) for number in (2, 8))
    assert few["Job", "r-driver"] == many["Job", "r-driver"]


def test_pods_keep_to_the_restricted_standard(defaults):
    for pod in defaults.pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in spec["containers"]:
            rights = container["securityContext"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True


def test_service_links_are_disabled_in_all_pods(defaults):
    """A service named elastic would make variables ELASTIC_*."""
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in defaults.pods())


# ---- what is run -----------------------------------------------------------------------------------------------------


def test_default_arguments_of_driver_and_agents_are_rendered(defaults):
    driver, agent = defaults.arguments()
    assert " ".join(driver) == (
        "--kubernetes --job r --min-np 1 --secret-file /run/hvd-elastic/secret/job.secret --driver-port 4711"
        " --journal /run/hvd-elastic/journal/journal --resume -- python train.py"
    )
    assert " ".join(agent) == (
        "agent --job r --host $(POD_IP) --driver r-driver:4711"
        " --secret-file /run/hvd-elastic/secret/job.secret --slots 1"
    )


@pytest.mark.parametrize("which", HANDFUL)
def test_rendered_flags_are_accepted_by_elasticrun(handful, which):
    driver, agent = handful[which].arguments()
    options = parse(driver)
    assert options.kubernetes and options.job_name == "r"
    assert options.command == ["python", "train.py"]
    agents = agent_parser().parse_args(agent[1:], namespace=AgentOptions())
    assert agents.slots == str(8 if GPUS in HANDFUL[which] else 1)
    assert {field.name for field in dataclasses.fields(agents)} >= vars(agents).keys(), "unknown"


def test_agents_find_the_driver_in_etcd_when_the_journal_is_in_etcd(helm):
    driver, agent = (" ".join(each) for each in helm.render(ETCD).arguments())
    members = "--etcd etcd-0:2379,etcd-1:2380 --etcd-user me --etcd-ca /run/hvd-elastic/etcd/ca.crt"
    assert members in driver and members in agent
    assert "--resume" in driver
    assert "--journal" not in driver and "--driver " not in agent


@pytest.mark.parametrize("tls", TLS, ids=lambda tls: tls["tls"]["kind"])
def test_both_ends_use_tls_or_neither(helm, tls):
    rendered = helm.render(tls)
    secret = tls["tls"].get("existingSecret", "r-tls")
    for pod, flags in zip(rendered.pods(), rendered.arguments(), strict=True):
        volumes = {each["name"]: each.get("secret") for each in pod["spec"]["volumes"]}
        if tls["tls"]["kind"] == "none":
            assert "--tls-cert" not in flags and "tls" not in volumes
        else:
            assert volumes["tls"]["secretName"] == secret
            for flag, file in (("cert", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt")):
                assert flags[flags.index(f"--tls-{flag}") + 1] == f"/run/hvd-elastic/tls/{file}"


def test_slots_are_derived_from_gpus_and_passed_to_the_driver_when_different(helm):
    """It counts the GPUs of a pod itself, or accepts a number."""
    for values, slots, told in (
        ({}, "1", False),
        ({"worker": {"gpus": 4}}, "4", False),
        ({"resources": {"limits": {"nvidia.com/gpu": 2}}}, "2", False),
        ({"worker": {"gpus": 4, "slots": 4}}, "4", False),
        ({"worker": {"gpus": 4, "slots": 8}}, "8", True),
        ({"worker": {"gpus": 4, "gpuResource": "nvidia.com/mig-1g.5gb"}}, "4", True),
    ):
        driver, agent = helm.render(values).arguments()
        assert agent[agent.index("--slots") + 1] == slots, values
        assert ("--slots-per-host" in driver) == told, values
        if told:
            assert driver[driver.index("--slots-per-host") + 1] == slots


def test_values_of_the_user_are_set_in_the_pods(handful):
    everything = handful["everything"]
    driver, worker = everything.containers()
    assert worker["image"] == driver["image"] == "hvd-elastic:7@sha256:" + "a" * 64
    assert worker["resources"]["limits"] == {
        "memory": "16Gi",
        "nvidia.com/gpu": "8",
        "rdma/hca": "2",
    }
    assert worker["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert driver["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for container in (driver, worker):
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
        assert container["workingDir"] == "/work"
    assert "--max-np 64" in " ".join(driver["args"])
    assert everything["Job", "r-driver"]["spec"]["ttlSecondsAfterFinished"] == 0


def test_kueue_admits_each_worker_pod_and_not_the_stateful_set(handful):
    """Kueue's webhook rejects each change of the replicas of a StatefulSet that has the label itself."""
    queue, priority = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
    queued, plain = handful["everything"], handful["defaults"]
    driver, worker = (pod["metadata"]["labels"] for pod in queued.pods())
    assert worker[queue] == "training" and worker[priority] == "high"
    assert (
        queue not in driver and queue not in queued["StatefulSet", "r-worker"]["metadata"]["labels"]
    )
    assert queued["Job", "r-driver"]["metadata"]["labels"][queue] == "drivers"
    assert queue not in plain.text


def test_pod_on_the_host_network_has_its_node_exclusively(helm):
    mine: Json = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    _, worker = helm.render(
        HOST_NETWORK, {"worker": {"affinity": {"podAntiAffinity": mine}}}
    ).pods()
    assert worker["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    alone = worker["spec"]["affinity"]["podAntiAffinity"]
    assert mine.keys() <= alone.keys(), "what the user gave stays"
    [term] = alone["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()


def test_disruption_budget_keeps_the_minimum_number_of_workers(helm):
    values = {"job": {"minWorkers": 17}, "worker": {"number": 4, "gpus": 8}}
    budget = helm.render(values, BUDGET)["PodDisruptionBudget", "r-worker"]
    assert budget["spec"]["minAvailable"] == 3


# ---- rights and secrets ----------------------------------------------------------------------------------------------


def test_driver_has_only_the_required_permissions(helm, defaults):
    rights = [(rule["resources"], rule["verbs"]) for rule in defaults["Role", "r-driver"]["rules"]]
    assert rights == [(["pods"], ["list", "watch", "delete"])]
    least = {"driver": {"removeStuckPods": False}, "rbac": {"nodes": False}}
    fewer = helm.render(least)
    [pods] = fewer["Role", "r-driver"]["rules"]
    assert pods["verbs"] == ["list", "watch"]
    assert "ClusterRole" not in fewer.kinds()
    driver, worker = (pod["spec"]["automountServiceAccountToken"] for pod in defaults.pods())
    assert driver and not worker


def test_secret_is_generated_unless_an_existing_one_is_given(helm, defaults):
    data = defaults["Secret", "r-job"]["data"]["job.secret"]
    assert re.fullmatch(rb"[0-9a-f]{64}", base64.b64decode(data))
    assert helm.render()["Secret", "r-job"]["data"]["job.secret"] != data
    given = helm.render({"job": {"existingSecret": "mine"}})
    assert "Secret" not in given.kinds()
    for pod in given.pods():
        [secret] = [each["secret"] for each in pod["spec"]["volumes"] if "secret" in each]
        assert secret["secretName"] == "mine" and secret["defaultMode"] == 0o440


def test_no_secret_is_part_of_a_pod(helm):
    rendered = helm.render(EXTRAS, ETCD, TLS[1])
    secrets = [each for each in rendered.all if each["kind"] == "Secret"]
    assert len(secrets) == 2
    pods = json.dumps(rendered.pods())
    for data in (text for each in secrets for text in each["data"].values()):
        assert data not in pods
        assert base64.b64decode(data).decode() not in pods


def test_restricted_egress_lets_only_the_driver_reach_the_api_server(helm):
    rendered = helm.render(POLICY, ETCD)
    ports = {
        name: {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])}
        for name in ("driver", "worker")
        for policy in [rendered["NetworkPolicy", f"r-{name}"]]
    }
    assert ports == {"driver": {443, 6443}, "worker": {53, 2379, 2380}}


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Json, str]] = {
    "no command": ({"job": {"command": []}}, "job.command is empty; give"),
    "too few pods": ({"job": {"minWorkers": 3}}, "job.minWorkers is 3, but 2 pods of 1 make 2"),
    "max below min": ({"job": {"minWorkers": 2, "maxWorkers": 1}}, "job.maxWorkers is 1, but"),
    "a folder of its own": (
        {"job": {"checkpointDir": "saved"}},
        "job.checkpointDir is saved, a folder of each pod's own; give",
    ),
    "a tag twice": (
        {"image": {"repository": "a:5000/train:1"}},
        "image.repository is a:5000/train:1, with a tag; give",
    ),
    "a variable of ours": ({"job": {"env": [{"name": "POD_IP"}]}}, "job.env gives POD_IP"),
    "an open secret": (
        {"job": {"env": [{"name": "ELASTIC_JOB_SECRET"}]}},
        "put the secret into job.existingSecret",
    ),
    "an open password": (
        {"job": {"env": [{"name": "ELASTIC_ETCD_PASSWORD", "value": "x"}]}},
        "name its Secret in journal.etcd.passwordSecret",
    ),
    "a flag of ours": ({"driver": {"flags": ["--job=x"]}}, "--job=x stands in driver.flags"),
    "an end of flags": ({"driver": {"flags": ["--"]}}, "-- stands in driver.flags"),
    "GPUs twice": (
        {"worker": {"gpus": 1, "resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "nvidia.com/gpu is in worker.gpus and",
    ),
    "RDMA of none": ({"worker": {"rdma": {"resource": "rdma/a", "count": 0}}}, "with a count of 0"),
    "shared nodes": ({"worker": {"hostNetwork": True, "onePerNode": False}}, "share ports; leave"),
    "policy of nodes": (merged(HOST_NETWORK, POLICY), "A NetworkPolicy can't name pods"),
    "journal": ({"journal": {"kind": "file"}}, 'journal.kind is "file"; give one of volume,'),
    "etcd without members": (
        {"journal": {"kind": "etcd"}},
        "journal.etcd.endpoints is empty; give",
    ),
    "members without etcd": (merged(ETCD, {"journal": {"kind": "none"}}), "is not etcd; set it to"),
    "a claim unused": (
        {"journal": {"kind": "none", "existingClaim": "a"}},
        "is not volume; set it",
    ),
    "no password": (
        merged(ETCD, {"journal": {"etcd": {"passwordSecret": {"name": ""}}}}),
        "journal.etcd.user is given without a password; give",
    ),
    "no certificate": (
        merged(ETCD, {"journal": {"etcd": {"tlsSecret": ""}}}),
        "but journal.etcd.tlsSecret is empty; give",
    ),
    "tls": ({"tls": {"kind": "yes"}}, 'tls.kind is "yes"; give one of none, certManager'),
    "no certificates": ({"tls": {"kind": "existing"}}, "tls.existingSecret is empty; name"),
    "certificates unused": ({"tls": {"existingSecret": "a"}}, "tls.kind is not existing; set it"),
    "no metrics": (
        {"metrics": {"podMonitor": {"enabled": True}}},
        "need metrics; set metrics.enabled",
    ),
    "one port twice": ({"metrics": {"port": 4711}}, "metrics.port is 4711, which"),
    "no eviction ever": (merged(BUDGET, {"disruptionBudget": {"minAvailable": 3}}), "lower it, or"),
    "priority without a queue": (
        {"kueue": {"priorityClass": "high"}},
        "kueue.queue is empty; give the queue",
    ),
    "an uneven JobSet": (merged(JOBSET, {"worker": {"number": 7}}), "give a multiple of"),
    "a driver in another queue": (
        merged(JOBSET, {"kueue": {"queue": "a", "driverQueue": "b"}}),
        "leave it out, or turn",
    ),
    "a topology without a JobSet": (
        {"jobset": {"exclusiveTopology": "rack"}},
        "jobset.enabled is off; turn it on",
    ),
    "no account": ({"serviceAccount": {"create": False}}, "serviceAccount.name is empty; name"),
}

OLD: dict[str, tuple[Json, str]] = {
    "ssh": ({"ssh": {"port": 22, "useSecrets": True, "hostKey": "a"}}, "leave it out"),
    "useHostNetwork": ({"useHostNetwork": False}, "use worker.hostNetwork"),
    "useHostPID": ({"useHostPID": False}, "leave it out"),
    "annotations": ({"annotations": {}}, "use worker.podAnnotations"),
    "capabilities": ({"capabilities": {}}, "use worker.ipcLock"),
    "privileged": ({"privileged": True}, "use securityContext.privileged"),
    "serviceType": ({"serviceType": "NodePort"}, "leave it out"),
    "env": ({"env": {"A": "b"}}, "use job.env"),
    "args": ({"args": ["a"]}, "use job.command"),
    "command": ({"command": ["a"]}, "use job.command"),
    "master": ({"master": {"args": ["mpirun"]}}, "use job.command"),
    "worker.image": ({"worker": {"image": {"repository": "a"}}}, "use image"),
    "worker.env": ({"worker": {"env": {"A": "b"}}}, "use job.env"),
    "worker.command": ({"worker": {"command": "a"}}, "use job.command"),
    "worker.args": ({"worker": {"args": ["a"]}}, "use job.command"),
    "worker.privileged": ({"worker": {"privileged": True}}, "use securityContext.privileged"),
}


def test_all_errors_are_reported_together(helm):
    """Users of Horovod's chart have a whole file of them."""
    values = merged(*(values for values, _ in OLD.values()))
    with pytest.raises(Refused) as refused:
        helm.render(values)
    untold = [key for key in OLD if (wording.VALUE_HOROVODS_CHART % key) not in str(refused.value)]
    assert untold == []


@pytest.mark.parametrize("which", REFUSED)
def test_invalid_values_are_refused_in_one_sentence(helm, which):
    values, told = REFUSED[which]
    with pytest.raises(Refused) as refused:
        helm.render(values)
    sentence = str(refused.value).rpartition("): ")[2].split("\n")[0]
    assert told in sentence
    assert re.fullmatch(r"[^\n]+[;,] [^\n]+\.", sentence), "what is wrong; what to do"


@pytest.mark.parametrize("name", ["a" * 46, "a.b", "7a"])
def test_release_name_that_is_too_long_is_refused(helm, name):
    with pytest.raises(Refused, match=wording.GIVE_RELEASE_SHORTER):
        helm.render(release=name)
    helm.render(release="a" * 45)
    with pytest.raises(Refused, match=wording.GIVE_RELEASE_SHORTER):
        helm.render(JOBSET, release="a" * 41)
    helm.render(JOBSET, release="a" * 40)


@pytest.mark.parametrize("name", ["true", "null", "on", "e5"])
def test_names_that_look_like_yaml_numbers_or_booleans_are_quoted(helm, name):
    odd: Json = {
        "job": {"existingSecret": "1e5", "workingDir": "0x10"},
        "worker": {"shm": "1073741824", "priorityClassName": "yes", "serviceAccountName": "null"},
        "kueue": {"queue": "12", "driverQueue": "1e5"},
    }
    rendered = helm.render(odd, release=name)
    instance = "app.kubernetes.io/instance"
    assert all(each["metadata"]["labels"][instance] == name for each in rendered.all)
    driver, worker = rendered.pods()
    assert worker["spec"]["serviceAccountName"] == "null"
    assert worker["spec"]["priorityClassName"] == "yes"
    volumes = {each["name"]: each for each in worker["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "1073741824"
    assert volumes["job-secret"]["secret"]["secretName"] == "1e5"
    assert driver["spec"]["containers"][0]["workingDir"] == "0x10"
    labels = rendered["Job", f"{name}-driver"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "1e5"
    assert worker["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "12"


def test_quantities_are_texts(helm):
    """Server-side apply at 1.20 accepts no numbers."""
    numbers: Json = {"requests": {"cpu": 2, "memory": 20_000_000_000}, "limits": {"cpu": 2.5}}
    given = {"worker": {"gpus": 8, "resources": numbers}, "driver": {"resources": numbers}}
    driver, worker = (each["resources"] for each in helm.render(given).containers())
    assert worker["limits"] == {"cpu": "2.5", "nvidia.com/gpu": "8"}
    assert driver["limits"] == {"cpu": "2.5"}
    assert worker["requests"] == driver["requests"]
    assert worker["requests"]["cpu"] == "2"
    assert float(worker["requests"]["memory"]) == 20e9


@pytest.mark.parametrize("key", OLD)
def test_value_of_horovods_chart_is_refused_with_its_replacement(helm, key):
    values, told = OLD[key]
    with pytest.raises(Refused) as refused:
        helm.render(values)
    assert (wording.VALUE_HOROVODS_CHART_2 % key) in str(refused.value)
    assert told in str(refused.value)


def test_further_values_of_horovods_chart_are_accepted(helm):
    rendered = helm.render(
        {
            "worker": {"number": 5, "podManagementPolicy": "OrderedReady"},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "volumes": [{"name": "data", "emptyDir": {}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
    )
    spec = rendered["StatefulSet", "r-worker"]["spec"]
    assert spec["replicas"] == 5 and spec["podManagementPolicy"] == "OrderedReady"
    driver, worker = rendered.containers()
    assert worker["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert "limits" not in driver["resources"], "it needs no GPU"
    assert {"name": "data", "mountPath": "/data"} in worker["volumeMounts"]


@pytest.mark.parametrize(
    "values",
    [
        {"wokrer": {}},
        {"worker": {"nubmer": 3}},
        {"worker": {"number": "3"}},
        {"worker": {"number": -1}},
        {"worker": {"number": 1.5}},
        {"worker": {"updateStrategy": "Sometimes"}},
        {"worker": {"shm": "much"}},
        {"worker": {"podLabels": {"app.kubernetes.io/component": "driver"}}},
        {"job": {"command": "python train.py"}},
        {"job": {"minWorkers": 0}},
        {"job": {"env": {"A": "b"}}},
        {"driver": {"backoffLimit": None, "ttl": 1}},
        {"image": {"digest": "latest"}},
        {"image": {"repository": "a b"}},
        {"image": {"repository": ""}},
        {"image": {"tag": "a:b"}},
        {"worker": {"number": 100001}},
        {"worker": {"number": 10**20}},
        {"worker": {"gpus": 10**12}},
        {"job": {"minWorkers": 3 * 10**9}},
        {"journal": {"etcd": {"endpoint": "a"}}},
        {"metrics": {"port": 70000}},
        {"worker": {"resources": {"limits": {"memory": "16GB"}}}},
        {"worker": {"resources": {"requests": {"cpu": -1}}}},
        {"worker": {"gpuResource": "gpu"}},
        {"worker": {"rdma": {"resource": "hca"}}},
        {"job": {"existingSecret": "My_Secret"}},
        {"serviceAccount": {"name": "Trainer"}},
        {"journal": {"accessModes": ["Sometimes"]}},
        {"rbac": {"nodes": "yes"}},
    ],
    ids=str,
)
def test_unknown_values_and_wrong_types_are_refused(helm, values):
    with pytest.raises(Refused, match="don't meet the specifications of the schema"):
        helm.render(values)


# ---- files that belong together --------------------------------------------------------------------------------------


def test_every_value_has_a_comment():
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())
    lines = text.splitlines()

    def uncommented(part: yaml.MappingNode, known: Json) -> list[str]:
        found = []
        for key, value in part.value:
            each = known["properties"][key.value]
            if "properties" in each:
                found += uncommented(value, each)
            elif not lines[key.start_mark.line - 1].lstrip().startswith("#"):
                found.append(key.value)
        return found

    values = yaml.compose(text)
    assert isinstance(values, yaml.MappingNode)
    assert not uncommented(values, schema)


def test_schema_contains_the_values_of_the_chart():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    old = {"$ref": "#/$defs/old"}

    def compare(part: Json, known: Json, where: str) -> None:
        properties = known["properties"]
        names = {name for name, each in properties.items() if each != old} - {"global"}
        assert names == part.keys(), where
        for name, each in properties.items():
            if "properties" in each:
                compare(part[name], each, f"{where}{name}.")

    compare(values, schema, "")
    sentences = (CHART / "templates" / "_old_values.tpl").read_text()
    refused = {name for name, each in schema["properties"].items() if each == old}
    refused |= {
        f"worker.{name}"
        for name, each in schema["properties"]["worker"]["properties"].items()
        if each == old
    }
    assert refused == OLD.keys() == set(re.findall(r"^([\w.]+): ", sentences, re.MULTILINE))


def test_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    [version] = re.findall(
        r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert chart["version"] == chart["appVersion"] == version


def test_the_dashboard_shows_only_metrics_that_exist():
    figures = JobMetrics(TimeSpent(JobView()))
    figures.view.note(CheckpointMade(Commit(0, 0)), [], 1.0)
    known = set()
    for family in families(figures):
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        known |= {family.name + end for end in ends.get(family.type, [""])}
    shown = set(re.findall(r"\belastic_\w+", (CHART / "dashboard.json").read_text()))
    assert shown <= known and len(shown) > 10


def rendered_base(helm: Helm) -> dict[str, str]:
    """Return the content of the base by file: without parts that only helm needs."""
    values = merged(JOB, {"job": {"existingSecret": "hvd-elastic-job"}})
    files: dict[str, str] = {}
    for part in re.split(r"^---\n", helm.text(values, release="hvd-elastic"), flags=re.MULTILINE):
        if source := re.match(r"# Source: .*/(.*)\n", part):
            helms = r"^ *helm.sh/chart: .*\n|^  annotations:\n    hvd-elastic/pod: .*\n"
            text = re.sub(helms, "", part[source.end() :], flags=re.MULTILINE)
            text = text.replace("managed-by: Helm", "managed-by: kustomize").strip() + "\n"
            files[source[1]] = files[source[1]] + "---\n" + text if source[1] in files else text
    return files


def test_kustomize_base_equals_the_output_of_helm(helm, rewrite):
    rendered = rendered_base(helm)
    if rewrite:
        for name, text in rendered.items():
            (BASE / name).write_text(text)
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    there = {file.name: file.read_text() for file in BASE.glob("*.yaml")}
    assert sorted(listed) == sorted(rendered) == sorted(there.keys() - {"kustomization.yaml"})
    for name, text in rendered.items():
        assert Objects(there[name]).all == Objects(text).all, f"{name}: run with --rewrite"


def test_overlay_of_the_kustomize_base_sets_its_namespace(kubectl, tmp_path: Path):
    base = tmp_path / "base"
    base.symlink_to(BASE)
    text = (BASE / "kustomization.yaml").read_text()
    shown = re.findall(r"^#   (.*)$", text[text.index("#   resources:") :], re.MULTILINE)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("\n".join(shown))
    built = Objects(stdout_of(kubectl, "kustomize", overlay, timeout=60))
    assert built["StatefulSet", "hvd-elastic-worker"]["metadata"]["namespace"] == "training"
    assert built["StatefulSet", "hvd-elastic-worker"]["spec"]["replicas"] == 8
    assert all(each["image"] == "registry.example.com/me/train:7" for each in built.containers())
    assert built.arguments()[0][-2:] == ["python", "my_train.py"]
    subjects = [each["subjects"] for each in built.all if "subjects" in each]
    assert [subject["namespace"] for [subject] in subjects] == ["training", "training"]
