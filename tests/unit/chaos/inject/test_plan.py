"""Faults, their times and victims: read from a plan, or drawn from a seed. Errors name their line."""

from __future__ import annotations

import itertools
import random
import statistics
from pathlib import Path

import pytest

from elastic.chaos.inject.plan import (
    DRAWN_PER_LOOK,
    LASTING,
    Chance,
    Fault,
    Plan,
    Schedule,
    choose,
    draw,
)
from elastic.chaos.inject.plan_file import read_plan
from elastic.protocol.messages import Worker
from harness.golden import recorded
from harness.refusals import refusal_of

A, B, C = (Worker("gpu1", 0), Worker("gpu1", 1), Worker("gpu2", 0, 4))

PLAN = """
[random]
mean_time_between_faults_s = 30
seed = 7
faults = ["kill", "slow"]
factor = 2.5
for_s = [1, 4]
duration_s = 600
spare = ["gpu1:0"]

[[fault]]
at_s = 12
kind = "freeze"
victim = "rank 0"
for_s = 8

[[fault]]
after_commits = 100
kind = "slow"
victim = "newest"
factor = 5

[[fault]]
at_generation = 3
kind = "kill"
"""


def test_a_plan_has_kind_time_and_victim_of_each_fault():
    assert read_plan(PLAN, "plan.toml") == Plan(
        faults=(
            Fault("freeze", "rank 0", at_s=12.0, for_s=8.0),
            Fault("slow", "newest", after_commits=100, for_s=5.0, factor=5.0),
            Fault("kill", "random", at_generation=3),
        ),
        chance=Chance(30.0, ("kill", "slow"), 7, 600.0, (1.0, 4.0), 2.5, ("gpu1:0",)),
    )


def test_a_fault_has_a_description():
    words = [str(fault) for fault in read_plan(PLAN, "plan.toml").faults]
    recorded("messages", words)


FREEZE = '[[fault]]\nkind = "freeze"\n'
OTHER = '[[fault]]\nat_s = 1\nkind = "kill"\n\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[fault]\n",
        "[faults]\n",
        "faults = 3\n",
        "[fault]\nat_s = 1\n",
        "random = 3\n",
        OTHER + '[[fault]]\nat_s = 1\nkind = "kil"\n',
        OTHER + "[[fault]]\nat_s = 1\n",
        OTHER + FREEZE,
        FREEZE + "at_s = 1\nat_generation = 2\n",
        FREEZE + "at_s = -1\n",
        FREEZE + 'at_s = "now"\n',
        FREEZE + "at_s = nan\n",
        FREEZE + "at_s = inf\n",
        FREEZE + "at_s = true\n",
        FREEZE + "after_commits = 0\n",
        FREEZE + "at_s = 1\nfor_s = 0\n",
        FREEZE + "at_s = 1\nfor_s = -1\n",
        FREEZE + "at_s = 1" + 400 * "0" + "\n",
        FREEZE + "at_s = 1" + 5000 * "0" + "\n",
        FREEZE + "at_s = 1\nfor_s = 1e7\n",
        FREEZE + "after_commits = 1" + 30 * "0" + "\n",
        FREEZE + 'at_s = 1\nvictim = "rank ٣"\n',
        FREEZE + 'at_s = 1\nvictim = "x"\n',
        FREEZE + "at_s = 1\nfactor = 3\n",
        FREEZE + "at_s = 1\nfor = 3\n",
        FREEZE + 'at_s = 1\nvictim = "rank one"\n',
        '[[fault]]\nat_s = 1\nkind = "kill"\nfor_s = 1\n',
        '[[fault]]\nat_s = 1\nkind = "slow"\nfactor = 1\n',
        "[random]\nseed = 1\n",
        "[random]\nmean_time_between_faults_s = 0\n",
        "[random]\nmean_time_between_faults_s = 1e-9\n",
        "[random]\nmean_time_between_faults_s = 1\nfaults = []\n",
        "[random]\nmean_time_between_faults_s = 1\nfaults = ['x']\n",
        "[random]\nmean_time_between_faults_s = 1\nfor_s = [4, 1]\n",
        "[random]\nmean_time_between_faults_s = 1\nfor_s = 4\n",
        "[random]\nmean_time_between_faults_s = 1\nspare = 'x'\n",
        "[random]\nmean_time_between_faults_s = 1\nseed = 1.5\n",
    ],
)
def test_invalid_plan_is_refused_with_its_line(text):
    recorded("messages", refusal_of(read_plan, text, "plan.toml"))


# ---- random faults -------------------------------------------------------------------------------


def first(chance: Chance, count: int) -> list[Fault]:
    return list(itertools.islice(draw(chance), count))


def test_equal_seeds_draw_equal_faults_and_different_seeds_different_ones():
    one, two = Chance(10.0, seed=1), Chance(10.0, seed=2)
    assert first(one, 50) == first(one, 50)
    assert first(one, 50) != first(two, 50)


