"""The Jobs of a JobSet train: the real controller of Jobs replaces lost pods, and the other workers continue.

JobSet's controller needs a newer Kubernetes. The test creates the Jobs that it would create from the chart's JobSet.
Kubernetes 1.20 ignores their completion mode.
"""

from __future__ import annotations

import pytest

from charts.rendering import Objects
from charts.test_kubeflow import applied, manifest
from cluster.api import ready
from cluster.control_plane import Node, eventually
from cluster.release import CHART, SCRIPT, Release
from harness import wording

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly, pytest.mark.timeout(300)]


def install(release: Release, workers: int) -> None:
    values = release.values(workers, jobset={"enabled": True})
    flags = ("-f", values, "--kube-version", "1.20", "--skip-tests")
    rendered = Objects(release.helm("template", "job", CHART, *flags))
    jobs = rendered.jobs()
    for job in jobs:
        job["metadata"]["name"] = f"job-{job['metadata']['name']}-0"
    others = [each for each in rendered.all if each["kind"] != "JobSet"]
    cluster_wide = [each for each in others if each["kind"].startswith("ClusterRole")]
    release.namespace.create(*(each for each in others if each not in cluster_wide), *jobs)


def worker_pods(release: Release) -> list[str]:
    return sorted(
        pod["metadata"]["name"]
        for pod in release.namespace.list("Pod", "app.kubernetes.io/component=worker")
        if ready(pod) and "deletionTimestamp" not in pod["metadata"]
    )


def test_lost_pod_of_a_jobset_is_replaced_and_the_other_pods_continue(
    release: Release, nodes: list[Node]
) -> None:
    install(release, 2)
    release.until(2)
    before = worker_pods(release)
    assert len(before) == 2
    release.namespace.delete("Pod", before[0])
    release.until(1, more=1)
    release.until(2)
    eventually(lambda: len(worker_pods(release)) == 2, "both pods are ready", 60.0)
    assert before[1] in worker_pods(release), "the other pod was replaced, too"
    assert wording.GOES_AWAY in release.said() and wording.RECOVERED not in release.said()
    assert "2 of 2" in release.k8s_says("status", "job")
    assert "--jobset" in release.k8s_refuses("scale", "job", "3")
    (release.folder / "stop").touch()
    release.namespace.wait(
        "Job", "job-driver-0", lambda job: job and job["status"].get("succeeded") == 1
    )
    release.nothing_repeated()


def test_killed_worker_pod_of_a_jobset_is_restarted_in_place(
    release: Release, nodes: list[Node]
) -> None:
    install(release, 2)
    release.until(2)
    before = worker_pods(release)
    release.kill(before[0])
    release.until(2, more=100)
    assert worker_pods(release) == before
    (release.folder / "stop").touch()
    release.namespace.wait(
        "Job", "job-driver-0", lambda job: job and job["status"].get("succeeded") == 1
    )


def test_driver_of_a_jobset_is_replaced_and_no_step_fails(
    release: Release, nodes: list[Node]
) -> None:
    install(release, 2)
    release.until(2)
    release.replace_driver(grace_s=None)
    (release.folder / "stop").touch()
    release.namespace.wait(
        "Job", "job-driver-0", lambda job: job and job["status"].get("succeeded") == 1
    )
    release.nothing_repeated()


def test_trainjob_trains_with_the_runtime_for_kubeflow(release: Release, nodes: list[Node]) -> None:
    """The test creates the Jobs and the Service that Trainer and JobSet would create."""
    runtime, trainjob = manifest("runtime.yaml"), manifest("trainjob.yaml")
    trainjob["spec"]["trainer"] |= {"args": ["python", str(SCRIPT), "/steps"], "numNodes": 2}
    trainjob["spec"]["trainer"]["resourcesPerNode"] = {}
    spec = applied(runtime, trainjob)["spec"]["template"]["spec"]
    folder = {"name": "steps", "hostPath": {"path": str(release.folder)}}
    jobs = []
    for part in spec["replicatedJobs"]:
        job = part["template"]
        job["spec"].pop("podFailurePolicy", None)  # unknown to 1.20
        template = job["spec"]["template"]
        names = {"jobset": "job", "replicatedjob": part["name"]}
        labels = {f"jobset.sigs.k8s.io/{key}-name": value for key, value in names.items()}
        template["metadata"] = {"labels": labels}
        pod = template["spec"]
        pod |= {"subdomain": "job", "hostname": f"job-{part['name']}-0-0"}
        pod["securityContext"] = {"runAsUser": 0}  # the interpreter may be readable for root only
        pod["terminationGracePeriodSeconds"] = 10
        pod["volumes"] += [folder, {"name": "journal", "emptyDir": {}}]
        pod["containers"][0]["volumeMounts"].append({"name": "steps", "mountPath": "/steps"})
        name = {"name": f"job-{part['name']}-0"}
        jobs.append(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": name, "spec": job["spec"]}
        )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "job"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"jobset.sigs.k8s.io/jobset-name": "job"},
        },
    }
    account = "hvd-elastic-driver"
    named = f"{release.namespace.name}:{account}"
    for words in (
        f"serviceaccount {account}",
        f"role {account} --verb=list,watch,delete --resource=pods",
        f"rolebinding {account} --role={account} --serviceaccount={named}",
        f"secret generic hvd-elastic-job --from-literal=job.secret={'12' * 32}",
    ):
        release.plane.kubectl("-n", release.namespace.name, "create", *words.split())
    release.namespace.create(service, *jobs)
    release.until(2)
    pods = release.namespace.list("Pod", "jobset.sigs.k8s.io/replicatedjob-name=node")
    release.namespace.delete("Pod", pods[0]["metadata"]["name"])
    release.until(1, more=1)
    release.until(2)
    (release.folder / "stop").touch()
    release.namespace.wait(
        "Job", "job-driver-0", lambda job: job and job["status"].get("succeeded") == 1
    )
    release.nothing_repeated()
