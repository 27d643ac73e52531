"""Whether Kueue can admit a job's pods, from answers of the API server as Kueue documents them."""

import pytest

from elastic.driver.commandline.kubernetes.queue_check import (
    is_managed,
    probe_pod,
    served_version,
    why_inactive,
)


def group(name, version):
    return {"name": name, "preferredVersion": {"groupVersion": "x", "version": version}}


def test_served_version_is_the_preferred_one_of_kueue():
    groups = {"groups": [group("apps", "v1"), group("kueue.x-k8s.io", "v1beta2")]}
    assert served_version(groups) == "v1beta2"
    assert served_version({"groups": [group("visibility.kueue.x-k8s.io", "v1beta1")]}) is None


def test_probe_pod_is_valid_and_names_the_queue():
    validate = pytest.importorskip("kubernetes_validate").validate
    probe = probe_pod("team-a")
    validate(probe, "1.37", strict=True)
    assert probe["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}


def test_pod_is_managed_only_with_the_label_of_kueue():
    probe = probe_pod("team-a")
    assert not is_managed(probe)
    assert not is_managed({"metadata": {}})
    probe["metadata"]["labels"]["kueue.x-k8s.io/managed"] = "true"
    assert is_managed(probe)


def test_inactive_queue_has_a_reason():
    def queue(status):
        condition = {"type": "Active", "status": status, "message": "ClusterQueue is stopped"}
        return {"status": {"conditions": [condition]}}

    assert why_inactive(queue("False")) == "ClusterQueue is stopped"
    assert why_inactive(queue("True")) == why_inactive({}) == ""
