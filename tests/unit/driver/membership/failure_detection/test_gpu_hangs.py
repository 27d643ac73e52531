"""All ranks wait for their GPUs and none has died: finds the GPU that hangs, or blames the network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.events import BreakWorld, EndJob, Event, KillWorker, WorkerProgressed
from elastic.driver.membership.failure_detection.gpu_hangs import (
    Hang,
    RankReport,
    hang_of_all,
    hang_of_one,
    judge,
)
from elastic.driver.reasons import ReasonKind
from elastic.driver.settings import Settings
from elastic.protocol.messages import GRADIENTS, Launches, Worker
from harness.conversation import (
    MembershipConversation,
    exited,
    has,
    names,
    outside,
    running,
    said,
    static,
    the,
    worker,
)
from harness.golden import recorded

SETTINGS = Settings(np=4, workers_min=1, workers_max=4, elastic=True)
WAITS = (7, 7, 6)  # launched, arrived, done: its GPU waits for the others
HANGS = (7, 6, 6)
ABSENT = (6, 6, 6)  # its host has not launched the collective
FAILED = "failed"  # as reported by CUDA
ENDED = (7, 7, 7)


def launches(what, size: int = 4, took_s: float = 0.0) -> Launches:
    launched, arrived, done = WAITS if what == FAILED else what
    return Launches(GRADIENTS, size, launched, arrived, done, took_s, what == FAILED)


def group(*ranks, for_s: float, took_s: float = 0.0) -> list[RankReport]:
    """Make all ranks report the same state for ``for_s`` seconds."""
    states = [launches(each, len(ranks), took_s) for each in ranks]
    return [RankReport(Worker("h", n), each, 100.0, 100.0 + for_s) for n, each in enumerate(states)]


@pytest.mark.parametrize(
    ("ranks", "after_s", "hang", "blamed"),
    [
        ((WAITS, WAITS, WAITS, HANGS), 10, Hang.GPU, [3]),
        ((HANGS, WAITS, WAITS, WAITS, HANGS), 10, Hang.GPU, [0, 4]),
        # only half have arrived, so neither half is certain
        ((WAITS, WAITS, HANGS, HANGS), 30, Hang.GPU, [2, 3]),
        ((WAITS, HANGS), 30, Hang.GPU, [1]),
        ((WAITS, HANGS, HANGS), 180, Hang.UNCLEAR, []),  # the first may have less to compute
        ((HANGS, HANGS, HANGS, HANGS), 180, Hang.UNCLEAR, []),
        ((WAITS, WAITS, WAITS, WAITS), 30, Hang.NETWORK, []),
        ((ENDED, WAITS, ENDED, ENDED), 30, Hang.NETWORK, []),
        ((WAITS, WAITS, FAILED, WAITS), 10, Hang.FAILED, [2]),
        ((WAITS, HANGS, FAILED, WAITS), 10, Hang.FAILED, [2]),
        ((FAILED, FAILED), 30, Hang.NETWORK, []),  # no rank would be left
    ],
)
def test_hang_is_blamed_on_ranks_after_a_limit(ranks, after_s, hang, blamed):
    assert judge(group(*ranks, for_s=after_s - 0.1), SETTINGS, 0) is None
    found = judge(group(*ranks, for_s=after_s), SETTINGS, 0)
    assert found is not None
    assert (found.hang, [w.slot for w in found.blamed], found.number) == (hang, blamed, 7)


@pytest.mark.parametrize(
    "ranks",
    [
        (WAITS, WAITS, WAITS, ABSENT),  # inside a collective, but a different one
        (WAITS, HANGS, WAITS, ABSENT),  # the rank that the others may wait for
        (ENDED, ENDED, ENDED, ENDED),
    ],
)
def test_rank_that_has_not_launched_excuses_all_launched_ranks(ranks):
    assert judge(group(*ranks, for_s=10_000), SETTINGS, 3) is None


def test_absent_rank_may_work_on_its_host_without_limit():
    """A rank that loads data, compiles or writes a checkpoint does not report a wait in the collective."""
    there = group(WAITS, HANGS, WAITS, WAITS, for_s=10_000)
    assert judge(there, SETTINGS, 3) is not None
    assert judge(there[:3], SETTINGS, 3) is None


def test_slower_gpu_gets_up_to_twice_the_time_of_the_remaining_ranks():
    """Steps of a minute, launched within a second: the slowest GPU may take twice as long as the others."""
    ranks = (WAITS, WAITS, WAITS, HANGS)
    assert judge(group(*ranks, for_s=59, took_s=60), SETTINGS, 0) is None
    assert judge(group(*ranks, for_s=60, took_s=60), SETTINGS, 0) is not None
    assert judge(group(*ranks, for_s=180, took_s=1000), SETTINGS, 0) is not None  # but not longer


def test_time_limit_starts_when_the_last_of_the_other_ranks_arrives():
    slow, *others = group(HANGS, WAITS, WAITS, WAITS, for_s=12)
    late = RankReport(others[0].worker, others[0].launches, 105.0, 112.0)
    assert judge([slow, *others], SETTINGS, 0) is not None
    assert judge([slow, late, *others[1:]], SETTINGS, 0) is None


def test_outdated_reports_are_ignored():
    slow, *others = group(HANGS, WAITS, WAITS, WAITS, for_s=12)
    silent = RankReport(slow.worker, slow.launches, 100.0, 101.0)
    assert judge([silent, *others], SETTINGS, 0) is None


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        ((ENDED, WAITS, ENDED, ENDED), [1]),
        ((ENDED, WAITS, WAITS, ENDED), []),
        ((ENDED, WAITS, WAITS, WAITS), []),
        ((WAITS, WAITS, WAITS, WAITS), []),
    ],
)
def test_second_network_hang_gets_twice_the_time_and_blames_a_minority_at_most(ranks, blamed):
    assert judge(group(*ranks, for_s=59.9), SETTINGS, 1) is None
    found = judge(group(*ranks, for_s=60), SETTINGS, 1)
    assert found is not None and found.hang is Hang.NETWORK
    assert [w.slot for w in found.blamed] == blamed


def test_limit_0_disables_the_detection():
    off = Settings(np=4, workers_min=1, workers_max=4, elastic=True, gpu_hang_s=0.0)
    assert judge(group(WAITS, WAITS, WAITS, HANGS, for_s=10_000), off, 0) is None


ANY = st.sampled_from([WAITS, HANGS, ABSENT, FAILED, ENDED, (8, 7, 6), (9, 9, 8)])


@given(st.lists(ANY, min_size=2, max_size=9), st.integers(0, 4), st.floats(0, 1000))
def test_hang_ends_within_the_limit_for_any_reports(ranks, before, for_s):
    """At least one rank is kept, and a rank that has arrived is never blamed instead of one that has not."""
    witnesses = group(*ranks, for_s=for_s)
    found = judge(witnesses, SETTINGS, before)
    states = [w.launches for w in witnesses]
    number = min(each.done for each in states) + 1
    launched = all(each.launched >= number for each in states)
    if found is None:
        assert not launched or for_s < SETTINGS.gpu_limit_s
        return
    assert (launched and 2 * len(found.blamed) <= len(witnesses)) or found.hang is Hang.FAILED
    assert len(found.blamed) < len(witnesses)
    explains = {w.worker for w in witnesses if w.launches.failed or w.launches.arrived < number}
    if explains and len(explains) * 2 <= len(witnesses):
        assert found.blamed and set(found.blamed) <= explains
    assert str(hang_of_one(found)) and str(hang_of_all(found, before))


# ---- in a job ------------------------------------------------------------------------------------------------------


def waits(name: str, generation: int, seconds: int, state: Launches) -> Event:
    return WorkerProgressed(worker(name), generation, 7, GRADIENTS, float(seconds), gpu=[state])


def report_repeatedly(talk: MembershipConversation, *ranks, for_s: float) -> list:
    """Report every five seconds that all ranks wait, and return all actions."""
    generation, actions = talk.m.generation, []
    for seconds in range(1, int(for_s) + 2, 5):
        for name, what in zip(talk.members, ranks, strict=True):
            actions += talk.tell(waits(name, generation, seconds, launches(what, len(ranks))))
        for _ in range(10):
            if has(KillWorker, actions) or has(BreakWorld, actions) or talk.m.over:
                return actions
            actions += talk.wait(0.5)
    return actions


def test_worker_with_a_hung_gpu_is_killed_and_members_continue():
    talk = running(4)
    actions = report_repeatedly(talk, WAITS, HANGS, WAITS, WAITS, for_s=16)
    assert names(actions, KillWorker) == ["h:1#1"]
    recorded("log", said(actions))
    lost = talk.tell(exited("h:1"))
    assert the(BreakWorld, lost).members == [worker("h:0"), worker("h:2"), worker("h:3")]
    recorded("log", said(lost))


@pytest.mark.parametrize("missing", [1, 3])
def test_no_worker_is_killed_for_a_gpu_while_a_rank_works_on_its_host(missing):
    talk = running(4, idle_s=0.0)
    talk.works(f"h:{missing}", cpu=1.0)
    ranks = [WAITS, WAITS, HANGS, WAITS]
    generation = talk.m.generation
    for seconds in range(1, 300, 5):
        for slot, what in enumerate(ranks):
            event = waits(f"h:{slot}", generation, seconds, launches(what))
            if slot == missing:
                event = outside(f"h:{slot}", generation)
            assert not has(KillWorker, talk.tell(event))
        actions = talk.wait(5.0)
        assert not has(KillWorker, actions) and not has(BreakWorld, actions)


def test_network_hang_breaks_the_world_twice_and_ends_the_job_the_third_time():
    talk = running(4)
    for patience_s in (30, 60):
        actions = report_repeatedly(talk, WAITS, WAITS, WAITS, WAITS, for_s=patience_s + 10)
        the(BreakWorld, actions)
        assert not has(KillWorker, actions)
        recorded("log", said(actions))
        talk.ready(*talk.members, commit=(2, 0))
    actions = report_repeatedly(talk, WAITS, WAITS, WAITS, WAITS, for_s=130)
    actions += talk.ready(*talk.members, commit=(2, 0))
    assert the(EndJob, actions).code == 1
    reason = the(EndJob, actions).reason
    assert reason.kind is ReasonKind.IN_CIRCLES and reason.facts["worlds"] == 3
    assert hang_in(reason.facts["cause"]) == (ReasonKind.NETWORK_HANGS, 120.093, 7, "gradients", 2)


def test_commit_resets_the_count_of_network_hangs():
    talk = running(4)
    for _ in range(5):
        generation = talk.m.generation
        actions = report_repeatedly(talk, WAITS, WAITS, WAITS, WAITS, for_s=40)
        the(BreakWorld, actions)
        talk.ready(*talk.members, commit=(generation, 3))
    assert talk.m.phase.value == "training"


def test_reports_of_an_older_world_are_ignored():
    talk = running(4)
    report_repeatedly(talk, WAITS, WAITS, WAITS, WAITS, for_s=40)
    talk.ready(*talk.members, commit=(2, 3))
    talk.wait(100)
    assert not has(BreakWorld, report_repeatedly(talk, WAITS, WAITS, WAITS, WAITS, for_s=5))


def test_gpu_hang_ends_a_static_job_with_a_reason():
    talk = static(2)
    reason = the(EndJob, report_repeatedly(talk, WAITS, WAITS, for_s=40)).reason
    assert hang_in(reason) == (ReasonKind.NETWORK_HANGS, 30.011, 7, "gradients", 0)


def hang_in(reason: Any) -> tuple[ReasonKind, float, int, str, int]:
    """Return kind and facts of a reason, with times in whole milliseconds."""
    facts = reason.facts
    for_s = round(facts["for_s"], 3)
    return reason.kind, for_s, facts["number"], facts["group"], facts["before"]
