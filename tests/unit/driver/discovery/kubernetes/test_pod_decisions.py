"""State of the pods: hosts, announced ends, and pods that must be deleted by force."""

import pytest

from elastic.driver.discovery.kubernetes.pod_decisions import PodEnding, Pods, differences
from harness.golden import recorded
from harness.kubernetes_objects import node, pod

A, B, C = "10.0.0.6", "10.0.0.7", "10.0.0.8"


def of(*objects, slots=None):
    pods = Pods(slots)
    pods.listed(objects)
    return pods


def test_pod_is_a_host_only_while_running():
    pods = of(pod("w-0", phase="Pending"))
    assert pods.hosts(0) == {}
    pods.changed(pod("w-0", A, phase="Pending"), deleted=False)
    assert pods.hosts(0) == {}
    pods.changed(pod("w-0", A), deleted=False)
    assert pods.hosts(0) == {A: 1}
    pods.changed(pod("w-0", A, phase="Failed"), deleted=False)
    assert pods.hosts(0) == {}


def test_deleted_pod_is_no_host():
    pods = of(pod("w-0", A), pod("w-1", B))
    pods.changed(pod("w-0", A), deleted=True)
    assert pods.hosts(0) == {B: 1}


def test_new_list_replaces_all_pods():
    pods = of(pod("w-0", A), pod("w-1", B))
    pods.listed([pod("w-1", B)])
    assert pods.hosts(0) == {B: 1}


def test_slots_are_the_gpus_or_one_or_the_given_number():
    assert of(pod("w-0", A, gpus=8), pod("w-1", B)).hosts(0) == {A: 8, B: 1}
    assert of(pod("w-0", A, gpus=8), pod("w-1", B), slots=2).hosts(0) == {A: 2, B: 2}


def test_hosts_keep_their_order_and_new_ones_are_sorted_by_number():
    pods = of(pod("w-10", C), pod("w-9", B))
    assert list(pods.hosts(0)) == [B, C]
    pods.changed(pod("w-0", A), deleted=False)
    assert list(pods.hosts(0)) == [B, C, A]


def test_reused_address_belongs_to_the_later_pod():
    pods = of(pod("w-0", A, gpus=4, created=1), pod("w-1", A, gpus=8, created=2))
    assert pods.hosts(0) == {A: 8}
    recorded("messages", pods.place_of(A))


def test_deletion_is_an_end_with_a_time_and_the_pod_stays_a_host():
    pods = of(pod("w-0", A, ends_at=130), pod("w-1", B))
    assert pods.hosts(100) == {A: 1, B: 1}
    assert pods.endings(100) == {A: PodEnding("Kubernetes deletes pod w-0", 130)}


def test_overdue_pod_is_no_host():
    pods = of(pod("w-0", A, ends_at=130), pod("w-1", B))
    assert pods.next_look(100) == 32
    assert pods.hosts(131.9) == {A: 1, B: 1}
    assert pods.hosts(132) == {B: 1} and pods.endings(132) == {}
    assert pods.next_look(132) is None


def test_pod_is_deleted_by_force_only_if_its_node_is_unreachable():
    pods = of(pod("w-0", A, ends_at=130), pod("w-1", B, ends_at=130, node="n2"), pod("w-2", C))
    assert pods.overdue(200) == []  # the nodes are unknown
    pods.nodes_listed([node("n1", ready="Unknown"), node("n2")], 0)
    assert [each.name for each in pods.overdue(200)] == ["w-0"]
    assert pods.overdue(131) == []
    pods.node_changed(node("n2"), 0, deleted=True)
    assert [each.name for each in pods.overdue(200)] == ["w-0", "w-1"]


@pytest.mark.parametrize("ready", ["True", "False"])
def test_node_with_a_reporting_kubelet_is_reachable(ready):
    pods = of(pod("w-0", A, ends_at=130))
    pods.nodes_listed([node("n1", ready=ready)], 0)
    assert pods.overdue(200) == []


def test_taint_of_a_node_is_an_end_from_its_first_observation():
    pods = of(pod("w-0", A), pod("w-1", B, node="n2"))
    pods.nodes_listed([node("n1"), node("n2")], 0)
    pods.node_changed(
        node("n1", taints=("aws-node-termination-handler/spot-itn",)), 50, deleted=False
    )
    expected = {A: PodEnding("node n1: its spot instance is being reclaimed", 170)}
    assert pods.endings(60) == expected
    pods.nodes_listed([node("n1", taints=("aws-node-termination-handler/spot-itn",))], 90)
    assert pods.endings(100) == expected
    pods.node_changed(node("n1"), 100, deleted=False)
    assert pods.endings(100) == {}


def test_earliest_of_several_ends_counts():
    pods = of(pod("w-0", A, ends_at=130))
    pods.nodes_listed([node("n1", taints=("karpenter.sh/disrupted",))], 0)
    assert pods.endings(100) == {A: PodEnding("Kubernetes deletes pod w-0", 130)}
    pods.node_changed(
        node("n1", taints=("cloud.google.com/impending-node-termination",)), 90, deleted=False
    )
    assert pods.endings(100) == {A: PodEnding("node n1: Google Cloud terminates it", 120)}


