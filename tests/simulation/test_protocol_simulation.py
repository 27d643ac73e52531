"""Both machines on a virtual clock, by the hundred. A seed that fails prints itself and its story.

python -m elastic.chaos.simulator --seed 7 --workers 6
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from elastic.chaos.simulator import Outcome, Simulation, Violation
from elastic.driver import composition, worlds
from elastic.driver.change import Change
from elastic.driver.gathering import Gathering
from elastic.driver.placement import Arrangement
from elastic.protocol import Commit
from elastic.recovery import Recovery

SEEDS = 100
ALLOWED = (  # ways in which a job may end without success when anything may happen to it
    "are lost, and nobody is left to go on from",
    "no survivor holds a commit",
    "raised the same exception",
    "every slot was given up",
)


def simulate(seed: int, *, mild: bool) -> Outcome:
    outcome = Simulation(seed, workers=1 + seed % 6, steps=150, faults=9, mild=mild).run()
    # Only for a frozen process is a timeout the last resort.
    frozen = any("freeze" in fault for fault in outcome.faults)
    assert frozen or outcome.virtual_s < 60, f"seed {seed} stood still: {outcome}"
    return outcome


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_whatever_happens_nothing_false_is_trained_and_the_job_ends(first):
    for seed in range(first, first + 20):
        outcome = simulate(seed, mild=False)
        allowed = outcome.code == 0 or any(reason in outcome.reason for reason in ALLOWED)
        assert allowed, f"seed {seed}: {outcome}"


@pytest.mark.parametrize("first", range(1000, 1000 + SEEDS, 20))
def test_as_long_as_one_holder_lives_the_job_succeeds(first):
    for seed in range(first, first + 20):
        outcome = simulate(seed, mild=True)
        assert outcome.code == 0, f"seed {seed}: {outcome}"


def test_the_same_seed_is_the_same_run():
    once, again = Simulation(3), Simulation(3)
    assert once.run() == again.run()
    assert once.story() == again.story() != ""


def test_many_workers():
    assert Simulation(1, workers=60, steps=10, faults=6, mild=True).run().code == 0


def found(planted: str) -> None:
    """One of these seeds must notice what was planted."""
    for seed in range(60):
        try:
            outcome = simulate(seed, mild=seed % 2 == 0)
        except (Violation, AssertionError):
            return
        if outcome.code and seed % 2 == 0:
            return
    pytest.fail(f"60 seeds did not notice: {planted}")


def arrange_by_age(survivors, newcomers, commits):
    newest = max((c for w in survivors if (c := commits.get(w))), default=None)
    holders = [w for w in survivors if commits.get(w) == newest] if newest else []
    return Arrangement([*survivors, *newcomers], len(holders), newest)


def number_by_count(self):
    self._count = getattr(self, "_count", 0) + 1
    self.newest = Commit(self.generation, self._count)
    return self.newest


def stop_at_own_check(self, message, original=Recovery.receive):
    if type(message).__name__ == "StopAt":
        message = type(message)(message.generation, message.change, self._checks)
    return original(self, message)


def keep_the_old_label(self):
    return self.newest or Commit(self.generation, 0)


def stop_where_the_last_one_is(self, now):
    self.check = min(self._answers.values()) + 1
    self.by = now + self.settings.elastic_timeout_s
    return self.check


def everybody_goes(old, new, commits, *, original=composition.compose, **limits):
    made = original([s for s in old if not s.leaving], new, commits, **limits)
    return dataclasses.replace(made, leaving=[s for s in old if s.leaving])


def wait_for_nobody(self, roster):
    return iter(())


PLANTED = {
    "rank 0 is the oldest, not a holder": (composition, "arrange", arrange_by_age),
    "commits are counted, and a stop counts again": (Recovery, "committed", number_by_count),
    "each stops where it is": (Recovery, "receive", stop_at_own_check),
    "all stop where the last one is": (Change, "stop", stop_where_the_last_one_is),
    "who leaves goes, whatever it holds": (worlds, "compose", everybody_goes),
    "survivors are not waited for": (Gathering, "awaited", wait_for_nobody),
    "what was copied is not a commit": (Recovery, "adopt", keep_the_old_label),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_bugs_are_found(planted, monkeypatch):
    where, name, bug = PLANTED[planted]
    monkeypatch.setattr(where, name, bug)
    found(planted)


def test_a_violation_names_its_seed_and_tells_the_story(monkeypatch):
    def planted(self, process):
        raise AssertionError("planted")

    monkeypatch.setattr(Simulation, "labelled", planted)
    with pytest.raises(Violation, match=r"seed 7: planted(.|\n)*HostsChanged"):
        Simulation(7).run()


def test_chance_is_seeded():
    state = random.getstate()
    Simulation(11).run()
    assert random.getstate() == state
