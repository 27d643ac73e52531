"""Divisions of shards among ranks with random speeds and noise: close to the best one, without oscillation."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from elastic.exact import load_balancing
from elastic.exact.load_balancing import Division, LoadBalancer, SpeedWindow

SEEDS = 1000
STEPS = 200
NOISE = 0.1  # standard deviation of a measured step, relative
SETTLED = 30  # steps after which a division is as good as it gets
MOST_CHANGES = 4


@dataclass
class Run:
    """A world whose ranks have these seconds per shard, from given steps on."""

    seed: int
    shards: int
    speeds: dict[int, list[float]]
    divisions: list[Division] = field(default_factory=list)  # by step

    def run(self, steps: int) -> Run:
        rng, seconds = random.Random(self.seed), self.speeds[0]
        world = LoadBalancer(self.shards, len(seconds))
        windows = [SpeedWindow() for _ in seconds]
        for step in range(steps):
            seconds = self.speeds.get(step, seconds)
            self.divisions.append(world.division)
            for window, each, size in zip(windows, seconds, world.division, strict=True):
                window.took(each * size * max(0.5, rng.gauss(1.0, NOISE)), size)
            if world.due():
                world.exchanged([window.median_s for window in windows])
            world.committed()
        return self

    def changes(self) -> int:
        return sum(
            one != other for one, other in zip(self.divisions, self.divisions[1:], strict=False)
        )


def drawn(seed: int) -> Run:
    rng = random.Random(-seed)
    ranks = rng.randint(2, 8)
    return Run(seed, rng.randint(ranks + 1, 32), {0: [rng.uniform(1.0, 4.0) for _ in range(ranks)]})


@pytest.mark.nightly
def test_divisions_with_constant_speeds_rarely_change_and_are_within_one_shard_of_the_best():
    changes: Counter[int] = Counter()
    for seed in range(SEEDS):
        run = drawn(seed).run(STEPS)
        changes[run.changes()] += 1
        seconds = run.speeds[0]
        best = load_balancing.step_s(seconds, load_balancing.fastest(seconds, run.shards))
        for step in range(SETTLED, STEPS):
            ends = [each * size for each, size in zip(seconds, run.divisions[step], strict=True)]
            last = max(range(len(ends)), key=ends.__getitem__)
            assert ends[last] <= best + seconds[last] + 1e-9, (seed, step, run.divisions[step])
    assert max(changes) <= MOST_CHANGES, changes


def test_divisions_of_equal_ranks_stay_even_in_spite_of_noise():
    changed = 0
    for seed in range(100):
        rng = random.Random(seed)
        ranks = rng.randint(2, 8)
        run = Run(seed, ranks * rng.randint(2, 4), {0: [1.0] * ranks}).run(STEPS)
        changed += run.changes() > 0
    assert changed <= 2


def test_a_rank_that_is_slow_for_a_while_changes_the_division_twice():
    for seed in range(100):
        slow, recovers = 40, 90
        speeds = {0: [1.0] * 4, slow: [1.0, 1.0, 3.0, 1.0], recovers: [1.0] * 4}
        run = Run(seed, 16, speeds).run(150)
        assert run.divisions[slow] == (4, 4, 4, 4)
        assert all(division == (5, 5, 1, 5) for division in run.divisions[slow + 20 : recovers]), (
            seed
        )
        assert all(division == (4, 4, 4, 4) for division in run.divisions[recovers + 20 :]), seed
