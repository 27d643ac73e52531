"""The runtime for Kubeflow Trainer: its fields are documented ones, and a TrainJob gives it a program and pods."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from charts.rendering import ROOT, Helm
from charts.test_chart import invalid
from elastic.driver.commandline.agent_cli import AgentOptions, agent_parser
from elastic.driver.commandline.options.flags import parse
from elastic.driver.discovery.kubernetes.pod_program import program_of

FOLDER = ROOT / "charts" / "kubeflow"


def manifest(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture
def runtime() -> Any:
    return manifest("runtime.yaml")


@pytest.fixture
def trainjob() -> Any:
    return manifest("trainjob.yaml")


def job(runtime: Any, name: str) -> Any:
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return next(each["template"] for each in jobs if each["name"] == name)


def pod(runtime: Any, name: str) -> Any:
    return job(runtime, name)["spec"]["template"]["spec"]


def applied(runtime: Any, trainjob: Any) -> Any:
    """Return the runtime with the trainer of a TrainJob, as Kubeflow Trainer documents it.

    Image, command, args and resources apply to containers named ``node`` of Jobs with labels.
    """
    made = copy.deepcopy(runtime)
    trainer = trainjob["spec"]["trainer"]
    for each in made["spec"]["template"]["spec"]["replicatedJobs"]:
        labels = each["template"].get("metadata", {}).get("labels", {})
        if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") == "trainer":
            for field in ("parallelism", "completions"):
                each["template"]["spec"][field] = trainer["numNodes"]
        for container in each["template"]["spec"]["template"]["spec"]["containers"]:
            if labels and container["name"] == "node":
                fields = {
                    key: trainer[key] for key in ("image", "command", "args") if key in trainer
                }
                container |= fields | {"resources": trainer["resourcesPerNode"]}
    return made


def test_manifests_have_only_documented_fields(runtime, trainjob):
    """By Kubeflow's models of its schemas. They ignore unknown fields, which are missing then."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for kind, written in (
        (models.TrainerV1alpha1ClusterTrainingRuntime, runtime),
        (models.TrainerV1alpha1TrainJob, trainjob),
    ):
        assert kind.from_dict(written).to_dict() == written


@pytest.mark.parametrize("version", ["1.31", "1.37"])  # Trainer needs a recent version
def test_rendered_jobs_are_valid_for_the_api(runtime, trainjob, version):
    pytest.importorskip("kubernetes_validate")
    made = applied(runtime, trainjob)
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "spec": job(made, name)["spec"]}
        | {"metadata": {"name": name}}
        for name in ("driver", "node")
    ]
    for each in jobs:  # JobSet's controller adds the volume
        each["spec"]["template"]["spec"]["volumes"].append({"name": "journal", "emptyDir": {}})
    assert not invalid(jobs, version)


def test_trainjob_gives_the_worker_pods_image_program_and_number(runtime, trainjob):
    made = applied(runtime, trainjob)
    [node] = pod(made, "node")["containers"]
    assert node["image"] == trainjob["spec"]["trainer"]["image"]
    assert job(made, "node")["spec"]["parallelism"] == 4
    assert node["resources"]["limits"]["nvidia.com/gpu"] == "8"
    found = {"metadata": {"name": "bert-node-0-0-x7k2p"}, "spec": pod(made, "node")}
    assert program_of(found) == ["python", "/train/train.py"]
    assert pod(made, "driver") == pod(runtime, "driver")
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_flags_of_the_runtime_are_accepted_by_elasticrun(runtime):
    [driver], [agent] = (pod(runtime, name)["containers"] for name in ("driver", "node"))
    options = parse(driver["args"])
    assert options.kubernetes and options.program_from_pods and options.command == []
    selector = (
        "jobset.sigs.k8s.io/jobset-name=$(JOB_NAME),jobset.sigs.k8s.io/replicatedjob-name=node"
    )
    assert options.kubernetes_selector == selector
    parser = agent_parser()
    own, program = parser.split(agent["command"][2:])
    found = parser.parse_args(own, namespace=AgentOptions())
    assert found.drivers == ["$(JOB_NAME)-driver-0-0.$(JOB_NAME):4711"] and program == []


def test_lost_pod_is_replaced_without_restarting_other_pods(runtime):
    spec = runtime["spec"]["template"]["spec"]
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["driver"]
    assert job(runtime, "node")["spec"]["backoffLimit"] == 2**31 - 1
    assert pod(runtime, "node")["restartPolicy"] == "OnFailure"
    claims = [each["metadata"]["name"] for each in spec["volumeClaimPolicies"][0]["templates"]]
    [driver] = pod(runtime, "driver")["containers"]
    assert claims == ["journal"]
    assert "journal" in {each["name"] for each in driver["volumeMounts"]}


def test_pods_are_as_restricted_as_pods_of_the_chart(runtime, helm: Helm):
    chart = helm.render().pods()
    for name, template in zip(("driver", "node"), chart, strict=True):
        ours, theirs = pod(runtime, name), template["spec"]
        assert ours["securityContext"] == theirs["securityContext"]
        assert ours["enableServiceLinks"] is theirs["enableServiceLinks"] is False
        assert ours["terminationGracePeriodSeconds"] == theirs["terminationGracePeriodSeconds"]
        [own], [other] = ours["containers"], theirs["containers"]
        assert own["securityContext"] == other["securityContext"]
        assert own["image"] == other["image"]


def test_driver_and_workers_share_the_secret_of_the_namespace(runtime):
    for name in ("driver", "node"):
        volumes = {each["name"]: each for each in pod(runtime, name)["volumes"]}
        assert volumes["job-secret"]["secret"]["secretName"] == "hvd-elastic-job"
    assert pod(runtime, "driver")["serviceAccountName"] == "hvd-elastic-driver"
