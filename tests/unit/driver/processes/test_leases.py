"""Who was not heard of for too long: leases of two seconds, looked at four times a second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.processes.leases import PAUSE_S, Leases
from elastic.protocol.messages import Worker

LEASE_S = 2.0
LOOK_S = 0.25


class Watch:
    """An observer that looks at regular times, and sees some of its keys able to run."""

    def __init__(self) -> None:
        self.leases: Leases[str] = Leases(LEASE_S)
        self.now = 100.0

    def look(self, seconds: float, *alive: str) -> tuple[list[str], list[str]]:
        """So long; who ran out and who came back meanwhile."""
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


def test_who_is_seen_again_and_again_keeps_its_lease():
    assert watching("a").look(3600, "a") == ([], [])


def test_who_is_not_seen_for_two_seconds_has_run_out_and_is_named_once():
    watch = watching("b", "a")
    assert watch.look(1.75, "b") == ([], [])
    assert watch.look(0.25, "b") == (["a"], [])
    assert watch.look(60, "b") == ([], [])


def test_who_comes_back_says_so_once_and_can_run_out_again():
    watch = watching("a")
    assert watch.look(5) == (["a"], [])
    assert watch.look(5, "a") == ([], ["a"])
    assert watch.look(2) == (["a"], [])


def test_who_was_fenced_cannot_come_back_by_being_seen():
    watch = watching("a")
    watch.look(3)
    watch.leases.drop("a")
    assert watch.look(5, "a") == ([], [])
    assert "a" not in watch.leases


def test_an_incarnation_has_a_lease_of_its_own():
    leases: Leases[Worker] = Leases(LEASE_S)
    old, new = Worker("h", 0, 1), Worker("h", 0, 2)
    leases.grant(new, 0.0)
    assert not leases.renew(old, 0.5)
    assert old not in leases and new in leases


def test_who_never_had_a_lease_gets_none_by_being_seen():
    watch = watching()
    assert watch.look(5, "stranger") == ([], [])
    assert len(watch.leases) == 0


def test_a_new_grant_begins_anew():
    watch = watching("a")
    watch.look(3)
    watch.leases.grant("a", watch.now)
    assert watch.look(1.75) == ([], [])
    assert watch.look(0.25) == (["a"], [])


def test_an_observer_that_was_paused_blames_nobody():
    watch = watching("a", "b")
    watch.look(1.5, "b")
    watch.now += PAUSE_S + LOOK_S  # it was stopped itself
    assert watch.leases.expired(watch.now) == []
    assert watch.look(1.75) == ([], [])
    assert sorted(watch.look(0.25)[0]) == ["a", "b"]


def test_a_gap_that_is_no_pause_is_no_excuse():
    watch = watching("a")
    watch.look(1.25)
    watch.now += 0.9
    assert watch.leases.expired(watch.now) == ["a"]


def test_an_observer_that_only_wakes_at_deadlines_is_not_taken_for_paused():
    leases: Leases[str] = Leases(LEASE_S)
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
def test_who_is_not_renewed_within_the_lease_runs_out_and_nobody_else(story):
    leases: Leases[str] = Leases(LEASE_S)
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
