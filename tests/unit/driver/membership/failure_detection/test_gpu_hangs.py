"""All wait on their GPUs and nobody has died: whose GPU hangs, or whether it is the network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.events import BreakWorld, EndJob, Event, KillWorker, WorkerProgressed
from elastic.driver.membership.failure_detection.gpu_hangs import (
    Hang,
    Witness,
    hang_of_all,
    hang_of_one,
    judge,
)
from elastic.driver.reasons import Why
from elastic.driver.settings import Settings
from elastic.protocol.messages import GRADIENTS, Launches, Worker
from harness.conversation import (
    Talk,
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
WAITS = (7, 7, 6)  # launched, arrived, done: its GPU waits for the others'
HANGS = (7, 6, 6)
ABSENT = (6, 6, 6)  # its host has not launched it
FAILED = "failed"  # CUDA says so
ENDED = (7, 7, 7)


def launches(what, size: int = 4, took_s: float = 0.0) -> Launches:
    launched, arrived, done = WAITS if what == FAILED else what
    return Launches(GRADIENTS, size, launched, arrived, done, took_s, what == FAILED)


def group(*ranks, for_s: float, took_s: float = 0.0) -> list[Witness]:
    """All have said the same for so long."""
    told = [launches(each, len(ranks), took_s) for each in ranks]
    return [Witness(Worker("h", n), each, 100.0, 100.0 + for_s) for n, each in enumerate(told)]


@pytest.mark.parametrize(
    ("ranks", "after_s", "hang", "blamed"),
    [
        ((WAITS, WAITS, WAITS, HANGS), 10, Hang.GPU, [3]),
        ((HANGS, WAITS, WAITS, WAITS, HANGS), 10, Hang.GPU, [0, 4]),
        ((WAITS, WAITS, HANGS, HANGS), 30, Hang.GPU, [2, 3]),  # who is it? half have come
        ((WAITS, HANGS), 30, Hang.GPU, [1]),
        ((WAITS, HANGS, HANGS), 180, Hang.UNCLEAR, []),  # the first may have less to compute
        ((HANGS, HANGS, HANGS, HANGS), 180, Hang.UNCLEAR, []),
        ((WAITS, WAITS, WAITS, WAITS), 30, Hang.NETWORK, []),
        ((ENDED, WAITS, ENDED, ENDED), 30, Hang.NETWORK, []),
        ((WAITS, WAITS, FAILED, WAITS), 10, Hang.FAILED, [2]),
        ((WAITS, HANGS, FAILED, WAITS), 10, Hang.FAILED, [2]),
        ((FAILED, FAILED), 30, Hang.NETWORK, []),  # nobody would be left
    ],
)
def test_who_is_to_blame_and_from_when_on(ranks, after_s, hang, blamed):
    assert judge(group(*ranks, for_s=after_s - 0.1), SETTINGS, 0) is None
    found = judge(group(*ranks, for_s=after_s), SETTINGS, 0)
    assert found is not None
    assert (found.hang, [w.slot for w in found.blamed], found.number) == (hang, blamed, 7)


@pytest.mark.parametrize(
    "ranks",
    [
        (WAITS, WAITS, WAITS, ABSENT),  # inside, but in another collective
        (WAITS, HANGS, WAITS, ABSENT),  # which may be what it waits for
        (ENDED, ENDED, ENDED, ENDED),
    ],
)
def test_who_has_not_launched_is_not_judged_here_and_nobody_else_is(ranks):
    assert judge(group(*ranks, for_s=10_000), SETTINGS, 3) is None


def test_a_rank_that_is_not_there_works_on_its_host_for_as_long_as_it_takes():
    """Loading data, compiling, writing a checkpoint: it does not wait in the collective, so it says nothing of it."""
    there = group(WAITS, HANGS, WAITS, WAITS, for_s=10_000)
    assert judge(there, SETTINGS, 3) is not None
    assert judge(there[:3], SETTINGS, 3) is None


def test_a_gpu_that_is_slower_has_as_long_again_as_the_others_took():
    """Steps of a minute, launched in a second: the slowest GPU may be twice as slow as the others."""
    ranks = (WAITS, WAITS, WAITS, HANGS)
    assert judge(group(*ranks, for_s=59, took_s=60), SETTINGS, 0) is None
    assert judge(group(*ranks, for_s=60, took_s=60), SETTINGS, 0) is not None
    assert judge(group(*ranks, for_s=180, took_s=1000), SETTINGS, 0) is not None  # but not more


def test_the_time_counts_from_when_the_last_of_the_others_came():
    slow, *others = group(HANGS, WAITS, WAITS, WAITS, for_s=12)
    late = Witness(others[0].worker, others[0].launches, 105.0, 112.0)
    assert judge([slow, *others], SETTINGS, 0) is not None
    assert judge([slow, late, *others[1:]], SETTINGS, 0) is None


def test_what_it_has_not_said_lately_does_not_count():
    slow, *others = group(HANGS, WAITS, WAITS, WAITS, for_s=12)
    silent = Witness(slow.worker, slow.launches, 100.0, 101.0)
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
def test_a_network_that_hangs_again_has_twice_as_long_and_blames_a_minority_at_most(ranks, blamed):
    assert judge(group(*ranks, for_s=59.9), SETTINGS, 1) is None
    found = judge(group(*ranks, for_s=60), SETTINGS, 1)
    assert found is not None and found.hang is Hang.NETWORK
    assert [w.slot for w in found.blamed] == blamed


def test_it_can_be_turned_off():
    off = Settings(np=4, workers_min=1, workers_max=4, elastic=True, gpu_hang_s=0.0)
    assert judge(group(WAITS, WAITS, WAITS, HANGS, for_s=10_000), off, 0) is None


ANY = st.sampled_from([WAITS, HANGS, ABSENT, FAILED, ENDED, (8, 7, 6), (9, 9, 8)])


@given(st.lists(ANY, min_size=2, max_size=9), st.integers(0, 4), st.floats(0, 1000))
def test_whatever_they_say(ranks, before, for_s):
    """What hangs ends within the limit, somebody is always left, and who has come is never blamed for who has not."""
    witnesses = group(*ranks, for_s=for_s)
    found = judge(witnesses, SETTINGS, before)
    told = [w.launches for w in witnesses]
    number = min(each.done for each in told) + 1
    launched = all(each.launched >= number for each in told)
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


def waits(name: str, generation: int, seconds: int, said: Launches) -> Event:
    return WorkerProgressed(worker(name), generation, 7, GRADIENTS, float(seconds), gpu=[said])


def told(talk: Talk, *ranks, for_s: float) -> list:
    """All wait, and say so every five seconds for so long; everything that is answered."""
    generation, actions = talk.m.generation, []
    for seconds in range(1, int(for_s) + 2, 5):
        for name, what in zip(talk.members, ranks, strict=True):
            actions += talk.tell(waits(name, generation, seconds, launches(what, len(ranks))))
        for _ in range(10):
            if has(KillWorker, actions) or has(BreakWorld, actions) or talk.m.over:
                return actions
            actions += talk.wait(0.5)
    return actions


def test_a_worker_whose_gpu_hangs_is_fenced_and_the_others_go_on():
    talk = running(4)
    actions = told(talk, WAITS, HANGS, WAITS, WAITS, for_s=16)
    assert names(actions, KillWorker) == ["h:1#1"]
    recorded("log", said(actions))
    lost = talk.tell(exited("h:1"))
    assert the(BreakWorld, lost).members == [worker("h:0"), worker("h:2"), worker("h:3")]
    recorded("log", said(lost))


@pytest.mark.parametrize("missing", [1, 3])
def test_nobody_is_fenced_for_a_gpu_while_a_rank_works_on_its_host(missing):
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


def test_a_network_that_hangs_costs_a_world_twice_and_ends_the_job_the_third_time():
    talk = running(4)
    for patience_s in (30, 60):
        actions = told(talk, WAITS, WAITS, WAITS, WAITS, for_s=patience_s + 10)
        the(BreakWorld, actions)
        assert not has(KillWorker, actions)
        recorded("log", said(actions))
        talk.ready(*talk.members, commit=(2, 0))
    actions = told(talk, WAITS, WAITS, WAITS, WAITS, for_s=130)
    actions += talk.ready(*talk.members, commit=(2, 0))
    assert the(EndJob, actions).code == 1
    reason = the(EndJob, actions).reason
    assert reason.kind is Why.IN_CIRCLES and reason.facts["worlds"] == 3
    assert hang_in(reason.facts["cause"]) == (Why.NETWORK_HANGS, 120.093, 7, "gradients", 2)


def test_a_commit_between_makes_it_the_first_time_again():
    talk = running(4)
    for _ in range(5):
        generation = talk.m.generation
        actions = told(talk, WAITS, WAITS, WAITS, WAITS, for_s=40)
        the(BreakWorld, actions)
        talk.ready(*talk.members, commit=(generation, 3))
    assert talk.m.phase.value == "training"


def test_what_was_said_in_an_old_world_does_not_count_in_a_new_one():
    talk = running(4)
    told(talk, WAITS, WAITS, WAITS, WAITS, for_s=40)
    talk.ready(*talk.members, commit=(2, 3))
    talk.wait(100)
    assert not has(BreakWorld, told(talk, WAITS, WAITS, WAITS, WAITS, for_s=5))


def test_a_job_of_a_fixed_size_ends_and_says_why():
    talk = static(2)
    reason = the(EndJob, told(talk, WAITS, WAITS, for_s=40)).reason
    assert hang_in(reason) == (Why.NETWORK_HANGS, 30.011, 7, "gradients", 0)


def hang_in(reason: Any) -> tuple[Why, float, int, str, int]:
    """Its kind and facts, the time in whole milliseconds."""
    facts = reason.facts
    for_s = round(facts["for_s"], 3)
    return reason.kind, for_s, facts["number"], facts["group"], facts["before"]
