"""Whole jobs on a virtual clock: real driver, agent and worker machines, under whatever a seed draws.

A seed that fails prints itself; `python -m elastic.chaos simulate --seed N` shows it, and writes its journal.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from elastic.chaos.invariants.invariants import check_journal
from elastic.chaos.simulator.simulated_faults import (
    DAMAGED,
    EVERY,
    FROZEN,
    MILD,
    MISCOMPUTING,
    ON_GPUS,
    STEERED,
    THROTTLING,
    WITH_NOTICE,
    Fault,
    FaultConditions,
    hang_the_network,
    kill_one,
    spoil_all,
)
from elastic.chaos.simulator.simulated_network import Conditions
from elastic.chaos.simulator.simulated_worker import SimulatedWorker
from elastic.chaos.simulator.simulator import Outcome, Simulation, Violation
from elastic.driver import events
from elastic.driver.journal.journal import replay
from elastic.driver.reasons import ReasonKind
from elastic.protocol.messages import Worker
from harness import wording
from harness.golden import recorded

WORKERS = 8
QUICK = 12
MANY = 1000
BATCH = 20  # of them in a test: one in every run, all in the nightly one
ALLOWED = (  # ways in which a job may end without success when anything may happen to it
    ReasonKind.ALL_LOST,
    ReasonKind.NO_COMMIT,
    ReasonKind.SAME_EXCEPTION,
    ReasonKind.SLOTS_SPENT,
)


def some(every: range, count: int) -> list[Any]:
    """The first ones run each time, the others at night."""
    return [
        pytest.param(each, marks=[pytest.mark.nightly] if number >= count else [])
        for number, each in enumerate(every)
    ]


def simulate(seed: int) -> Outcome:
    """Even seeds are mild: as long as one holder lives, the job succeeds."""
    mild = seed % 2 == 0
    outcome = Simulation(seed, workers=WORKERS, steps=150, faults=14, mild=mild).run()
    allowed = not mild and outcome.reason.kind in ALLOWED
    assert outcome.code == 0 or allowed, f"seed {seed}: {outcome}"
    return outcome


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, QUICK))]
)
def test_simulated_job_violates_no_invariant_and_ends(seed):
    simulate(seed)


@pytest.mark.parametrize(
    ("seed", "workers"),
    [
        (9032, 2),  # everybody would have been stuck, with nobody left to wait for anybody
        (9099, 2),  # a host is lost while the only member there is being killed
        (9114, 5),  # a commit that was under way on a lost connection comes after a newer one
    ],
)
def test_seeds_of_past_violations_pass(seed, workers):
    Simulation(seed, workers=workers, steps=150, faults=14, silence_s=0.0).run()


@pytest.mark.slow
@pytest.mark.parametrize("first", some(range(QUICK, QUICK + MANY, BATCH), 1))
def test_many_simulated_seeds_keep_the_invariants(first):
    for seed in range(first, first + BATCH):
        simulate(seed)


def busy(seed: int) -> Simulation:
    """The events that arrive within some milliseconds are handled together."""
    mild = seed % 2 == 0
    weather = FaultConditions.drawn(seed, mild=mild)
    # The simulated bit flip assumes that the driver handles its report immediately.
    weather.faults = [fault for fault in weather.faults if fault is not spoil_all]
    weather.busy_s = random.Random(seed).choice((0.001, 0.01, 0.05, 0.3))
    return Simulation(seed, workers=WORKERS, steps=150, faults=14, mild=mild, weather=weather)


@pytest.mark.parametrize("first", some(range(0, 1000, BATCH), 1))
def test_busy_driver_handles_events_together(first, tmp_path):
    """Seed 131: a deadline expires between two events that are handled together."""
    together = 0
    for seed in (*range(first, first + BATCH), 131):
        simulation = busy(seed)
        outcome = simulation.run()
        allowed = seed % 2 == 1 and outcome.reason.kind in ALLOWED
        assert outcome.code == 0 or allowed, f"seed {seed}: {outcome}"
        together += sum(entry.more for entry in simulation.driver.entries)
    assert together > 100
    simulation.write_journal(tmp_path / "journal")
    replay(tmp_path / "journal")
    check_journal(tmp_path / "journal")


@pytest.mark.parametrize("seed", some(range(3), 1))
@pytest.mark.parametrize("workers", range(1, 8))
def test_small_simulated_jobs_succeed(workers, seed):
    outcome = Simulation(seed, workers=workers, steps=60, mild=True).run()
    assert outcome.code == 0, f"seed {seed}: {outcome}"


def test_simulated_job_with_many_workers_succeeds():
    assert Simulation(1, workers=60, steps=10, faults=6, mild=True).run().code == 0


@pytest.mark.parametrize("seed", range(4))
def test_coarse_model_of_a_large_job_succeeds_with_few_workers(seed):
    """The coarse model of large jobs, in small."""
    outcome = Simulation(seed, workers=12, steps=60, faults=8, mild=True, step_s=0.2).run()
    assert outcome.code == 0, f"seed {seed}: {outcome}"


@pytest.mark.parametrize("fixed", [True, False])
def test_job_on_fixed_hosts_ends_when_slots_are_too_few_and_otherwise_at_the_timeout(fixed):
    """A slot whose workers die while they start: only a list that may grow is worth the wait."""
    calm = FaultConditions()
    sim = Simulation(3, workers=2, steps=20, faults=0, mild=True, weather=calm, fixed_hosts=fixed)

    def born(process) -> None:
        if (process.worker.host, process.worker.slot) == ("h0", 1):
            process.strike = ("imports", 0.0)

    sim.born = born  # type: ignore[method-assign]
    outcome = sim.run()
    kind = ReasonKind.TOO_FEW_SLOTS if fixed else ReasonKind.TOO_FEW
    assert (outcome.code, outcome.reason.kind) == (1, kind), f"{outcome}\n{sim.story()}"
    assert (outcome.virtual_s < sim.settings.elastic_timeout_s) is fixed


# ---- wherever control is given up --------------------------------------------------------------------------------

PLACES = (
    "imports",
    "welcome",
    "ready",
    "model",
    "state",
    "step",
    "gradients",
    "commit",
    "held",
    "restore",
    "returned",
    "exit",
)


def busy_job(seed: int, delay_s: float = 0.1) -> Simulation:
    """A worker dies early and is started again, so that all has to happen: a recovery, a join, a copy, a change."""
    weather = FaultConditions(step_s=(0.01, 0.06), network=Conditions((delay_s,)))
    sim = Simulation(
        seed, workers=4, steps=200, faults=0, mild=True, weather=weather, faults_s=30.0
    )

    def kill() -> None:
        victim = sim.processes.get(Worker("h0", 0))
        if victim is not None:
            victim.die(-9)

    sim.clock.at(4.0, kill)
    return sim


FROZEN_S = (0.0, 1.0, 6.0)
STRIKES = [  # each place, and each way three times, in every run; each way at each place at night
    pytest.param(place, frozen_s, marks=[pytest.mark.nightly] if (at + way) % 3 else [])
    for at, place in enumerate(PLACES)
    for way, frozen_s in enumerate(FROZEN_S)
]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "frozen_s"), STRIKES)
def test_worker_can_be_struck_at_each_safepoint(place, frozen_s):
    """Killed, stopped for less than a lease, or fenced and woken later."""
    sim = busy_job(seed=5, delay_s=0.6 if place == "held" else 0.1)

    def born(process) -> None:
        if process.worker == Worker("h1", 0):
            process.strike = (place, frozen_s)

    sim.born = born  # type: ignore[method-assign]
    outcome = sim.run()
    assert outcome.code == 0, outcome
    assert outcome.places[place] == 1


def crash_the_driver(first: int, step: int) -> None:
    """At its n-th place from the start, for every n: before an event is written, or between two actions."""
    crashes = 0
    for places in range(first, 10_000, step):
        sim = busy_job(seed=5)
        sim.driver.doom, sim.driver.down_s = places, 0.3
        sim.reports_samples = False  # of what was under way to the driver some is lost
        outcome = sim.run()
        assert outcome.code == 0, f"crashed after {places} places: {outcome}"
        crashes += outcome.crashes
        if not outcome.crashes:
            break
    assert crashes > 5


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1, 21))
def test_driver_can_crash_at_each_safepoint(first):
    crash_the_driver(first, 20)


# ---- what must not happen ----------------------------------------------------------------------------------------


def quiet_job(**more) -> Simulation:
    return Simulation(
        3, workers=4, steps=200, faults=0, mild=True, weather=FaultConditions(), **more
    )


@pytest.mark.parametrize("trouble", ["slow", "long"])
def test_slow_worker_is_named_and_not_fenced(trouble):
    sim = quiet_job()
    limit = sim.settings.busy_s * (0.8 if trouble == "slow" else 1.5)

    def hold_up() -> None:
        process = next(iter(sim.processes.values()))
        process.trouble, process.trouble_s = trouble, limit

    sim.clock.at(4.0, hold_up)
    outcome = sim.run()
    assert outcome.code == 0 and "KillWorker" not in sim.story()
    assert wording.KEEPS_OTHERS_WAITING in sim.story()  # but it is named


@pytest.mark.parametrize(("trouble", "limit"), [("stuck", "idle_s"), ("spinning", "busy_s")])
def test_stuck_worker_is_fenced(trouble, limit):
    sim = quiet_job()
    victims = []

    def stick() -> None:
        victims.append(next(iter(sim.processes.values())))
        victims[0].trouble = trouble

    sim.clock.at(4.0, stick)
    outcome = sim.run()
    assert outcome.code == 0
    assert f"KillWorker worker={victims[0].worker}" in sim.story()
    assert outcome.virtual_s < 4.0 + getattr(sim.settings, limit) + 20.0


def test_only_the_worker_whose_gpu_hangs_is_fenced():
    sim = quiet_job()
    victims = []

    def hang() -> None:
        sim.training.on_gpus = True
        victims.append(next(iter(sim.processes.values())))
        victims[0].gpu_hangs = True

    sim.clock.at(4.0, hang)
    outcome = sim.run()
    assert outcome.code == 0
    assert sim.story().count("KillWorker") == 1
    assert f"KillWorker worker={victims[0].worker}" in sim.story()
    assert outcome.virtual_s < 4.0 + sim.settings.gpu_hang_s + 25.0


def test_nccl_hang_fences_no_worker_and_all_continue_in_a_new_world():
    sim = quiet_job()
    sim.clock.at(4.0, hang_the_network, sim)
    outcome = sim.run()
    assert outcome.code == 0 and "KillWorker" not in sim.story()
    assert wording.NCCL_HANGS_OR_NETWORK in sim.story()
    assert outcome.virtual_s < 4.0 + 3 * sim.settings.gpu_hang_s + 25.0


@pytest.mark.parametrize("first", some(range(0, 16, 4), 1))
@pytest.mark.slow
def test_gpu_and_network_hangs_never_cost_a_worker_with_a_working_gpu(first):
    """While others are slow on their hosts. The simulator looks at each kill; the job has to come to its end."""
    for seed in range(first, first + 4):
        weather = FaultConditions(faults=[*ON_GPUS, kill_one])
        outcome = Simulation(seed, workers=6, steps=150, faults=8, mild=True, weather=weather).run()
        assert outcome.code == 0, f"seed {seed}: {outcome}"


def test_a_notice_ahead_of_time_costs_no_step_and_breaks_no_world():
    sim = quiet_job()
    sim.clock.at(4.0, sim.agents["h1"].announce, events.Notice("taken back", 2.0))
    sim.clock.at(6.0, sim.lose_host, "h1")
    outcome = sim.run()
    assert outcome.code == 0
    assert "LetGo" in sim.story() and "BreakWorld" not in sim.story()
    assert "KillWorker" not in sim.story()


def succeed_under(faults: list[Fault], first: int) -> None:
    """Five jobs, each with these faults."""
    for seed in range(first, first + 5):
        weather = FaultConditions(faults=faults)
        outcome = Simulation(
            seed, workers=WORKERS, steps=150, faults=12, mild=True, weather=weather
        ).run()
        assert outcome.code == 0, f"seed {seed}: {outcome}"


@pytest.mark.parametrize("first", some(range(0, 200, 5), 1))
@pytest.mark.slow
def test_machines_that_announce_their_end_never_cost_the_job(first):
    """They go, stay, or nothing happens, while others die and drivers are replaced; nobody is started on them."""
    succeed_under(WITH_NOTICE, first)


@pytest.mark.parametrize("first", some(range(0, 200, 5), 1))
@pytest.mark.slow
def test_job_restarts_from_a_checkpoint_when_all_replicas_are_corrupted(first):
    """While others die and drivers are replaced. What is trained to its end comes from nothing that was spoilt."""
    restarts = 0
    for seed in range(first, first + 5):
        sim = Simulation(
            seed,
            workers=2 + seed % 5,
            steps=150,
            faults=8,
            mild=True,
            standbys=seed % 2,
            weather=FaultConditions(faults=[*DAMAGED, kill_one]),
            restarts=8,
        )
        outcome = sim.run()
        assert outcome.code == 0, f"seed {seed}: {outcome}"
        restarts += sim.story().count(wording.TRAINING_GOES_FROM_NEWEST_2)
    assert restarts


@pytest.mark.parametrize("first", some(range(0, 1000, 10), 1))
@pytest.mark.slow
def test_only_the_worker_that_computes_wrongly_is_fenced_as_miscomputed_in_time(first):
    """Now and then or always, while others die and drivers are replaced. The simulation checks both."""
    injected = named = 0
    for seed in range(first, first + 10):
        sim = Simulation(
            seed,
            workers=3 + seed % 4,
            steps=150,
            faults=8,
            mild=True,
            standbys=seed % 2,
            weather=FaultConditions(faults=[*MISCOMPUTING]),
            verify=(0.25, 1 / 16, 1.0)[seed % 3],
        )
        outcome = sim.run()
        undecided = outcome.reason.kind is ReasonKind.SAME_EXCEPTION  # in a world of two
        assert outcome.code == 0 or undecided, f"seed {seed}: {outcome}"
        injected += sum("incorrectly" in each for each in outcome.faults)
        named += sum(
            isinstance(action, events.KillWorker) and action.reason.kind is ReasonKind.MISCOMPUTED
            for entry in sim.driver.entries
            for action in entry.actions
        )
    assert injected and named


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 300, 10))
def test_only_stragglers_are_replaced_when_standbys_are_ready(first):
    """While others die and drivers are replaced. The simulation checks that no straggler is killed."""
    throttled = replaced = 0
    for seed in range(first, first + 10):
        sim = Simulation(
            seed,
            workers=3 + seed % 4,
            steps=900,
            faults=6,
            mild=True,
            standbys=1 + seed % 2,
            weather=FaultConditions(faults=[*THROTTLING], step_s=(0.02, 0.03)),
            replace_stragglers=True,
        )
        outcome = sim.run()
        assert outcome.code == 0, f"seed {seed}: {outcome}"
        gone = {
            action.worker
            for entry in sim.driver.entries
            for action in entry.actions
            if isinstance(action, events.LetGo) and action.reason.kind is ReasonKind.REPLACED
        }
        assert gone <= sim.throttled, f"seed {seed}: {gone - sim.throttled} were not slow"
        throttled, replaced = throttled + len(sim.throttled), replaced + len(gone)
    assert throttled >= replaced > 0, (throttled, replaced)


@pytest.mark.parametrize(
    ("restarts", "end"), [(None, ReasonKind.ALL_LOST), (0, ReasonKind.ALL_LOST)]
)
def test_job_with_corrupted_replicas_and_no_restarts_left_ends(restarts, end):
    sim = quiet_job(restarts=restarts)
    sim.clock.at(4.0, spoil_all, sim)
    outcome = sim.run()
    assert (outcome.code, outcome.reason.kind) == (1, end)
    recorded("messages", str(outcome.reason))


@pytest.mark.slow
def test_frozen_host_is_left_out_within_a_lease_and_used_again_after_thawing():
    """Its kernel goes on acknowledging. When it is back, its workers change nothing."""
    sim = Simulation(
        3, workers=6, steps=2000, faults=0, mild=True, weather=FaultConditions(), faults_s=60.0
    )
    agent = sim.agents["h1"]

    def stop() -> None:
        agent.freeze()
        for process in [*agent.processes.values()]:
            process.freeze()
            sim.clock.after(20.0, process.thaw)
        sim.clock.after(20.0, agent.thaw)

    sim.clock.at(10.0, stop)
    outcome = sim.run()
    assert outcome.code == 0
    after = [
        (entry.at, action)
        for entry in sim.driver.entries
        for action in entry.actions
        if isinstance(action, events.PublishWorld) and entry.at > 10.0
    ]
    at, world = after[0]
    assert "h1" not in {member.worker.host for member in world.members}
    assert at - 10.0 <= sim.settings.lease_s + 0.3
    assert "h1" in {member.worker.host for member in after[-1][1].members}, "it is used again"


@pytest.mark.parametrize("first", some(range(0, 200, 5), 1))
@pytest.mark.slow
def test_frozen_machines_never_fail_the_job(first):
    """For a moment, or for long enough to be given up, while others die and drivers are replaced."""
    succeed_under(FROZEN, first)


@pytest.mark.slow
def test_scale_and_drain_requests_break_no_world_and_kill_no_worker():
    sim = Simulation(3, workers=4, steps=1500, faults=0, mild=True, weather=FaultConditions())
    for at, event in (
        (10.0, events.ScaleRequested(1, 3)),
        (20.0, events.ScaleRequested(2, 4)),
        (30.0, events.DrainRequested(3, "h0")),
        (40.0, events.DrainRequested(4, "h0", True)),
    ):
        sim.clock.at(at, sim.driver.handle, event)
    outcome = sim.run()
    assert outcome.code == 0
    actions = [action for entry in sim.driver.entries for action in entry.actions]
    assert [a.done for a in actions if isinstance(a, events.AnswerRequest)] == [True] * 4
    sizes = [len(a.members) for a in actions if isinstance(a, events.PublishWorld)]
    assert sizes[:5] == [4, 4, 3, 4, 2] and sizes[-1] == 4, sizes
    assert "BreakWorld" not in sim.story() and "KillWorker" not in sim.story()


@pytest.mark.slow
def test_a_larger_job_starts_no_more_newcomers_at_once_than_the_machine_has_cores():
    sim = Simulation(
        3, workers=8, steps=1500, faults=0, mild=True, weather=FaultConditions(), starting_max=2
    )
    sim.clock.at(10.0, sim.driver.handle, events.ScaleRequested(1, 2))
    sim.clock.at(20.0, sim.driver.handle, events.ScaleRequested(2, 8))
    outcome = sim.run()
    assert outcome.code == 0
    starting, most = set(), 0
    for entry in sim.driver.entries:
        if isinstance(entry.event, events.WorkerConnected):
            starting.discard(entry.event.worker)
        starting |= {a.worker for a in entry.actions if isinstance(a, events.StartWorker)}
        most = max(most, len(starting) if entry.at > 10.0 else 0)
    assert most == 2
    actions = [action for entry in sim.driver.entries for action in entry.actions]
    assert len([a for a in actions if isinstance(a, events.PublishWorld)][-1].members) == 8


@pytest.mark.parametrize("first", some(range(0, 200, 5), 1))
@pytest.mark.slow
def test_operator_requests_never_fail_a_simulated_job(first):
    """They scale, drain and remove as they like, while workers, hosts and drivers are lost."""
    for seed in range(first, first + 5):
        sim = Simulation(
            seed,
            workers=WORKERS,
            steps=150,
            faults=12,
            mild=True,
            standbys=seed % 2,
            weather=FaultConditions(faults=STEERED),
            starting_max=[None, 1, 2][seed % 3],
        )
        outcome = sim.run()
        assert outcome.code == 0, f"seed {seed}: {outcome}"


@pytest.mark.parametrize("mild", [True, False])
@pytest.mark.parametrize("first", some(range(0, 200, 5), 1))
@pytest.mark.slow
def test_standbys_replace_lost_workers(first, mild):
    """In all weathers. Nobody who waits is left out while there is a place."""
    took = 0
    for seed in range(first, first + 5):
        sim = Simulation(seed, workers=4, standbys=2, steps=150, faults=12, mild=mild)
        outcome = sim.run()
        assert not mild or outcome.code == 0, f"seed {seed}: {outcome}"
        took += sim.story().count("TellStandby")
    assert took >= 1


@pytest.mark.parametrize("mild", [True, False])
@pytest.mark.parametrize("first", some(range(0, 200, 20), 1))
@pytest.mark.slow
def test_no_worker_is_admitted_before_its_health_check_has_passed(first, mild):
    """In all weathers; checks fail, hang, compute wrongly, or end late. An invariant looks at each world."""
    failed = 0
    for seed in range(first, first + 20):
        sim = Simulation(seed, workers=4, steps=100, faults=8, mild=mild, health_check=True)
        outcome = sim.run()
        assert not mild or outcome.code == 0, f"seed {seed}: {outcome}"
        results = [
            entry.event
            for entry in sim.driver.entries
            if isinstance(entry.event, events.WorkerHealthChecked)
        ]
        failed += sum(each.outcome is not events.HealthOutcome.PASSED for each in results)
    assert failed > 20


def test_standby_replaces_a_lost_worker_at_once():
    sim = Simulation(
        3, workers=4, standbys=1, steps=400, weather=FaultConditions(faults=[], struck=0.0)
    )
    sim.clock.at(6.0, kill_one, sim)
    outcome = sim.run()
    assert outcome.code == 0
    actions = [action for entry in sim.driver.entries for action in entry.actions]
    worlds = [action for action in actions if isinstance(action, events.PublishWorld)]
    # Of init(), and two of elastic.run.
    assert [len(world.members) for world in worlds] == [4, 4, 4]
    first, second = (action.worker for action in actions if isinstance(action, events.TellStandby))
    members = [member.worker for member in worlds[-1].members]
    assert first in members and second not in members


def test_unreachable_worker_that_resumes_after_its_fence_exits():
    sim = quiet_job()
    zombies: list[SimulatedWorker] = []

    def bury() -> None:
        zombies.extend(sim.agents["h1"].processes.values())
        for process in zombies:
            process.freeze()
        sim.network.cut("h1", 0, 1)
        sim.training.cut("h1")

    def raise_up() -> None:
        sim.heal("h1")
        for process in zombies:
            process.thaw()

    sim.clock.at(4.0, bury)
    sim.clock.at(9.0, raise_up)
    outcome = sim.run()
    assert outcome.code == 0
    assert outcome.generation >= 3 and not any(zombie.alive for zombie in zombies)


@pytest.mark.slow
@pytest.mark.parametrize("first", some(range(0, 12, 6), 1))
def test_late_messages_of_lost_connections_have_no_effect(first):
    """Every piece of every lost connection turns up after all, long after its time."""
    for seed in range(first, first + 6):
        weather = FaultConditions.drawn(seed, mild=True)
        weather.faults = [f for f in MILD if "connection" in f.__name__ or "driver" in f.__name__]
        weather.network = Conditions((0.001, 0.02), ghosts=1.0)
        outcome = Simulation(
            seed, workers=5, steps=100, faults=14, mild=True, weather=weather
        ).run()
        assert outcome.code == 0, f"seed {seed}: {outcome}"


# ---- the simulation itself ---------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_simulations():
    once, again = Simulation(3), Simulation(3)
    assert once.run() == again.run()
    assert once.story() == again.story() != ""


def test_simulation_does_not_use_the_global_generator():
    state = random.getstate()
    Simulation(11).run()
    assert random.getstate() == state


def test_violation_names_its_seed_and_shows_the_events(monkeypatch):
    def planted(self, process):
        raise AssertionError("planted")

    monkeypatch.setattr(Simulation, "labelled", planted)
    with pytest.raises(Violation, match=r"seed 7: planted(.|\n)*HostsChanged"):
        Simulation(7).run()


def test_seeds_draw_different_faults():
    kinds = [frozenset(FaultConditions.drawn(seed, mild=False).faults) for seed in range(50)]
    assert len(set(kinds)) > 40
    assert frozenset.union(*kinds) == frozenset(EVERY)
