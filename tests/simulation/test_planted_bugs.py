"""Every planted bug is caught, and the code without it is clean on the same seeds. What finds nothing proves nothing.

`pytest -s tests/simulation/test_planted_bugs.py` prints what caught which, and which seed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elastic.chaos.invariants.sample_history import SampleHistory
from elastic.chaos.simulator import simulated_faults as faults
from elastic.chaos.simulator.simulated_faults import Fault, FaultConditions
from elastic.chaos.simulator.simulated_network import Conditions
from elastic.chaos.simulator.simulator import Simulation
from elastic.driver.processes.liveness_timeouts import LivenessTimeouts
from elastic.protocol.messages import Commit, Worker
from elastic.runtime import lifecycle
from elastic.state import ElasticSampler, TorchState
from harness.scenario import played
from simulation.planted import SIMULATED, TOLD, TRIED, Bug

SEEDS = 200
SCENARIOS = Path(__file__).parents[1] / "unit" / "driver" / "membership" / "scenarios"
Row = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def table() -> Iterator[list[Row]]:
    """What was caught, printed at the end."""
    rows: list[Row] = []
    yield rows
    print("\n\n| planted bug | caught by | seed | which said |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


# ---- by the simulator ------------------------------------------------------------------------------------------------


def run(seed: int, bug: Bug) -> None:
    """A job, in weather in which worlds change all the time, or machines say that they go, if the bug shows there."""
    weather = None
    if bug.announced:
        weather = FaultConditions([*faults.WITH_NOTICE])
    if bug.damaged:
        weather = FaultConditions([*faults.DAMAGED])
    if bug.verified:
        weather = FaultConditions([*faults.MISCOMPUTING])
    if bug.changing:
        kinds: list[Fault] = [
            faults.leave,
            faults.change_hosts,
            faults.change_hosts,
            faults.kill_at_a_commit,
        ]
        weather = FaultConditions(kinds, (0.001, 0.03), Conditions((0.0005, 0.001, 0.02)))
    mild = seed % 2 == 0
    workers = 3 + seed % 4
    sim = Simulation(
        seed,
        workers=workers,
        steps=100,
        faults=12,
        mild=mild,
        weather=weather,
        standbys=bug.standbys,
        health_check=bug.health_check,
        restarts=20 if bug.damaged else None,
        verify=0.25 if bug.verified else 0.0,
    )
    outcome = sim.run()
    assert not (mild and outcome.code), f"the job failed, though a holder lived: {outcome.reason}"


@pytest.mark.nightly
@pytest.mark.parametrize("name", SIMULATED)
def test_simulator_finds_the_planted_bug(name, monkeypatch, table):
    bug = SIMULATED[name]
    bug.plant(monkeypatch.setattr)
    for seed in range(bug.first, bug.first + SEEDS):
        try:
            run(seed, bug)
        except Exception as error:  # a driver that raises is found, too
            monkeypatch.undo()
            run(seed, bug)  # without the bug this seed is clean
            table.append((name, "simulator", str(seed), said(error)))
            return
    pytest.fail(f"{SEEDS} seeds did not notice: {name}")


def said(error: BaseException) -> str:
    """What an error says first, without the seed, the line, and what follows."""
    text = str(error).partition("\n")[0].partition(" (line ")[0]
    if text.startswith("seed "):
        text = text.partition(": ")[2]
    if not text and error.__cause__ is not None:  # a bare assert
        text = traceback.extract_tb(error.__cause__.__traceback__)[-1].line or ""
    return text if len(text) <= 110 else f"{text[:110]}..."


# ---- by a scenario ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOLD)
def test_scenario_finds_the_planted_bug(name, monkeypatch, table):
    bug, file = TOLD[name]
    text = (SCENARIOS / f"{file}.txt").read_text()
    assert played(text) == text
    bug.plant(monkeypatch.setattr)
    with pytest.raises(AssertionError) as caught:
        played(text)
    table.append((name, f"scenario {file}", "", said(caught.value)))


# ---- by a check of its own -------------------------------------------------------------------------------------------


def check_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs, real samplers, and worlds that change in the middle. Reports are judged as a journal's are."""
    length, batch = 23, 2
    history = SampleHistory(length)
    place = SimpleNamespace(rank=0, size=0)
    now = SimpleNamespace(place=place, generation=1, activity=0)
    monkeypatch.setattr(lifecycle, "active", lambda: now)
    samplers: list[ElasticSampler] = []
    last: Commit | None = None
    for size, batches in ((3, 1), (2, 2), (4, 99), (3, 2), (5, 99)):
        now.generation, place.size = now.generation + 1, size
        progress = samplers[0].state_dict() if samplers else None
        for place.rank in range(size):
            if place.rank == len(samplers):
                samplers.append(ElasticSampler(range(length), seed=5))
                if progress is not None:
                    samplers[-1].load_state_dict(progress)
        del samplers[size:]
        fault = history.began(now.generation, size, last)
        assert not fault, fault
        dealt = []
        for place.rank, sampler in enumerate(samplers):
            dealt.append(list(sampler))
        for number in range(min(batches, -(-len(dealt[0]) // batch))):
            last = Commit(now.generation, number + 1)
            for rank, sampler in enumerate(samplers):
                mine = dealt[rank][number * batch : (number + 1) * batch]
                fault = history.reported(Worker("h", rank), last, sampler.epoch, mine)
                assert not fault, fault
                sampler.record_batch(number, batch)
        if batches == 99:
            for sampler in samplers:
                sampler.set_epoch(sampler.epoch + 1)
    fault = history.finish(complete=True)
    assert not fault, fault


def check_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained after a restore is what was trained the first time, bit for bit."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=optimizer, step=0)
    inputs = torch.randn(16, 8)

    def step() -> torch.Tensor:
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.weight.detach().clone()

    state.save()
    first = step()
    optimizer.param_groups[0]["lr"] = 0.5
    state.restore()
    assert torch.equal(step(), first), "the same step from the same commit led elsewhere"
    state.save()
    with torch.no_grad():
        model.weight.data.add_(1.0)
    quiet = model.weight.detach().clone()
    state.save()
    step()
    state.restore()
    assert torch.equal(model.weight, quiet), "a commit has missed a change"


def check_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker was frozen and fenced. It is heard of again, and that changes nothing."""
    leases: LivenessTimeouts[str] = LivenessTimeouts(2.0)
    leases.grant("zombie", 0.0)
    ran_out = [key for tick in range(1, 13) for key in leases.expired(tick * 0.25)]
    assert ran_out == ["zombie"]
    leases.drop("zombie")
    leases.renew("zombie", 3.1)
    assert "zombie" not in leases, "who was fenced has a lease again"


CHECKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "samples": check_samples,
    "state": check_state,
    "lease": check_lease,
}


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_bug_the_checks_hold(check, monkeypatch):
    CHECKS[check](monkeypatch)


@pytest.mark.parametrize("name", TRIED)
def test_check_finds_the_planted_bug(name, monkeypatch, table):
    bug, check = TRIED[name]
    bug.plant(monkeypatch.setattr)
    with pytest.raises(AssertionError) as caught:
        CHECKS[check](monkeypatch)
    table.append((name, f"check of {check}", "", said(caught.value)))
