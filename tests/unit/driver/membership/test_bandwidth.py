"""Bandwidth of hosts in the built-in health check: who is measured when, and which hosts are rejected."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.events import (
    BandwidthMeasured,
    EndJob,
    KillWorker,
    MeasureBandwidth,
    PublishWorld,
    Report,
    WelcomeWorker,
)
from elastic.driver.membership.bandwidth import (
    FRESH_S,
    HOSTS_MOST,
    RESULT_S,
    TOGETHER_S,
    WAIT_S,
    HostBandwidth,
    too_slow,
)
from elastic.driver.membership.snapshot import restore_snapshot, take_snapshot
from elastic.driver.reasons import ReasonKind
from harness.conversation import MembershipConversation, exited, has, hosts, order, the, worker
from unit.driver.membership.test_health_checks import checked, errors

FAST, SLOW = 100e6, 1e6


def starting(slots: int = 1, names: str = "abcd", **settings) -> MembershipConversation:
    """Each host starts its workers, and no check has ended."""
    np = slots * len(names)
    defaults = {"np": np, "workers_min": 1, "health_check": "auto", "health_check_s": 20.0}
    talk = MembershipConversation(**{**defaults, **settings})
    talk.tell(hosts(**dict.fromkeys(names, slots)))
    return talk


def pass_checks(talk: MembershipConversation, *names: str) -> list:
    return [action for name in names for action in talk.tell(checked(name))]


def measured(
    host: str, sent: float | None = FAST, received: float | None = FAST, peer: str = "a", **others
) -> BandwidthMeasured:
    return BandwidthMeasured(host, peer, sent, received, **others)


def training(**settings) -> MembershipConversation:
    """Hosts a to d train. Only then are they listed together with e, whose worker starts."""
    talk = starting(np=4, workers_max=5, bandwidth_factor=0.2, **settings)
    pass_checks(talk, "a:0", "b:0", "c:0", "d:0")
    for host in "bcd":
        talk.tell(measured(host))
    talk.connect("a:0", "b:0", "c:0", "d:0")
    for name in ("a:0", "b:0", "c:0", "d:0"):
        talk.ready(name, running=False)
    talk.resume()
    assert len(talk.members) == 4
    talk.tell(hosts(a=1, b=1, c=1, d=1, e=1))
    assert worker("e:0") in talk.m.roster
    return talk


def measurements(actions) -> list[tuple[str, str]]:
    return [(each.host, each.peer) for each in actions if isinstance(each, MeasureBandwidth)]


# ---- the comparison --------------------------------------------------------------------------------------------------


def test_rates_are_compared_in_each_direction_with_the_median_of_the_remaining_hosts():
    others = [measured("b"), measured("c", FAST, 3 * FAST), measured("d", 2 * FAST)]
    assert too_slow(measured("e", 0.21 * FAST), others, 0.2) is None
    found = too_slow(measured("e", FAST, 0.19 * FAST), others, 0.2)
    assert found == {
        "direction": "received",
        "peer": "a",
        "bytes_s": 0.19 * FAST,
        "median_bytes_s": FAST,
        "others": 3,
    }


@pytest.mark.parametrize(
    "others",
    [
        [],
        [measured("b")],
        [measured("b"), measured("c", peer="z")],
        [measured("b"), measured("c", None, None, trouble="refused")],
        [measured("b"), measured("e")],
    ],
)
def test_fewer_than_two_comparable_hosts_reject_no_host(others):
    assert too_slow(measured("e", SLOW, SLOW), others, 0.2) is None


def test_failed_measurement_rejects_no_host():
    mine = measured("e", None, None, trouble="refused")
    assert too_slow(mine, [measured("b"), measured("c")], 0.2) is None


@given(st.lists(st.floats(1.0, 1e10), min_size=3, max_size=30), st.floats(0.01, 0.99))
def test_at_most_half_of_the_hosts_are_rejected(rates, factor):
    all_hosts = [measured(f"h{n}", rate, rate) for n, rate in enumerate(rates)]
    rejected = [each for each in all_hosts if too_slow(each, all_hosts, factor)]
    assert len(rejected) <= len(all_hosts) // 2
    assert not rejected or max(e.sent or 0.0 for e in rejected) < factor * max(rates)


# ---- the first world -------------------------------------------------------------------------------------------------


def test_hosts_are_measured_one_at_a_time_against_the_first_once_all_are_checked():
    talk = starting()
    assert not measurements(pass_checks(talk, "a:0", "b:0", "c:0"))
    assert measurements(pass_checks(talk, "d:0")) == [("b", "a")]
    assert measurements(talk.tell(measured("b"))) == [("c", "a")]
    assert measurements(talk.tell(measured("c"))) == [("d", "a")]
    assert not measurements(talk.tell(measured("d")))


def test_checks_that_do_not_end_delay_the_first_measurement_only_briefly():
    talk = starting()
    pass_checks(talk, "a:0", "b:0")
    assert not measurements(talk.wait(TOGETHER_S - 0.1))
    assert measurements(talk.wait(0.2)) == [("b", "a")]


@pytest.mark.parametrize("slow", ["b", "c", "d"])
@pytest.mark.parametrize("direction", ["sent", "received"])
def test_slow_host_is_in_no_world_for_any_order_of_measurement(slow, direction):
    talk = starting()
    pass_checks(talk, "a:0", "b:0", "c:0", "d:0")
    assert not has(WelcomeWorker, talk.connect("a:0", "b:0", "c:0", "d:0"))
    actions = []
    for host in "bcd":
        rates = {"sent": FAST, "received": FAST} | ({direction: SLOW} if host == slow else {})
        actions = talk.tell(measured(host, **rates))
    assert measurements(actions) == [(slow, "a")] and not has(WelcomeWorker, actions)
    actions = talk.tell(measured(slow, **{"sent": FAST, "received": FAST} | {direction: SLOW}))
    assert the(KillWorker, actions).worker == worker(f"{slow}:0")
    [line] = errors(actions)
    assert line.about is not None and line.about.kind is ReasonKind.UNHEALTHY
    facts = line.about.facts
    assert facts["outcome"] == "low_bandwidth" and facts["direction"] == direction
    assert (facts["bytes_s"], facts["median_bytes_s"], facts["others"]) == (SLOW, FAST, 2)
    fast = [name for name in ("a:0", "b:0", "c:0", "d:0") if name[0] != slow]
    assert [each.worker for each in actions if isinstance(each, WelcomeWorker)] == [
        worker(name) for name in fast
    ]
    for name in fast:
        actions = talk.ready(name, running=False)
    assert order(the(PublishWorld, actions)) == [f"{name}#1" for name in fast]


def test_slots_of_a_slow_host_are_rejected_together_and_logged_once():
    talk = starting(slots=2)
    pass_checks(talk, *(f"{host}:{slot}" for host in "abcd" for slot in (0, 1)))
    for host in "bc":
        talk.tell(measured(host))
    actions = [*talk.tell(measured("d", SLOW)), *talk.tell(measured("d", SLOW))]
    killed = [each.worker for each in actions if isinstance(each, KillWorker)]
    assert killed == [worker("d:0"), worker("d:1")]
    assert len(errors(actions)) == 1


def test_hosts_that_are_slow_once_are_in_the_first_world():
    talk = starting()
    pass_checks(talk, "a:0", "b:0", "c:0", "d:0")
    talk.connect("a:0", "b:0", "c:0", "d:0")
    talk.tell(measured("b"), measured("c"))
    assert measurements(talk.tell(measured("d", SLOW))) == [("d", "a")]
    actions = talk.tell(measured("d"))
    assert not has(KillWorker, actions)
    assert len([each for each in actions if isinstance(each, WelcomeWorker)]) == 4


def test_host_that_was_slow_once_needs_two_slow_measurements_to_be_rejected_later():
    talk = training()
    talk.tell(checked("e:0"), measured("e", SLOW), measured("e"), exited("e:0", 1))
    talk.wait(FRESH_S)
    name = next(name for name in ("e:0#2", "e:0#3") if worker(name) in talk.m.roster)
    talk.tell(checked(name))
    assert measurements(talk.tell(measured("e", SLOW))) == [("e", "a")]
    assert has(KillWorker, talk.tell(measured("e", SLOW)))


def test_rejected_host_is_measured_again_with_backoff_and_used_once_fast():
    talk = training(cooldown_max_s=8.0)
    for number, cooldown_s in enumerate([1, 2, 4, 8, 8], start=1):
        name = f"e:0#{number}"
        assert measurements(talk.tell(checked(name))) == [("e", "a")]
        assert measurements(talk.tell(measured("e", SLOW))) == [("e", "a")]
        actions = talk.tell(measured("e", SLOW))
        assert the(KillWorker, actions).worker == worker(name)
        assert len(errors(actions)) == (number == 1), "it is logged once"
        talk.tell(exited(name))
        talk.wait(cooldown_s - 0.5)
        assert worker(f"e:0#{number + 1}") not in talk.m.roster
        talk.wait(0.6)
    talk.tell(checked("e:0#6"))
    assert ("e", 0) in talk.m.worlds.staff.slots.unhealthy
    actions = talk.tell(measured("e"))
    assert not talk.m.worlds.staff.slots.unhealthy and has(Report, actions)
    assert has(WelcomeWorker, talk.connect("e:0#6"))


# ---- a world that trains ---------------------------------------------------------------------------------------------


def test_joining_worker_is_answered_after_the_measurement_of_its_host():
    talk = training()
    assert not has(WelcomeWorker, talk.connect("e:0"))
    assert measurements(talk.tell(checked("e:0"))) == [("e", "a")]
    assert not talk.tell(checked("e:0")), "repeated by its agent"
    assert the(WelcomeWorker, talk.tell(measured("e"))).worker == worker("e:0")


def test_members_are_measured_first_if_rank_0_has_moved():
    talk = training()
    talk.tell(exited("a:0", 1))
    for name in ("b:0", "c:0", "d:0"):
        talk.ready(name)
    talk.wait(1.0)
    talk.resume()
    assert talk.members[0] == "b:0#1"
    asked = measurements(talk.tell(checked("e:0")))
    for host in "cd":
        assert asked == [(host, "b")]
        asked = measurements(talk.tell(measured(host, peer="b")))
    assert asked == [("e", "b")]
    talk.tell(measured("e", SLOW, peer="b"))
    assert has(KillWorker, talk.tell(measured("e", SLOW, peer="b")))


def test_further_workers_of_a_host_use_a_recent_measurement():
    talk = training()
    talk.tell(checked("e:0"), measured("e"), exited("e:0", 1))
    talk.wait(FRESH_S / 2)
    assert not measurements(talk.tell(checked("e:0#2")))
    talk.tell(exited("e:0#2", 1))
    talk.wait(FRESH_S)
    assert measurements(talk.tell(checked("e:0#3"))) == [("e", "a")]


def test_worker_on_the_host_of_rank_0_is_not_measured():
    talk = training()
    talk.tell(hosts(a=2, b=1, c=1, d=1))
    assert not measurements(talk.tell(checked("a:1")))
    assert not talk.m.health.bandwidth.waits(talk.m.roster[worker("a:1")])


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_job_with_too_few_hosts_only_records(names):
    talk = starting(names=names)
    workers = [f"{host}:0" for host in names]
    talk.connect(*workers)
    actions = pass_checks(talk, *workers)
    assert len([each for each in actions if isinstance(each, WelcomeWorker)]) == len(names)
    assert measurements(actions) == [("b", "a")]
    assert not has(KillWorker, talk.tell(measured("b", SLOW)))


@pytest.mark.parametrize(
    "settings", [{"bandwidth_factor": 0.0}, {"health_check": "true"}, {"health_check": None}]
)
def test_no_host_is_measured_without_the_built_in_check_or_with_a_factor_of_0(settings):
    talk = starting(**settings)
    assert not measurements(pass_checks(talk, "a:0", "b:0", "c:0", "d:0"))
    assert has(WelcomeWorker, talk.connect("a:0"))


# ---- results that do not arrive --------------------------------------------------------------------------------------


def test_measurement_without_a_result_ends_at_its_deadline_and_rejects_no_host():
    talk = starting()
    pass_checks(talk, "a:0", "b:0", "c:0", "d:0")
    assert not measurements(talk.wait(RESULT_S - 0.1))
    assert measurements(talk.wait(0.2)) == [("c", "a")]
    assert not talk.tell(measured("b", SLOW)), "too late"


def test_failed_measurement_admits_the_worker():
    talk = training()
    talk.connect("e:0")
    talk.tell(checked("e:0"))
    assert has(WelcomeWorker, talk.tell(measured("e", None, None, trouble="refused")))


@pytest.mark.parametrize("count", [HOSTS_MOST, HOSTS_MOST + 1])
def test_first_world_of_many_hosts_does_not_wait_for_measurements(count):
    names = string.ascii_letters[:count]
    talk = starting(names=names)
    welcomed = [*talk.connect(*(f"{host}:0" for host in names))]
    welcomed += pass_checks(talk, *(f"{host}:0" for host in names))
    assert has(WelcomeWorker, welcomed) is (count > HOSTS_MOST)


def test_worker_does_not_wait_longer_than_the_limit():
    talk = starting(names="abcdefgh")
    talk.connect("h:0")
    pass_checks(talk, *(f"{host}:0" for host in "abcdefgh"))
    waited_s = 0.0
    actions: list[Any] = []
    while not has(WelcomeWorker, actions):
        actions, waited_s = talk.wait(1.0), waited_s + 1.0
    assert WAIT_S <= waited_s <= WAIT_S + 1.0


def test_worker_that_exits_no_longer_waits():
    talk = training()
    talk.tell(checked("e:0"), exited("e:0", 1))
    talk.tell(measured("e", SLOW))
    assert worker("e:0") not in talk.m.roster


def test_host_that_leaves_the_list_is_forgotten():
    talk = training()
    talk.tell(checked("e:0"), measured("e", SLOW), exited("e:0"))
    talk.tell(hosts(a=1, b=1, c=1, d=1))
    assert not talk.m.worlds.staff.slots.unhealthy


def test_job_of_a_fixed_size_ends_with_the_reason():
    talk = starting(elastic=False, workers_min=4)
    pass_checks(talk, "a:0", "b:0", "c:0", "d:0")
    talk.tell(measured("b"), measured("c"))
    talk.tell(measured("d", SLOW))
    end = the(EndJob, talk.tell(measured("d", SLOW)))
    assert end.code == 1 and end.reason.facts["outcome"] == "low_bandwidth"


def test_pending_measurement_is_known_after_a_snapshot():
    talk = training()
    talk.connect("e:0")
    talk.tell(checked("e:0"))
    talk.m = restore_snapshot(take_snapshot(talk.m), talk.m.settings)
    assert isinstance(talk.m.health.bandwidth, HostBandwidth)
    assert has(WelcomeWorker, talk.tell(measured("e")))