@pytest.mark.parametrize(
    ("condition", "problem", "healthy", "text"),
    [
        ("AcceleratedHardwareReady", "False", "True", "its accelerators failed"),
        ("GPUMissing", "True", "False", "a GPU is missing"),
        ("VMEventScheduled", "True", "False", "Azure scheduled maintenance"),
    ],
)
def test_condition_of_a_node_is_an_end_until_healthy(condition, problem, healthy, text):
    pods = of(pod("w-0", A))
    for status in ("Unknown", healthy):
        pods.nodes_listed([node("n1", conditions={condition: status})], 0)
        assert pods.endings(0) == {}
    pods.node_changed(node("n1", conditions={condition: problem}), 50, deleted=False)
    assert pods.endings(60) == {A: PodEnding(f"node n1: {text}", None)}
    pods.node_changed(node("n1", conditions={condition: healthy}), 70, deleted=False)
    assert pods.endings(70) == {}


@pytest.mark.parametrize(
    "tainted",
    [
        node("n1", cordoned=True, taints=("node.kubernetes.io/unschedulable",)),
        node("n1", taints=("DeletionCandidateOfClusterAutoscaler",)),
        node("n1", conditions={"XIDErrors": "True"}),
        node("n1", conditions={"example.com/NetworkReady": "False"}),
    ],
)
def test_only_requested_taints_and_conditions_end_a_node(tainted):
    requested = (
        "node.kubernetes.io/unschedulable",
        "DeletionCandidateOfClusterAutoscaler",
        "XIDErrors",
        "example.com/NetworkReady",
    )
    found = []
    for notices in ((), requested):
        pods = Pods(notices=notices)
        pods.listed([pod("w-0", A)])
        pods.nodes_listed([tainted], 0)
        found.append(pods.endings(0).keys())
    assert found == [set(), {A}]


def test_healthy_requested_condition_ends_no_host():
    pods = Pods(notices=("XIDErrors", "example.com/NetworkReady"))
    pods.listed([pod("w-0", A)])
    healthy = {"XIDErrors": "False", "example.com/NetworkReady": "True"}
    pods.nodes_listed([node("n1", conditions=healthy)], 0)
    assert pods.endings(0) == {}


def test_cordon_and_unrelated_taints_end_no_host():
    pods = of(pod("w-0", A))
    pods.nodes_listed([node("n1", cordoned=True, taints=("nvidia.com/gpu", "dedicated"))], 0)
    assert pods.hosts(0) == {A: 1} and pods.endings(0) == {}


def test_invalid_pod_is_ignored():
    strange = [
        {},
        {"metadata": None},
        {"metadata": {"name": 5, "uid": []}},
        {"metadata": {"name": "w"}},
    ]
    broken = pod("w-0", A) | {
        "spec": [],
        "status": {"phase": "Running", "podIP": A, "conditions": 7},
    }
    broken["metadata"]["deletionTimestamp"] = "soon"
    pods = of(*strange, broken)
    pods.nodes_listed([{}, {"metadata": {"name": ""}}], 0)
    pods.changed({}, deleted=True)
    assert pods.hosts(0) == {A: 1} and pods.endings(0) == {}


def test_differences_of_ends_are_found():
    soon, later = PodEnding("x", 10), PodEnding("x", 20)
    assert [*differences({}, {A: soon})] == [(A, soon)]
    assert [*differences({A: soon}, {A: soon})] == []
    assert [*differences({A: soon}, {A: later})] == [(A, later)]
    assert [*differences({A: soon}, {})] == [(A, None)]


KUEUE_GATE = "kueue.x-k8s.io/admission"


def condition(kind, reason, status="True"):
    return {"type": kind, "status": status, "reason": reason}


def test_gated_pod_is_queued_until_kueue_admits_the_pod():
    pods = of(pod("w-0", A), pod("w-1", phase="Pending", gates=(KUEUE_GATE,)))
    pods.changed(pod("w-2", phase="Pending", gates=("example.com/other",)), deleted=False)
    assert pods.queued() == 1 and pods.hosts(0) == {A: 1}
    pods.changed(pod("w-1", phase="Pending"), deleted=False)
    assert pods.queued() == 0


def test_gated_pod_that_is_deleted_is_not_queued():
    pods = of(pod("w-0", phase="Pending", gates=(KUEUE_GATE,)))
    pods.changed(pod("w-0", phase="Pending", gates=(KUEUE_GATE,), ends_at=130), deleted=False)
    assert pods.queued() == 0


@pytest.mark.parametrize(
    ("conditions", "by"),
    [
        ((condition("TerminationTarget", "WorkloadEvicted"),), "Kueue evicts"),
        ((condition("DisruptionTarget", "PreemptionByScheduler"),), "the scheduler preempts"),
        ((condition("DisruptionTarget", "DeletionByTaintManager"),), "a taint of the node evicts"),
        ((condition("DisruptionTarget", "Unknown"),), "Kubernetes deletes"),
        ((condition("DisruptionTarget", "PreemptionByScheduler", "False"),), "Kubernetes deletes"),
    ],
)
def test_end_of_a_pod_names_its_cause(conditions, by):
    pods = of(pod("w-0", A, ends_at=130, conditions=conditions))
    assert pods.endings(100) == {A: PodEnding(f"{by} pod w-0", 130)}


def test_disruption_without_deletion_is_an_end_until_withdrawn():
    shutdown = condition("DisruptionTarget", "TerminationByKubelet")
    pods = of(pod("w-0", A, conditions=(shutdown,)))
    assert pods.endings(100) == {A: PodEnding("the kubelet terminates pod w-0", None)}
    pods.changed(pod("w-0", A), deleted=False)
    assert pods.endings(100) == {}
