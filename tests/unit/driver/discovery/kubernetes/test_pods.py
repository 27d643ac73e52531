"""Which pods are hosts, which announce their end, which nobody will ever say is gone."""

import pytest

from elastic.driver.discovery.kubernetes.pods import PodEnding, Pods, differences
from harness.golden import recorded
from harness.kubernetes_objects import node, pod

A, B, C = "10.0.0.6", "10.0.0.7", "10.0.0.8"


def of(*objects, slots=None):
    pods = Pods(slots)
    pods.listed(objects)
    return pods


def test_a_pod_is_a_host_from_when_it_runs_until_it_has_ended():
    pods = of(pod("w-0", phase="Pending"))
    assert pods.hosts(0) == {}
    pods.changed(pod("w-0", A, phase="Pending"), deleted=False)
    assert pods.hosts(0) == {}
    pods.changed(pod("w-0", A), deleted=False)
    assert pods.hosts(0) == {A: 1}
    pods.changed(pod("w-0", A, phase="Failed"), deleted=False)
    assert pods.hosts(0) == {}


def test_one_that_is_gone_is_no_host():
    pods = of(pod("w-0", A), pod("w-1", B))
    pods.changed(pod("w-0", A), deleted=True)
    assert pods.hosts(0) == {B: 1}


def test_a_new_list_is_all_there_is():
    pods = of(pod("w-0", A), pod("w-1", B))
    pods.listed([pod("w-1", B)])
    assert pods.hosts(0) == {B: 1}


def test_slots_are_gpus_or_one_or_what_was_said():
    assert of(pod("w-0", A, gpus=8), pod("w-1", B)).hosts(0) == {A: 8, B: 1}
    assert of(pod("w-0", A, gpus=8), pod("w-1", B), slots=2).hosts(0) == {A: 2, B: 2}


def test_hosts_keep_their_order_and_others_follow_by_number():
    pods = of(pod("w-10", C), pod("w-9", B))
    assert list(pods.hosts(0)) == [B, C]
    pods.changed(pod("w-0", A), deleted=False)
    assert list(pods.hosts(0)) == [B, C, A]


def test_an_address_that_is_given_again_belongs_to_the_later_pod():
    pods = of(pod("w-0", A, gpus=4, created=1), pod("w-1", A, gpus=8, created=2))
    assert pods.hosts(0) == {A: 8}
    recorded("messages", pods.place_of(A))


def test_a_deletion_is_an_end_with_a_time_and_the_pod_stays_a_host():
    pods = of(pod("w-0", A, ends_at=130), pod("w-1", B))
    assert pods.hosts(100) == {A: 1, B: 1}
    assert pods.endings(100) == {A: PodEnding("Kubernetes deletes pod w-0", 130)}


def test_a_pod_that_should_be_gone_is_no_host():
    pods = of(pod("w-0", A, ends_at=130), pod("w-1", B))
    assert pods.next_look(100) == 32
    assert pods.hosts(131.9) == {A: 1, B: 1}
    assert pods.hosts(132) == {B: 1} and pods.endings(132) == {}
    assert pods.next_look(132) is None


def test_it_is_deleted_by_force_only_if_its_node_is_not_heard_of():
    pods = of(pod("w-0", A, ends_at=130), pod("w-1", B, ends_at=130, node="n2"), pod("w-2", C))
    assert pods.overdue(200) == []  # nodes are not known
    pods.nodes_listed([node("n1", ready="Unknown"), node("n2")], 0)
    assert [each.name for each in pods.overdue(200)] == ["w-0"]
    assert pods.overdue(131) == []
    pods.node_changed(node("n2"), 0, deleted=True)
    assert [each.name for each in pods.overdue(200)] == ["w-0", "w-1"]


@pytest.mark.parametrize("ready", ["True", "False"])
def test_a_node_whose_kubelet_speaks_is_heard_of(ready):
    pods = of(pod("w-0", A, ends_at=130))
    pods.nodes_listed([node("n1", ready=ready)], 0)
    assert pods.overdue(200) == []


def test_a_taint_of_its_node_is_an_end_from_when_it_was_seen():
    pods = of(pod("w-0", A), pod("w-1", B, node="n2"))
    pods.nodes_listed([node("n1"), node("n2")], 0)
    pods.node_changed(
        node("n1", taints=("aws-node-termination-handler/spot-itn",)), 50, deleted=False
    )
    told = {A: PodEnding("node n1: its spot instance is being reclaimed", 170)}
    assert pods.endings(60) == told
    pods.nodes_listed([node("n1", taints=("aws-node-termination-handler/spot-itn",))], 90)
    assert pods.endings(100) == told
    pods.node_changed(node("n1"), 100, deleted=False)
    assert pods.endings(100) == {}


def test_of_several_ends_the_first_counts():
    pods = of(pod("w-0", A, ends_at=130))
    pods.nodes_listed([node("n1", taints=("karpenter.sh/disrupted",))], 0)
    assert pods.endings(100) == {A: PodEnding("Kubernetes deletes pod w-0", 130)}
    pods.node_changed(
        node("n1", taints=("cloud.google.com/impending-node-termination",)), 90, deleted=False
    )
    assert pods.endings(100) == {A: PodEnding("node n1: Google Cloud terminates it", 120)}


def test_a_cordon_and_taints_of_others_end_nothing():
    pods = of(pod("w-0", A))
    pods.nodes_listed([node("n1", cordoned=True, taints=("nvidia.com/gpu", "dedicated"))], 0)
    assert pods.hosts(0) == {A: 1} and pods.endings(0) == {}


def test_what_is_no_pod_is_passed_over():
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


def test_what_is_news_of_ends():
    soon, later = PodEnding("x", 10), PodEnding("x", 20)
    assert [*differences({}, {A: soon})] == [(A, soon)]
    assert [*differences({A: soon}, {A: soon})] == []
    assert [*differences({A: soon}, {A: later})] == [(A, later)]
    assert [*differences({A: soon}, {})] == [(A, None)]
