"""Simulated worker: the real Recovery state machine with a simulated run loop, link and collectives.

The training thread is a generator. Each yield returns the name of a place in the code, and either a number of seconds
or a condition for which the thread waits. Conditions are checked again after every event of this worker. At each yield,
the process can be killed or frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

from elastic.chaos.simulator.interface import Agent, SimulatedJob
from elastic.chaos.simulator.simulated_network import Connection, SimulatedLink
from elastic.chaos.simulator.simulated_reports import SimulatedReports
from elastic.chaos.simulator.simulated_training import Collective, State
from elastic.errors import (
    DeviceLost,
    GradientsDiffer,
    LeaveRequested,
    PeerLost,
    ShardLost,
    WorldChanging,
)
from elastic.exact import verification_rules
from elastic.exact.kept_commits import KeptCommits
from elastic.exact.shard_assignment import assign
from elastic.exact.verification_rules import Computed
from elastic.protocol import messages
from elastic.protocol.messages import Address, Commit, Message, ShardsHeld, ShardsPlaced, Worker
from elastic.runtime import recovery
from elastic.runtime.recovery import AbortGroups, Phase, Recovery, Send, Verdict

HOLD_S = 60.0
DEVICE_S = 10.0
SHARDS = 8  # number of shards per step in a job that verifies shards
GIVE_UP_S = 40.0  # seconds without a connection to the driver after which the worker exits
Thread = Generator[tuple[str, float | Callable[[], bool]], None, None]


# exit codes of simulated user code that calls sys.exit, by the value of `will_raise`
QUITS = {"a": 0, "b": 3}
QUITTING_S = 8.0  # maximum number of seconds that the interpreter takes to exit


class UserError(Exception):
    """Exception raised by simulated user code."""


class SimulatedWorker:
    """Simulated worker process, from its start to its exit."""

    def __init__(self, sim: SimulatedJob, agent: Agent, worker: Worker) -> None:
        self.sim = sim
        self.agent = agent
        self.worker = worker
        self.recovery = Recovery()
        self.alive = True
        # Each worker starts with different weights.
        self.state = State(0, sim.clock.random.getrandbits(32))
        self.saved = self.state
        self.frozen = False
        self.doomed = False  # whether the driver may kill this worker because of an injected fault
        self.point = "start"  # name of the place at which the training thread has last yielded
        # One of a few texts, so that several workers may raise the same exception; empty means none.
        self.will_raise = ""
        # fault in the worker's next step ("stuck", "spinning", "slow", "long"), or empty
        self.trouble = ""
        self.trouble_s = 0.0
        self.slowness = 1.0  # factor by which the worker's steps are slowed down
        # whether the worker's GPU hangs, so that it enters no more collectives
        self.gpu_hangs = False
        # whether the worker is slow or in a long phase, for which the driver must not kill it
        self.innocent = False
        # (yield, seconds): freeze the process at its n-th yield or at a named yield; 0 seconds means kill
        self.strike: tuple[int | str, float] | None = None
        self.wrong = 0.0  # fraction of backward passes with wrong gradients
        self.wrong_passes = 0  # number of backward passes with wrong gradients
        # number of steps in this world with wrong gradients in all of the worker's backward passes
        self.wrong_steps = 0
        # this worker's shards of the current step with wrong gradients
        self.wrong_shards: set[int] = set()
        self.older: KeptCommits[State] = KeptCommits()
        self.inside: Collective | None = None
        self.entered = 0  # number of collectives entered in this generation
        self._hello_sent = False
        self._welcomed = False
        # messages that were received while the worker was frozen
        self._unread: list[tuple[Connection, Message]] = []
        self._failed: set[int] = set()  # generations in which the worker has lost a peer
        self._verdict = Verdict.PASS
        self._waits_for: Callable[[], bool] = lambda: False
        self.reports = SimulatedReports(sim, self)
        self._thread = self._life()
        self.link = SimulatedLink(
            sim.network,
            worker.host,
            opened=self._opened,
            gave_up=self._gave_up,
            give_up_s=GIVE_UP_S,
        )

    # ---- the process -----------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Continue the training thread if the condition that it waits for is true."""
        while self.alive and not self.frozen and self._waits_for():
            try:
                self.point, awaited = next(self._thread)
            except StopIteration:
                return
            if callable(awaited):
                self._waits_for = awaited
            else:
                clock = self.sim.clock
                until = clock.now + awaited
                self._waits_for = lambda until=until, clock=clock: clock.now >= until  # type: ignore[misc]
                clock.at(until, self.poke)
            if self.strike is not None:
                self._struck(*self.strike)

    def _struck(self, place: int | str, frozen_s: float) -> None:
        if isinstance(place, int) and place > 1:
            self.strike = (place - 1, frozen_s)
            return
        if isinstance(place, str) and place != self.point:
            return
        self.strike = None
        sim = self.sim
        sim.struck(self)
        if frozen_s:
            self.freeze()
            sim.clock.after(frozen_s, self.thaw)
        else:
            self.die(-9)

    def begin(self) -> None:
        self._waits_for = lambda: True
        self.poke()

    def die(self, code: int) -> None:
        if self.alive:
            self.alive = False
            self.sim.training.peers_lose(self, self.recovery.generation)
            self.link.close()
            self.agent.reaped(self, code)

    def freeze(self) -> None:
        """Simulate SIGSTOP."""
        if self.alive and not self.frozen:
            self.frozen = self.link.asleep = True
            self.agent.watch()

    def thaw(self) -> None:
        """Simulate SIGCONT."""
        if not self.alive or not self.frozen:
            return
        self.frozen = False
        unread, self._unread = self._unread, []
        for connection, message in unread:
            self.receive(connection, message)
        self.link.wake()
        self.poke()

    @property
    def leaves(self) -> bool:
        """Return whether the worker is about to leave although the driver has not requested it."""
        listed = self.worker.slot < self.sim.listed.get(self.worker.host, 0)
        return not listed or self.recovery.leaving or self.recovery.phase is Phase.OVER

    def trains(self, generation: int) -> bool:
        """Return whether the worker could currently take part in a step of this generation."""
        recovery = self.recovery
        return (
            self.alive
            and not self.frozen
            and recovery.phase is Phase.TRAINING
            and recovery.generation == generation
            and generation not in self._failed
        )

    # ---- its link --------------------------------------------------------------------------------------------------

    def _opened(self, connection: Connection) -> None:
        self.sim.driver.accept(connection, self.worker)
        if not self._hello_sent:
            self._hello_sent = True
            self.send(messages.Hello(self.worker, 1))
        else:
            self.perform(self.recovery.reconnected())
            self.reports.reconnected()

    def _gave_up(self) -> None:
        self.perform(self.recovery.driver_lost("the driver can't be reached"))
        self._welcomed = True
        self.poke()

    def send(self, message: Message) -> None:
        self.link.send(self.sim.driver.receive, self.worker, message)

    def receive(self, connection: Connection, message: Message) -> None:
        """Handle a message in the link thread."""
        if self.frozen:
            self._unread.append((connection, message))
        elif self.alive and isinstance(message, messages.Locate):
            self.send(messages.Located(self.recovery.generation, ""))
        elif self.alive:
            self._welcomed |= not isinstance(message, messages.Broken)
            self.perform(self.recovery.receive(message))
            self.poke()

    def peer_disconnected(self, generation: int) -> None:
        self._failed.add(generation)
        self.poke()

    def perform(self, actions: list[recovery.Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.send(message)
                case AbortGroups(generation):
                    self.sim.training.peers_lose(self, generation)

    # ---- script ----------------------------------------------------------------------------------------------------

    def _life(self) -> Thread:
        between = self.sim.clock.between
        code = 0
        yield "imports", between(0.2, 2.0)
        self.link.open()
        yield "welcome", lambda: self._welcomed
        try:
            if not self.recovery.newcomer:
                yield from self._wait_for_world("")
            yield "model", between(0.0, 1.0)
            self.begin_training()
            self.recovery.enter()
            yield from self._run()
            self.recovery.leave()
            self.sim.training.completed(self, self.sim.steps)
        except LeaveRequested:
            code = 0 if isinstance(self.recovery.over, messages.Leave) else 1
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
            self.perform(self.recovery.quit(code))
            yield "interpreter ends", between(0.0, QUITTING_S)
        except ShardLost as error:
            self.perform(self.recovery.raised(str(error), "", final=True, shards_lost=True))
            code = 1
        except DeviceLost as error:
            self.perform(self.recovery.raised(str(error), "Traceback ...", True))
            code = 1
        except UserError as error:
            self.perform(self.recovery.raised(str(error), "Traceback ..."))
            code = 1
        yield "exit", between(0.0, 0.5)
        self.die(code)

    def _run(self) -> Thread:
        while True:
            try:
                yield from self._enter_world()
                if self.sim.step_s:
                    yield from self._train_in_step()
                else:
                    yield from self._train()
                self.perform(self.recovery.returned())
                yield "returned", lambda: self.recovery.phase is not Phase.RETURNED
                raise_if_broken(self.recovery)
                return
            except PeerLost:
                if self.gpu_hangs:  # on a hung GPU, even an aborted collective never ends
                    yield "drain", DEVICE_S
                    raise DeviceLost("the GPU did not recover") from None
                yield "restore", self.sim.clock.between(0.0, 0.05)
                self.state = self.saved
                self.reports.samples = []
            except WorldChanging:
                try:
                    yield from self.keep()
                # The commit of a sharded state is a collective, so it can fail.
                except PeerLost:
                    self.state = self.saved
                    self.reports.samples = []

    def _wait_for_world(self, layout: str) -> Thread:
        held = self.held_shards() if layout else None
        kept = self.older.held
        metadata = {"sent": f"{self.worker} at {self.sim.clock.now}"}
        sent = metadata if self.sim.has_metadata else None
        store = Address("127.0.0.1", 1)
        self.perform(
            self.recovery.wait_for_world(store, layout, held, kept, metadata=sent, source=sent)
        )
        yield "ready", lambda: self.recovery.phase is not Phase.WAITING
        self.entered = self.wrong_steps = 0
        self.reports.begin_pace()
        if self.recovery.phase is Phase.OVER:
            raise LeaveRequested(self.recovery.reason)
        if self.recovery.phase is Phase.TRAINING:
            self.sim.training.entered(self, metadata)

    def _enter_world(self) -> Thread:
        yield from self._wait_for_world("model.weight float32 [10]")
        self._go_back()
        yield from self.bring()
        self.recovery.adopt()
        self._keep_older()
        self.sim.labelled(self)

    def _go_back(self) -> None:
        """Restore an older commit if the world begins from one. See `elastic.runtime.commit_log`."""
        world, commit = self.recovery.world, self.recovery.goes_back()
        if world is None or commit is None:
            return
        self.older.forget_after(commit)
        if world.place.rank < world.holders:
            copy = self.older.copy_of(commit)
            assert copy is not None, f"{self.worker} has no copy of {commit}"
            self.state = self.saved = copy
            self.recovery.went_back(commit)

    def _keep_older(self) -> None:
        commit = self.recovery.agreed()
        if self.sim.verify and commit is not None:
            held = assign(SHARDS, self.recovery.place.size)
            if self.older.due(self.saved.steps, verification_rules.window(held, self.sim.verify)):
                self.older.add(commit, self.saved.steps, self.saved)

    def begin_training(self) -> None:
        """Enter elastic.run, as a script does."""

    def held_shards(self) -> ShardsHeld | None:
        """Return a report of the shards that the worker holds, or None for a state without shards."""
        return None

    def placed_shards(self) -> ShardsPlaced | None:
        """Return a report of the worker's part of a sharded state in this world, or None without shards."""
        return None

    def bring(self) -> Thread:
        """Send the state to the ranks of a new world that lack it."""
        world = self.recovery.world
        assert world is not None
        if world.holders == 0:
            self.saved = self.state
        ranks = world.copying
        if ranks:
            copying = self.collective("state", ranks[0], ranks)
            yield from self.arrive(copying)
            if world.place.rank != ranks[0]:
                self.state = self.saved = copying.sent
                self.reports.samples = []

    def _train(self) -> Thread:
        clock = self.sim.clock
        while self.state.steps < self.sim.steps:
            yield "step", self.slowness * clock.between(*self.sim.weather.step_s)
            if self.trouble:
                yield from self._be_in_trouble()
            self._raise_what_it_will()
            rank, size = self.recovery.place.rank, self.recovery.place.size
            if self.sim.verify:
                yield from self._verify(rank, size)
            gradients = self.collective("gradients", self.entered)
            if self.wrong_shards:
                gradients.wrong |= {self.worker}
            yield from self.arrive(gradients)
            if self.entered == 1:
                self.perform(self.recovery.resumed({}, shards=self.placed_shards()))
            epoch = self.sim.training.epoch
            self.reports.samples.append(self.state.sample(rank, epoch))
            self.state = self.state.after(self.recovery.generation, size, epoch, gradients.wrong)
            commits = self.state.steps % 4 == 0 or self.state.cursor % epoch == 0
            if commits:
                yield from self.commit()
            if commits or self.state.steps % 2 == 0:
                yield from self._check()
            self.reports.pace()

    # ---- verification of shards, as in `elastic.exact.verifier` ------------------------------------------------------

    def _verify(self, rank: int, size: int) -> Thread:
        """Recompute selected shards of other ranks, compare the results, and report ranks with wrong gradients.

        Raises AssertionError if this worker's wrong gradients remained undetected for longer than the schedule permits.
        """
        held, generation, step = assign(SHARDS, size), self.recovery.generation, self.state.steps
        checks = verification_rules.checks(held, self.sim.verify, self.sim.seed, generation, step)
        self.wrong_shards = {shard for shard in held[rank] if self._computes_wrongly()}
        votes: dict[verification_rules.ShardCheck, list[Computed]] = {check: [] for check in checks}
        asked: dict[verification_rules.ShardCheck, tuple[int, ...]] = {
            check: (check.owner, check.second) for check in checks
        }
        for turn in range(2 if checks else 0):
            collective = self.collective("verification", 2 * self.entered + turn)
            collective.values[rank] = {
                check: self._digest(check.shard, own=not turn and rank == check.owner)
                for check, ranks in asked.items()
                if rank in ranks
            }
            yield from self.arrive(collective)
            for check, ranks in asked.items():
                votes[check] += [Computed(each, collective.values[each][check]) for each in ranks]
            asked = {
                check: verification_rules.voters(own, size)
                for check, own in votes.items()
                if verification_rules.verdict(own, size) is None
            }
            if not asked:
                break
        self._leave_if_wrong(votes, size)
        if self.wrong == 1.0 and size > 1:
            self.wrong_steps += 1
            most = math.ceil(verification_rules.steps_between(held, self.sim.verify))
            assert self.wrong_steps <= most, (
                f"{self.worker} has been wrong in {self.wrong_steps} steps, expected at most {most}"
            )

    def _computes_wrongly(self) -> bool:
        return bool(self.wrong) and self.sim.clock.random.random() < self.wrong

    def _digest(self, shard: int, *, own: bool) -> int:
        """Return the digest of the gradients of one backward pass.

        Args:
            shard: the shard of the batch.
            own: whether training uses these gradients.
        """
        if shard in self.wrong_shards if own else self._computes_wrongly():
            self.wrong_passes += 1
            return self.sim.clock.random.getrandbits(60)
        return hash((self.state.history, shard))

    def _leave_if_wrong(
        self, votes: dict[verification_rules.ShardCheck, list[Computed]], size: int
    ) -> None:
        found = {
            check: result
            for check, own in votes.items()
            if (result := verification_rules.verdict(own, size)) is not None
        }
        culprits = {
            rank: (check, result) for check, result in found.items() for rank in result.culprits
        }
        for rank, (check, result) in culprits.items():
            right = [each.rank for each in votes[check] if each.digest == result.right]
            evidence = messages.Miscomputed(
                self.recovery.generation,
                self.state.steps,
                check.shard,
                rank,
                "0",
                "1",
                sorted({*right}),
                complete=self.sim.verify >= 1.0,
            )
            self.send(evidence)
        if culprits:
            self._fail(self.recovery.generation)
        if any(result.right is None for result in found.values()):
            raise UserError(f"{GradientsDiffer.__name__}: in a world of {size}")

    def _raise_what_it_will(self) -> None:
        if self.will_raise in QUITS:
            raise SystemExit(QUITS[self.will_raise])
        if self.will_raise:
            raise UserError(f"ValueError: {self.will_raise}")

    def _be_in_trouble(self) -> Thread:
        trouble, self.trouble = self.trouble, ""
        if trouble == "long":
            self.reports.phase, self.reports.idle = "checkpoint", True
            self.reports.progress(None)
        elif trouble == "stuck":
            self.reports.idle = True
        self.innocent = trouble in ("slow", "long")
        if self.innocent:
            yield trouble, self.trouble_s
        else:
            yield trouble, lambda: False
        self.reports.idle = False
        self.innocent = False
        if self.reports.phase:
            self.reports.phase = ""
            self.reports.progress(None)

    def keep(self) -> Thread:
        """Commit before a planned change of the world."""
        self.committed()
        yield from ()

    def commit(self) -> Thread:
        """Commit between two steps."""
        self.committed()
        yield "commit", 0.0

    def committed(self) -> None:
        self.saved = self.state
        self.recovery.committed()
        self._keep_older()
        self.sim.labelled(self)
        commit, running = self.recovery.newest, self.recovery.phase is Phase.TRAINING
        if commit is not None and running and not self.sim.step_s:
            self.reports.digest(commit)
        self.sim.commits(self)

    def _check(self) -> Thread:
        self._verdict = self.recovery.arrive()
        yield from self._at_check()

    def _at_check(self) -> Thread:
        if self._verdict is Verdict.HOLD:
            clock = self.sim.clock
            until = clock.now + HOLD_S
            clock.at(until, self.poke)
            self.reports.idle = True
            yield (
                "held",
                lambda: self.recovery.verdict() is not Verdict.HOLD or clock.now >= until,
            )
            self.reports.idle = False
            if self.recovery.verdict() is Verdict.HOLD:
                self.recovery.release()
            self._verdict = self.recovery.verdict()
        if self._verdict is Verdict.STOP:
            raise WorldChanging
        raise_if_broken(self.recovery)

    # ---- collectives -----------------------------------------------------------------------------------------------

    def collective(
        self, purpose: str, number: int, ranks: tuple[int, ...] | None = None
    ) -> Collective:
        raise_if_broken(self.recovery)
        found: Collective = self.sim.training.collective(self, purpose, number, ranks)
        return found

    def arrive(self, collective: Collective) -> Thread:
        rank, generation = self.recovery.place.rank, self.recovery.generation
        began = self.sim.clock.now
        self.entered += collective.key[1] == "gradients"
        self.reports.cpu_s()
        self.inside = collective
        self.sim.training.arrives(collective, rank, self)

        def awaited() -> bool:
            broken = self.recovery.phase is not Phase.TRAINING or generation in self._failed
            return rank in collective.done or broken

        yield collective.key[1], awaited
        self.reports.cpu_s()
        self.inside = None
        self.reports.left(collective, began)
        if rank in collective.done:
            return
        self._fail(generation)

    def _fail(self, generation: int) -> None:
        self.perform(self.recovery.fail(generation, "connection closed by peer"))
        raise_if_broken(self.recovery)

    # ---- many workers in lockstep ----------------------------------------------------------------------------------

    def _train_in_step(self) -> Thread:
        generation, size = self.recovery.generation, self.recovery.place.size
        run = self.sim.training.run_of(generation, size, self.sim.step_s)
        began = self.state.steps
        reported = False
        while self.state.steps < self.sim.steps:
            self._verdict = Verdict.PASS
            run.join(self, self._one_step)
            yield ("training", lambda: self not in run.joined or not self.trains(generation))
            run.leave(self)
            if not reported and self.state.steps > began:
                reported = True
            if not self.trains(generation):
                self._fail(generation)
            if self._verdict is Verdict.PASS and self.trouble:
                yield from self._be_in_trouble()
            self._raise_what_it_will()
            yield from self._at_check()

    def _one_step(self) -> bool:
        """Make one step in lockstep with the world. Return False if this worker must leave the lockstep."""
        self.entered += 1
        if self.entered == 1:
            self.perform(self.recovery.resumed({}))
        if self.state.steps % 10 == 0:
            self.committed()
        self._verdict = self.recovery.arrive()
        if self.entered % 10 == 0:
            self.reports.pace()
        going_on = self._verdict is Verdict.PASS and not self.trouble and not self.will_raise
        return going_on and self.state.steps < self.sim.steps


def raise_if_broken(recovery: Recovery) -> None:
    """If the current world has ended, raise the exception that unwinds the stack of user code."""
    if recovery.phase is Phase.BROKEN:
        raise PeerLost(recovery.reason)
    if recovery.phase is Phase.OVER:
        raise LeaveRequested(recovery.reason)


def newest(worker: SimulatedWorker) -> Commit | None:
    """Return the newest commit that the worker could contribute to the next world."""
    here = worker.alive and worker.recovery.running and worker.recovery.phase is not Phase.OVER
    return worker.recovery.newest if here else None
