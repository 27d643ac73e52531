"""Process leases of two seconds, renewed by samples four times per second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.processes.liveness_timeouts import PAUSE_S, LivenessTimeouts
from elastic.protocol.messages import Worker

LEASE_S = 2.0
LOOK_S = 0.25


class Watch:
    """An observer that samples regularly and sees some of its processes running."""

    def __init__(self) -> None:
        self.leases: LivenessTimeouts[str] = LivenessTimeouts(LEASE_S)
        self.now = 100.0

    def look(self, seconds: float, *alive: str) -> tuple[list[str], list[str]]:
        """Sample for ``seconds``. Return the leases that expired and those that returned."""
        out: list[str] = []
        back: list[str] = []
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            back += [key for key in alive if self.leases.renew(key, self.now)]
            out += self.leases.expired(self.now)
        return out, back


def watching(*keys: str) -> Watch:
    watch = Watch()
    for key in keys:
        watch.leases.grant(key, watch.now)
    return watch


def test_process_seen_running_keeps_its_lease():
    assert watching("a").look(3600, "a") == ([], [])


def test_process_not_seen_for_two_seconds_expires_and_is_named_once():
    watch = watching("b", "a")
    assert watch.look(1.75, "b") == ([], [])
    assert watch.look(0.25, "b") == (["a"], [])
    assert watch.look(60, "b") == ([], [])


def test_process_that_returns_is_named_once_and_may_expire_again():
    watch = watching("a")
    assert watch.look(5) == (["a"], [])
    assert watch.look(5, "a") == ([], ["a"])
    assert watch.look(2) == (["a"], [])


def test_killed_process_does_not_return():
    watch = watching("a")
    watch.look(3)
    watch.leases.drop("a")
    assert watch.look(5, "a") == ([], [])
    assert "a" not in watch.leases


def test_each_incarnation_has_its_own_lease():
    leases: LivenessTimeouts[Worker] = LivenessTimeouts(LEASE_S)
    old, new = Worker("h", 0, 1), Worker("h", 0, 2)
    leases.grant(new, 0.0)
    assert not leases.renew(old, 0.5)
    assert old not in leases and new in leases


def test_process_without_a_lease_gets_no_lease_by_a_sample():
    watch = watching()
    assert watch.look(5, "stranger") == ([], [])
    assert len(watch.leases) == 0


def test_new_grant_restarts_the_lease():
    watch = watching("a")
    watch.look(3)
    watch.leases.grant("a", watch.now)
    assert watch.look(1.75) == ([], [])
    assert watch.look(0.25) == (["a"], [])


def test_paused_observer_expires_no_lease():
    watch = watching("a", "b")
    watch.look(1.5, "b")
    watch.now += PAUSE_S + LOOK_S  # the observer itself was stopped
    assert watch.leases.expired(watch.now) == []
    assert watch.look(1.75) == ([], [])
    assert sorted(watch.look(0.25)[0]) == ["a", "b"]


def test_gap_shorter_than_a_pause_is_no_excuse():
    watch = watching("a")
    watch.look(1.25)
    watch.now += 0.9
    assert watch.leases.expired(watch.now) == ["a"]


def test_observer_that_only_wakes_at_deadlines_is_not_paused():
    leases: LivenessTimeouts[str] = LivenessTimeouts(LEASE_S)
    leases.grant("host", 0.0)
    now = 0.0
    out: list[str] = []
    while not out:
        deadline = leases.next_deadline()
        assert deadline is not None and deadline > now
        now = deadline
        out = leases.expired(now)
    assert (out, now) == (["host"], LEASE_S)
    assert leases.next_deadline() is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["grant", "renew", "drop"]))))
def test_exactly_the_processes_without_renewal_expire(story):
    leases: LivenessTimeouts[str] = LivenessTimeouts(LEASE_S)
    seen: dict[str, float] = {}
    out: set[str] = set()
    now = 0.0
    for key, what in story:
        now += LOOK_S
        if what == "drop":
            leases.drop(key)
            seen.pop(key, None)
        elif what == "grant":
            leases.grant(key, now)
            seen[key] = now
        else:
            leases.renew(key, now)
            if key in seen:
                seen[key] = now
        if what != "drop" and key in out:
            out.remove(key)
        new = set(leases.expired(now))
        assert new == {late for late in seen if now - seen[late] >= LEASE_S} - out
        out |= new
        out &= seen.keys()
        assert {key for key in "abc" if key in leases} == set(seen)