def test_drawn_faults_have_the_requested_mean_interval():
    times = [fault.at_s or 0.0 for fault in first(Chance(10.0, seed=3), 4000)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(10.0, rel=0.05)
    assert statistics.median(gaps) == pytest.approx(6.93, rel=0.08)  # exponential: ln 2 of the mean


def test_drawn_faults_have_the_duration_of_their_kind_or_the_requested_one():
    for fault in first(Chance(1.0, ("kill", "freeze", "slow"), seed=4), 300):
        low, high = LASTING.get(fault.kind, (0.0, 0.0))
        assert low <= fault.for_s <= high
        assert bool(fault.factor) == (fault.kind == "slow")
    asked = first(Chance(1.0, ("freeze",), seed=4, for_s=(1.0, 1.5)), 300)
    assert all(1.0 <= fault.for_s <= 1.5 for fault in asked)


def test_no_fault_is_drawn_after_the_duration():
    times = [fault.at_s or 0.0 for fault in draw(Chance(2.0, seed=5, duration_s=60.0))]
    assert times
    assert max(times) <= 60.0


def test_plan_without_a_seed_gets_the_given_seed():
    assert Plan(chance=Chance(1.0)).seeded(9).chance == Chance(1.0, seed=9)
    assert Plan(chance=Chance(1.0, seed=3)).seeded(9).chance == Chance(1.0, seed=3)


# ---- times ---------------------------------------------------------------------------------------


def test_each_fault_is_due_once_after_its_time_commit_or_world():
    at_time, at_commit, at_world = (
        Fault("kill", at_s=5.0),
        Fault("leave", after_commits=10),
        Fault("cut", at_generation=3),
    )
    schedule = Schedule(Plan((at_time, at_commit, at_world)))
    assert schedule.due(since_s=0.0, commits=0, generation=2) == []
    assert schedule.due(since_s=5.0, commits=9, generation=2) == [at_time]
    assert schedule.due(since_s=6.0, commits=12, generation=2) == [at_commit]
    assert schedule.left() == [at_world]
    assert schedule.due(since_s=7.0, commits=12, generation=4) == [at_world]
    assert schedule.due(since_s=99.0, commits=99, generation=9) == []
    assert schedule.left() == []


def test_a_fault_without_a_victim_stays_due():
    fault = Fault("kill", "rank 3", at_s=5.0)
    schedule = Schedule(Plan((fault,)))
    assert schedule.due(since_s=5.0, commits=0, generation=1) == [fault]
    schedule.put_off(fault)
    assert schedule.left() == [fault]
    assert schedule.due(since_s=6.0, commits=0, generation=1) == [fault]
    assert schedule.left() == []


def test_drawn_faults_are_due_in_order_once():
    chance = Chance(10.0, seed=1)
    drawn = first(chance, 3)
    schedule = Schedule(Plan(chance=chance))
    assert drawn[0].at_s is not None and drawn[1].at_s is not None
    assert schedule.due(since_s=drawn[0].at_s - 0.1, commits=0, generation=1) == []
    assert schedule.due(since_s=drawn[1].at_s, commits=0, generation=1) == drawn[:2]
    assert schedule.due(since_s=drawn[1].at_s, commits=0, generation=1) == []


def test_number_of_overdue_drawn_faults_returned_at_once_is_limited():
    schedule = Schedule(Plan(chance=Chance(1e-9, seed=1)))
    for _ in range(2):
        assert len(schedule.due(since_s=1e6, commits=0, generation=1)) == DRAWN_PER_LOOK


# ---- victims -------------------------------------------------------------------------------------


def chosen(victim: str, members=(A, B, C), arrived=(B, A, C), **rest) -> list[Worker]:
    fault = Fault("kill", victim, at_s=0.0, drawn=rest.pop("drawn", False))
    dice = rest.pop("dice", random.Random(1))
    everybody = {"suffering": (), "spare": ()} | rest
    return choose(fault, members=members, arrived=arrived, dice=dice, **everybody)


def test_victims_are_named_by_rank_age_slot_or_host():
    assert chosen("rank 0") == [A]
    assert chosen("rank 2") == [C]
    assert chosen("rank 3") == []
    assert chosen("oldest") == [B]
    assert chosen("newest") == [C]
    assert chosen("worker gpu2:0") == [C]
    assert chosen("host gpu1") == [A, B]
    assert chosen("all") == [A, B, C]
    assert len(chosen("all but one")) == 2
    assert chosen("random")[0] in (A, B, C)
    for victim in ("rank 0", "oldest", "newest", "host gpu1", "all but one", "random"):
        assert chosen(victim, members=(), arrived=()) == []


def test_random_faults_eventually_hit_all_workers_except_spared_ones():
    dice = random.Random(1)
    hit = {w for _ in range(100) for w in chosen("random", drawn=True, dice=dice, spare=["gpu1:0"])}
    assert hit == {B, C}


def test_random_faults_spare_one_worker_with_the_state():
    assert chosen("random", drawn=True, members=(A,)) == []
    assert chosen("random", drawn=True, members=(A, B), suffering=(A,)) == []
    assert chosen("random", drawn=True, suffering=(A, B)) == []
    assert chosen("random", drawn=True, members=(A, B), spare=["gpu1:0"]) == [B]
    assert chosen("random", members=(A,)) == [A]  # a plan with such a fault gets it


def test_drawn_slowdown_may_hit_the_last_worker():
    fault = Fault("slow", at_s=0.0, for_s=1.0, factor=2.0, drawn=True)
    dice = random.Random(1)
    assert choose(fault, members=[A], arrived=[A], suffering=[], spare=[], dice=dice) == [A]


def test_plan_in_the_documentation_is_valid():
    page = (Path(__file__).parents[4] / "docs" / "chaos.md").read_text()
    plan = read_plan(page.partition("```toml\n")[2].partition("```")[0], "docs/chaos.md")
    assert len(plan.faults) == 4
    assert plan.chance is not None
