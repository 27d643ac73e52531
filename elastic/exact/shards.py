"""`Shards`: division of the global batch into a fixed number of micro-batches, independent of the world size.

A step computes every shard once. A rank computes the shards assigned to it in the current world (`shard_assignment`),
in ascending order. All randomness in a shard depends on (seed, step, shard) only. Components that sum gradients or keep
buffers listen for the start and end of a step. Ranks communicate only in `Shards.mean`, in steps that verify shards
(`verifier`), and about every fourth step, when they exchange their speeds, from which `load_balancing` decides how many
shards each rank has.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic import context
from elastic.api.sync_batch_norm import SyncBatchNorm
from elastic.context import Context
from elastic.data import optimizer_steps
from elastic.data.loader import StepShards
from elastic.data.seeds import seed_of
from elastic.errors import Invalid, StateMismatch
from elastic.exact import (
    arithmetic_probe,
    batch_checks,
    random_generators,
    reduction_tree,
    shard_assignment,
    verification_rules,
)
from elastic.exact.buffers import BufferKeeper
from elastic.exact.load_balancing import Division, LoadBalancer
from elastic.exact.shard_clock import ShardClock
from elastic.exact.shard_step import ShardStep, StepListener
from elastic.exact.verifier import PURPOSE, Verifier
from elastic.runtime import lifecycle

log = logging.getLogger("elastic.exact")

Batch = TypeVar("Batch")
Result = TypeVar("Result")
SPEEDS = "speeds of the ranks"


class Shards:
    """Division of a step's global batch into ``count`` micro-batches (shards), independent of the number of workers.

        shards = elastic.Shards(8, seed=1)
        optimizer = elastic.DistributedOptimizer(optimizer, model.named_parameters(), shards=shards)
        state = elastic.TorchState(model=model, optimizer=optimizer, shards=shards)
        ...
        for inputs, targets in shards.over(step):       # this rank's micro-batches of one step
            loss = loss_of(model(inputs), targets)      # the mean over the micro-batch
            loss.backward()
        optimizer.step()                                # gradients are the mean over all shards

    Commits contain ``count``, ``seed`` and ``step``, the number of the current step. If a world has more than ``count``
    ranks, the remaining ranks compute no shard but take part in every step as warm spares.

    Args:
        count: number of shards, constant for a run.
        seed: seed of the random generators in all shards, constant for a run.
        exact: whether weights, moments, buffers and losses are bitwise identical to those of an undisturbed run, even
            if workers join or fail: see docs/exact.md. Otherwise, gradients are summed in the order of ranks, which is
            faster if a rank has several shards. The global batch is the same in both cases.
        by_speed: whether slow ranks compute fewer shards than fast ranks, based on measured times. The assignment
            changes only at commits. If False, the numbers of shards per rank differ by at most one. The results are the
            same.
        verify: fraction of the shards that two ranks compute, such as 1/64. If their gradients differ, other ranks also
            compute the shard, and the worker with the wrong result leaves the job: see docs/verification.md. In a step
            with such shards, the loop has additional iterations; see `verifying`. After a wrong result, the job returns
            to one of two older commits of the state, which are kept in host memory.
        verify_window: minimum number of steps to repeat after a wrong result (default: eight steps with checks). With
            0, no older commits are kept.

    Raises:
        Invalid: ``count``, ``seed`` or ``verify_window`` is not a whole number in range, or ``verify`` not a number
            from 0 to 1.
    """

    def __init__(
        self,
        count: int,
        *,
        seed: int = 0,
        exact: bool = True,
        by_speed: bool = True,
        verify: float = 0.0,
        verify_window: int | None = None,
    ) -> None:
        for name, value, least in (("count", count, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise Invalid(f"{name} is {value!r}: pass a whole number, at least {least}")
        if isinstance(verify, bool) or not isinstance(verify, int | float) or not 0 <= verify <= 1:
            raise Invalid(
                f"verify is {verify!r}: pass the fraction of the shards to compute twice, from 0 to 1, for"
                " example 1/64"
            )
        if verify_window is not None and (
            not isinstance(verify_window, int)
            or isinstance(verify_window, bool)
            or verify_window < 0
        ):
            raise Invalid(
                f"verify_window is {verify_window!r}: pass the least number of steps to repeat, or 0 to keep no"
                " older commits"
            )
        if verify and not exact:
            raise Invalid(
                "verify compares gradients bit by bit, which requires exact=True: omit exact=False"
            )
        self.count = count
        self.seed = seed
        self.exact = exact
        self.by_speed = by_speed
        self.verify = float(verify)
        self.verify_window = verify_window
        self.step = 0
        self.inexact_since: int | None = None  # the first inexact step; see `computes_differently`
        # Digests of the gradients of this rank's shards in the last step, if requested, by ``3 layer.weight``.
        self.gradients: dict[str, int] = {}
        self._listeners: list[weakref.ref[StepListener]] = []
        self._served: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._scalers: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        self._keeper: BufferKeeper | None = None
        # Cached assignment, and the generation, size, rank and division for which it was computed.
        self._assigned: tuple[tuple[int, int, int, Division], ShardStep] | None = None
        # last complete step, and its generation
        self._ended: tuple[int, ShardStep] | None = None
        self._clock = ShardClock()
        # The load balancer, its generation, and its runtime: a process may join several jobs.
        self._balancer: tuple[int, weakref.ref[Context] | None, LoadBalancer] | None = None
        # whether the script has read `held` for the next step, so that the shards must not change
        self._fetched = False
        self._present: ShardStep | None = None  # not None iff a step is in progress on this rank
        self._begun_in = 0  # generation in which the current step began
        # runtime with which the current step began
        self._begun_with: weakref.ref[Context] | None = None
        # number of torch's threads in this process's last step
        self._thread_count: int | None = None
        self._done = 0  # number of this rank's shards that have begun in the current step
        self._computed = False  # whether all of this rank's shards have ended
        self._optimizer_steps = 0  # number of optimizer steps at the start of the current step
        self._logged: tuple[int, int] | None = None
        self._committed = False  # whether a state has saved the position
        self._verifier = Verifier(
            self.verify, seed, _weakly(self._all), _weakly(self._arithmetic_digest)
        )
        _all.add(self)
        optimizer_steps.watch()

    # ---- the step ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Iterate over the numbers of this rank's shards, for one step.

        All computation between one number and the next belongs to the shard with the first number.
        """
        for shard in self.begin_step():
            self.begin_shard(shard)
            yield shard
        for shard in self._second_passes():
            yield shard
            self._check_weights(shard)
        self.end_step()

    def over(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over this rank's micro-batches of one step, in the order of its shards.

        This method reads no more elements of ``batches`` than needed.

        Args:
            batches: a step of an `elastic.data.DataLoader` with these shards, or any iterable with one micro-batch per
                shard of `held`.

        Raises:
            Invalid: ``batches`` has too few elements, or is a loader instead of a step.
        """
        batch_checks.check(batches, self, self._committed, verified=bool(self.verify))
        coming = iter(batches)
        for shard in self:
            if self.verifying:
                assert isinstance(coming, StepShards)
                with coming.again(shard) as again:
                    _begin_to_draw(self.seed, self.step, shard)
                    yield again
                continue
            try:
                if isinstance(coming, StepShards):
                    batch, drawn = coming.take()
                    if drawn:
                        _begin_to_draw(self.seed, self.step, shard)
                else:
                    batch = next(coming)
            except StopIteration:
                raise Invalid(
                    f"shard {shard} of step {self.step} has no micro-batch: pass one micro-batch for each of the"
                    f" {len(self.assigned)} shards of this rank (Shards.held)"
                ) from None
            yield batch

    @property
    def verifying(self) -> bool:
        """Whether the current iteration only verifies a shard: another rank's shard, or a shard of this rank again.

        `mean` and `means` ignore the loss of such an iteration.
        """
        return self._verifier.shard is not None

    @property
    def window(self) -> int:
        """Number of steps, up to the detection of a faulty rank, whose gradients are treated as unreliable.

        0 means none.
        """
        if self.verify_window is not None or not self.verify:
            return self.verify_window or 0
        return verification_rules.window(self._step().held, self.verify)

    @property
    def checked(self) -> frozenset[int]:
        """Shards of this rank in the current step whose gradients need a digest."""
        return self._verifier.checked

    @property
    def held(self) -> tuple[int, ...]:
        """Numbers of this rank's shards in the current world.

        If the script reads this attribute before each commit, the shards do not change in this world.
        """
        self._fetched = self._fetched or self._present is None
        return self.assigned

    @property
    def assigned(self) -> tuple[int, ...]:
        """Numbers of this rank's shards.

        Unlike `held`, reading this attribute does not fix the shards beyond the next commit.
        """
        step = self._step()
        return step.held[step.rank]

    def looping(self) -> bool:
        """Return whether the script is in the loop over a step's shards, in the current world."""
        runtime = lifecycle.active()
        if self._present is None or self._begun_with is None or runtime is None:
            return False
        return runtime.generation == self._begun_in and self._begun_with() is runtime

    def began_with(self, runtime: Context) -> bool:
        """Return whether the last loop over a step's shards began under ``runtime``."""
        return self._begun_with is not None and self._begun_with() is runtime

    @property
    def present(self) -> ShardStep | None:
        """The step in progress, from the start to the end of its loop."""
        return self._present

    def begin_step(self) -> tuple[int, ...]:
        """Start a step, for frameworks with their own loop. Call `begin_shard` for each shard, then `end_step`.

        Returns:
            The indices of this rank's shards, in the order in which to compute them.

        Raises:
            Invalid: the last loop over the shards ended early, or the number of torch's threads has changed.
        """
        generation = getattr(lifecycle.active(), "generation", 0)
        if self._present is not None and generation == self._begun_in:
            raise Invalid(
                f"the loop over the shards of step {self.step} ended early, so the gradient is incomplete: run"
                " the loop to its end, and call step() after the loop"
            )
        self._check_threads()
        self.abandon()
        step, self._begun_in = self._step(), generation
        runtime = lifecycle.active()
        self._begun_with = None if runtime is None else weakref.ref(runtime)
        self._log_copies(step)
        self._present, self._done, self._fetched = step, 0, False
        self._computed = False
        self._optimizer_steps = optimizer_steps.count()
        self.gradients = {}
        if self.verify:
            self._verifier.step_begins(step, generation)
        for listener in self._all():
            listener.step_begins(step)
        return step.held[step.rank]

    def begin_shard(self, shard: int) -> None:
        """Start a shard and seed the random generators for it. The next shard, or the end of the step, ends it.

        Args:
            shard: index of the shard.

        Raises:
            Invalid: this rank must compute another shard first, or no step was started.
        """
        step = self._under_way()
        own = step.merges
        if self._done == len(own) or own[self._done].shard != shard:
            wanted = [each.shard for each in own]
            raise Invalid(
                f"shard {shard} of step {step.number} is out of order: this rank must compute the shards"
                f" {wanted} in this order"
            )
        self._end_shard()
        if self._done == 0:
            self._clock.begin()
        self._done += 1
        _begin_to_draw(self.seed, step.number, shard)
        for listener in self._all():
            listener.shard_begins(own[self._done - 1], self._done == len(own))

    def end_step(self) -> None:
        """Wait until every rank has the gradients and buffers of the whole step. Raises PeerLost if a rank was lost."""
        step = self._under_way()
        if not self._computed:
            self._end_own()
        for listener in self._all():
            listener.step_ends()
        self._exchange_speeds(len(step.held))
        # A GradScaler that has scaled no loss refuses to unscale gradients, so scale a loss on a rank without shards.
        if not step.merges:
            for scaler in self._scalers:
                device = getattr(scaler, "_device", "cpu")
                scaler.scale(torch.zeros((), dtype=torch.float32, device=device))
        self._present, self._ended = None, (self._begun_in, step)
        self.step = step.number + 1
        self._between_steps()

    def _end_own(self) -> None:
        step = self._under_way()
        if self._done < len(step.merges):
            raise Invalid(
                f"step {step.number} ended before {len(step.merges) - self._done} shards were computed: iterate"
                " over all shards"
            )
        self._check_threads()
        self._end_shard()
        self._clock.end(self._done)
        self._computed = True

    def _second_passes(self) -> Iterator[int]:
        if self.verify:
            self._end_own()
            yield from self._verifier.passes(self._begun_in)

    def abandon(self) -> None:
        """Discard the step in progress. The next loop starts it again."""
        if self._present is not None:
            self._present = None
            self._verifier.step_abandoned()
            for listener in self._all():
                listener.step_abandoned()

    def _end_shard(self) -> None:
        if self._done:
            shard = self._under_way().merges[self._done - 1].shard
            self._check_weights(shard)
            for listener in self._all():
                listener.shard_ends(shard)

    def _check_weights(self, shard: int) -> None:
        if optimizer_steps.count() != self._optimizer_steps:
            raise Invalid(
                f"an optimizer stepped within the loop over the shards of step {self.step}, in shard {shard},"
                " but all shards of a step need the same weights: call step() after the loop, on the optimizer"
                " that DistributedOptimizer returned"
            )

    def _under_way(self) -> ShardStep:
        if self._present is None:
            raise Invalid(
                "no step is in progress: start a step with `for batch in shards.over(loader)`"
            )
        return self._present

    def _check_threads(self) -> None:
        """Raise Invalid if the script has changed the number of threads.

        Other settings are too expensive to check in each step.
        """
        threads = torch.get_num_threads()
        if self._thread_count is None or not self.exact:
            self._thread_count = threads
        elif threads != self._thread_count and self.inexact_since is None:
            raise Invalid(
                f"torch uses {threads} threads in step {self.step}, but used {self._thread_count}"
                " before. The number of threads changes the last bits of results. Call torch.set_num_threads()"
                " once, before training, on every worker, or pass exact=False to Shards"
            )

    def _between_steps(self) -> None:
        # Random numbers drawn between two steps must also be equal on all ranks.
        random_generators.set_seed(seed_of("between", self.seed, self.step))

    def _exchange_speeds(self, ranks: int) -> None:
        balancer = self._balancer_of(self._begun_in, ranks)
        if not self.by_speed or not balancer.due():
            return
        runtime = lifecycle.current()
        numbers = [self._clock.window.median_s, float(balancer.may_change)]
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        found = [torch.empty_like(own) for _ in range(ranks)]
        with runtime.guard(SPEEDS):
            runtime.group(PURPOSE, own.device).allgather(found, own).wait()
        seconds = [float(each[0]) for each in found]
        balancer.exchanged(seconds, all(bool(each[1]) for each in found))

    def committed(self) -> None:
        """Adopt a new assignment of shards to ranks after a commit, which all ranks make after the same step."""
        if self._balancer is None:
            return
        if self._balancer[2].committed(self._fetched) and self._step().rank == 0:
            log.info(
                "rebalanced shards from step %d on: ranks 0, 1, ... compute %s of the %d shards, in proportion to"
                " their speeds",
                self.step,
                ", ".join(map(str, self._balancer[2].division)),
                self.count,
            )

    # ---- sums over shards ----------------------------------------------------------------------------------------

    def mean(self, values: Sequence[float | torch.Tensor]) -> float:
        """Return the mean of one number per shard, such as a loss, over all shards. It is bitwise equal in every world.

        Args:
            values: one number per shard of this rank, in the order of the shards.

        Errors are those of `means`.
        """
        return self.means(value=values)["value"]

    def means(self, **named: Sequence[float | torch.Tensor]) -> dict[str, float]:
        """Average several named numbers over all shards in one message.

        For example, ``shards.means(loss=losses, right=hits)["right"]``.

        Collective: every rank calls it with the same names, after the loop over the step's shards. Sums are computed in
        float64, in an order that does not depend on the world.

        Args:
            named: for each name, one number per shard of this rank, in the order of the shards. An empty list on a rank
                without shards.

        Raises:
            Invalid: called within the loop, or the numbers do not match the shards.
            PeerLost: a rank was lost.
        """
        if self._present is not None:
            raise Invalid(
                f"mean() was called before all shards of step {self.step} were computed: call mean() after the"
                " loop over the shards"
            )
        # A commit between the loop and this call may have changed the division, so the numbers may match either one.
        step, next_step = self._of_last_loop(), self._step()
        allowed = {len(each.held[each.rank]): each for each in (next_step, step)}
        held = step.held[step.rank]
        own = torch.zeros(len(named), 1 + self.count, dtype=torch.float64, device="cpu")
        for row, values in zip(own, named.values(), strict=True):
            if not hasattr(values, "__len__") or getattr(values, "shape", None) == ():
                raise Invalid(
                    f"mean() got a single number, but takes a list with one value for each of the {len(held)}"
                    " shards of this rank: collect the values in the loop with losses.append(loss.detach())"
                )
            more = self._verifier.passes_made
            if more and len(values) == len(step.held[step.rank]) + more:
                # The last iterations only verified shards, so their values do not count.
                values = values[:-more]
            if len(values) not in allowed:
                raise Invalid(
                    f"mean() got {len(values)} values, but this rank has {len(held)} shards: pass one value per"
                    " shard"
                )
            shards = allowed[len(values)].held[step.rank]
            row[0] = len(values)
            for place, (shard, value) in enumerate(zip(shards, values, strict=True)):
                row[1 + place] = _number(value, shard)
        parts = [own]
        if len(step.held) > 1:
            runtime = lifecycle.current()
            parts = [torch.empty_like(own) for _ in step.held]
            with runtime.guard(PURPOSE):
                group = runtime.group(PURPOSE, own.device)
                group.allgather(parts, own).wait()
        whole = torch.zeros(len(named), self.count, dtype=torch.float64, device="cpu")
        for number, row in enumerate(whole):
            given = [int(part[number, 0]) for part in parts]
            used = next((e for e in (step, next_step) if [*map(len, e.held)] == given), None)
            if used is None:
                raise Invalid(
                    "mean() got values of different steps: some ranks called it before commit(), others after"
                    " commit(). Call mean() after the loop over the shards and before commit()"
                )
            for part, shards in zip(parts, used.held, strict=True):
                row[list(shards)] = part[number, 1 : 1 + len(shards)]
        sums = map(self._along_the_tree, whole.tolist())
        return {name: total / self.count for name, total in zip(named, sums, strict=True)}

    def _along_the_tree(self, values: list[float]) -> float:
        stack: list[float] = []
        leaves = [[reduction_tree.Node(shard, shard + 1) for shard in range(self.count)]]
        for each in reduction_tree.program(leaves, self.count):
            stack.append(stack.pop() + stack.pop() if each is None else values[each.place])
        return stack[0]

    # ---- listeners -----------------------------------------------------------------------------------------------

    def listen(
        self, listener: StepListener, *, trains: torch.optim.Optimizer | None = None
    ) -> None:
        """Register a listener for the events of every step. Listeners are referenced weakly.

        Args:
            listener: the listener.
            trains: the optimizer whose gradients the listener sums, or None.
        """
        self._listeners.append(weakref.ref(listener))
        if trains is not None:
            self._served.add(trains)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose gradients are summed over these shards."""
        return list(self._served)

    def check_workers(self, least: int) -> None:
        """Check that every world has at least one shard per worker.

        Args:
            least: smallest number of workers of the job (``--min-np``).

        Raises:
            Invalid: there are fewer shards than ``least``.
        """
        if self.count < least:
            raise Invalid(
                f"Shards({self.count}) has fewer shards than --min-np {least}, so some workers would compute"
                f" nothing: use at least Shards({least}), or lower --min-np"
            )

    def watch(self, model: torch.nn.Module | torch.amp.GradScaler) -> None:
        """Keep the buffers of ``model``, such as BatchNorm's running statistics, equal on all ranks.

        After each step, they have the values that shard 0 has computed.

        ``model`` may also be a gradient scaler, which then also works on a rank without shards. A state with shards
        calls this method for its models.

        Raises:
            Invalid: the module exchanges statistics or gradients with other ranks.
        """
        if isinstance(model, torch.amp.GradScaler):
            self._scalers.add(model)
            return
        for name, module in model.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise Invalid(
                    f"{name or 'the model'} is a DistributedDataParallel, which averages gradients in each"
                    " backward pass, but Shards sums gradients over all shards: pass the wrapped module, and"
                    " use DistributedOptimizer(..., shards=shards)"
                )
            if isinstance(module, SyncBatchNorm | torch.nn.SyncBatchNorm):
                raise Invalid(
                    f"{name or 'the model'} is a SyncBatchNorm, which needs the statistics of the whole batch,"
                    " but a worker computes its shards one after the other. Use torch's BatchNorm, which"
                    " normalizes each shard separately. If a shard has too few samples, use fewer and larger"
                    " shards, or a GroupNorm"
                )
        if self._keeper is None:
            self._keeper = BufferKeeper()
        self._keeper.watch(model)

    def _all(self) -> list[StepListener]:
        found = [listener for each in self._listeners if (listener := each()) is not None]
        if len(found) != len(self._listeners):
            self._listeners = [weakref.ref(each) for each in found]
        return found if self._keeper is None else [self._keeper, *found]

    def turn_of(self, listener: StepListener) -> list[StepListener]:
        """Return the listeners that are notified before ``listener``. All ranks communicate in this order."""
        found = self._all()
        return found[: found.index(listener)]

    # ---- the world -----------------------------------------------------------------------------------------------

    def _step(self) -> ShardStep:
        found = lifecycle.position()
        rank, size, generation = 0, 1, 0
        if found is not None:
            rank, size, generation = found[0].rank, max(found[0].size, 1), found[1]
        key = generation, size, rank, self._balancer_of(generation, size).division
        if self._assigned is None or self._assigned[0] != key:
            held = tuple(shard_assignment.place(key[3]))
            plans = [reduction_tree.schedule(each, self.count) for each in held]
            partials = [nodes for _, nodes in plans]
            # A joining worker has no rank yet.
            merges = plans[rank][0] if rank < size else []
            self._assigned = key, ShardStep(self.step, held, rank, merges, partials)
        return self._assigned[1]._replace(number=self.step)

    def _of_last_loop(self) -> ShardStep:
        """Return the last complete step of the current world.

        If the world has not completed a step yet, return the next step.
        """
        step = self._step()
        if self._ended is None or self._assigned is None:
            return step
        generation, ended = self._ended
        same = (generation, len(ended.held), ended.rank) == self._assigned[0][:3]
        return ended if same else step

    def _balancer_of(self, generation: int, ranks: int) -> LoadBalancer:
        """Return the load balancer of a world.

        The first division is even. Speeds measured in earlier worlds are kept.
        """
        runtime: Context | None = lifecycle.active()
        of = None if runtime is None else weakref.ref(runtime)
        known = self._balancer
        if known is None or known[:2] != (generation, of) or len(known[2].division) != ranks:
            known = self._balancer = generation, of, LoadBalancer(self.count, ranks)
        return known[2]

    def _log_copies(self, step: ShardStep) -> None:
        size, generation = len(step.held), getattr(lifecycle.active(), "generation", 0)
        if (size, generation) == self._logged or step.rank != 0:
            return
        self._logged = size, generation
        if self.verify and size < 3:
            log.warning(
                "gradients are not fully verified: %s",
                "a single worker has no other gradients to compare, so wrong gradients are not detected"
                if size == 1
                else (
                    "with 2 workers, a faulty worker is identified only if a recomputed shard differs"
                ),
            )
        share = shard_assignment.balance(self.count, size)
        if share < 1.0:
            spare = max(0, size - self.count)
            log.warning(
                "uneven shards: %d workers compute %d shards, at most %d each, so each is busy for %.0f %% of the"
                " time on average%s",
                size,
                self.count,
                len(step.held[0]),
                100 * share,
                f", {spare} are warm spares" if spare else "",
            )

    @property
    def layout(self) -> list[str]:
        """Return the shards' part of the state's layout, as lines that must be equal on all ranks."""
        kind = "exact" if self.exact else "in the order of ranks"
        return [f"shards {self.count} seed {self.seed} {kind}"]

    @property
    def arithmetic(self) -> list[str]:
        """Return the description of this process's arithmetic, which must be the same on all ranks.

        See `elastic.exact.arithmetic_probe`.
        """
        return arithmetic_probe.lines() if self.exact else []

    def _arithmetic_digest(self) -> int:
        text = "\n".join(self.arithmetic).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")

    def computes_differently(self, differs: str) -> None:
        """Record that ranks with different arithmetic were admitted, and log the first step that is not exact.

        Args:
            differs: description of the difference, for the log.
        """
        if self.inexact_since is None:
            self.inexact_since = self.step
        log.warning(
            "%s; with --allow-inexact, the run is not bitwise identical to an undisturbed one from step %d on",
            differs,
            self.inexact_since,
        )

    # ---- commits -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the values of a commit.

        Raises:
            Invalid: called in the middle of a step, whose gradients are incomplete.
        """
        if self._present is not None:
            raise Invalid(
                f"the state was saved in the middle of step {self.step}: call commit() and check_host_updates()"
                " after the loop over the shards"
            )
        if not self._committed:
            # Random numbers drawn before the first step must also be the same in every process.
            self._committed = True
            self._between_steps()
        return {
            "count": self.count,
            "seed": self.seed,
            "exact": self.exact,
            "step": self.step,
            "inexact_since": self.inexact_since,
            # The states include random numbers that the script has drawn since the last step.
            "generators": random_generators.state(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the saved step.

        Raises StateMismatch if the commit was made with another ``count``, ``seed`` or ``exact``.
        """
        for name in ("count", "seed", "exact"):
            own = getattr(self, name)
            if saved[name] != own:
                raise StateMismatch(
                    f"the resumed run used Shards({name}={saved[name]!r}), but this script uses {own!r}. A"
                    f" different {name} changes the results. Use the previous value, or start a new job"
                )
        self.abandon()
        self.gradients = {}
        self.step, self.inexact_since = saved["step"], saved["inexact_since"]
        random_generators.set_state(saved["generators"])


def _begin_to_draw(seed: int, step: int, shard: int) -> None:
    random_generators.set_seed(seed_of("step", seed, step, shard))


def _number(value: float | torch.Tensor, shard: int) -> float:
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        what = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else repr(value)
        )
        raise Invalid(
            f"mean() got {what} for shard {shard}, but takes one number per shard: pass the mean over the"
            " shard's samples, as loss.mean()"
        ) from None


_all: weakref.WeakSet[Shards] = weakref.WeakSet()  # all Shards objects of this process


def _weakly(method: Callable[[], Result]) -> Callable[[], Result]:
    """Wrap a bound method in a function that holds only a weak reference to the method's object.

    A reference cycle would leave dropped shards in use until the garbage collector runs.
    """
    found = weakref.WeakMethod(method)

    def call() -> Result:
        bound = found()
        assert bound is not None, "the shards were dropped"
        return bound()

    return call


def in_use() -> bool:
    """Return whether the script has run, or is running, a loop over the shards of a step in the current job."""
    runtime = lifecycle.active()
    return runtime is not None and any(each.began_with(runtime) for each in _all)


def _why_no_collective() -> str:
    """Return the reason why no collective is possible within a loop over shards.

    Ranks have different numbers of shards, so not all ranks would call the collective.
    """
    for shards in _all:
        if shards.looping():
            return (
                f"within the loop over the shards of step {shards.step}, which runs a different number of times on"
                " other workers: call it after the loop, and use shards.means() for losses and metrics"
            )
    return ""


context.refuse_collectives(_why_no_collective)
