"""Scheduling of gradient reductions: counts backward passes, launches full buckets, and waits for them.

The plan depends only on the parameters and on the order in which their gradients became ready in one rank's first step.
It is equal on all ranks, so a step needs no negotiation: bucket k is launched when it is full and bucket k-1 has been
launched. The ranks compare a plan once in each generation, in one or two small messages, before they launch its first
bucket. Each reducer has its own group, so two optimizers may launch in any order, and joined ranks can follow each of
them: see `elastic.optimizer.gradients.plan_agreement`.

The reduction is complete when the last backward pass of a step returns, so any later change that the script makes to
gradients, such as clipping, applies to the reduced ones. `elastic.optimizer.gradients.step_progress` decides which pass
is the last. If no pass is recognized as the last, or if ranks run the passes of two optimizers in different orders,
`GradientReducer.finish` completes the step.

Gradient hooks run in the middle of the backward pass and therefore never raise an interruption. If a hook cannot launch
a bucket, it marks the generation as failed and returns. `finish` then raises the error. Errors while waiting at the end
of a pass are raised by backward() itself.
"""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic.collectives.interface import Collectives, Op, Work
from elastic.context import Context
from elastic.errors import CollectiveFailed, Interrupted, Invalid, NotInitialized
from elastic.failpoints import failpoint
from elastic.monitoring import moved_tensors, timeline
from elastic.negotiation.process_sets import ProcessSet, global_process_set, resolve
from elastic.optimizer.gradients import (
    bucket_plan,
    joined_rank,
    malloc_tuning,
    plan_agreement,
    plan_difference,
)
from elastic.optimizer.gradients.bucket_slots import GradientPlan, Slot
from elastic.optimizer.gradients.flat_buckets import Compressor, FlatBucket, GradientBucket
from elastic.optimizer.gradients.gradient_hooks import (
    GradientHooks,
    OptimizerParameters,
    notify_end,
)
from elastic.optimizer.gradients.gradient_options import Options, digest_of
from elastic.optimizer.gradients.not_finite import FirstNotFinite
from elastic.optimizer.gradients.plan_agreement import ComparisonPoint, StepFlag
from elastic.optimizer.gradients.step_progress import (
    PassEnd,
    PlanState,
    StepPhase,
    StepProgress,
    end_counts,
)
from elastic.protocol.messages import GRADIENTS
from elastic.runtime import lifecycle

FIRST_BYTES = bucket_plan.FIRST_BYTES
FULL_BYTES = bucket_plan.FULL_BYTES


_POINT_OF = {PassEnd.COMPARE_LAST: ComparisonPoint.LAST_PASS, PassEnd.COMPARE: ComparisonPoint.PASS}

# All reducers of this process. Access is guarded by a lock, because backward passes read the set while another thread
# may create an optimizer.
_reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
_registering = threading.Lock()
_numbers = itertools.count()
# number of reducers for each list of parameter shapes; plans alone do not distinguish reducers with equal shapes
_made: collections.Counter[int] = collections.Counter()


def reducers() -> list[GradientReducer]:
    """Return all reducers of this process."""
    with _registering:
        return list(_reducers)


class GradientReducer:
    """Reducer of the gradients of one optimizer.

    All methods except the hooks must be called from the training thread.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        *,
        op: Op,
        predivide_factor: float,
        compression: Compressor,
        passes: int,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.number = next(_numbers)
        self._parameters = OptimizerParameters(optimizer, names)
        shapes = (each.shape for each in self._parameters.all())
        self._kind = hash((id(lifecycle.current()), *shapes))
        self._twin = _made[self._kind]
        _made[self._kind] += 1
        self._options = Options(op, predivide_factor, compression, groups)
        self._passes = passes
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._lock = threading.Lock()  # needed because each device has its own backward thread

        self._hooks = GradientHooks(self)

        # The fields from here to `_version` belong to the plan. This one identifies the plan's parameters.
        self._signature: list[tuple[Any, ...]] | None = None
        self._own: tuple[
            int, ...
        ] = ()  # 1 for each parameter that requires a gradient on this rank, 0 for others
        # `_own` at the last agreement, or the trained parameters of a plan that this rank has adopted
        self._agreed_on: tuple[int, ...] = ()
        # whether `_own` differs from `_agreed_on`, so that the ranks must agree on another plan
        self._changing = False
        # plan with which this step replaces the agreed plan, or None
        self._next: GradientPlan | None = None
        self._plan = GradientPlan(self._options, [])
        self._agreed: int | None = None  # last generation in which the ranks compared this plan
        # the plan as agreed in that generation, or None
        self._number: plan_agreement.AgreedPlan | None = None
        self._version = -1  # version of the agreed plan

        # The remaining fields belong to the current step. This one is the step's generation.
        self._generation: int | None = None
        self._progress = StepProgress()
        self._size = 1  # number of ranks that average their gradients
        # these ranks, or None for the whole world
        self._members: tuple[int, ...] | None = None
        # Parameters in the order in which their gradients became ready. Recorded until a plan is agreed, and before it
        # changes.
        self._ready: list[torch.Tensor] = []
        self._launched = 0  # number of buckets launched in this step
        # ID of the autograd graph task that computes the gradients of a step with an agreed plan
        self._known_pass = -1
        # generation in which `finish` completes every step, because backward passes can't, or None
        self._never: int | None = None
        self._absent: list[torch.Tensor] = []  # parameters without a gradient in this step
        self._stale: list[
            Work
        ] = []  # works of an abandoned step, which may still write to the buffers
        with _registering:
            _reducers.add(self)

    @property
    def pending(self) -> bool:
        """Whether a backward pass has run since the last `finish`, in the current world and with more than one rank."""
        try:
            return self._receiving and self._generation == lifecycle.current().generation
        except NotInitialized:
            return False

    @property
    def _receiving(self) -> bool:
        return self._progress.phase is not StepPhase.IDLE

    @property
    def passes(self) -> int:
        return self._passes

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer, or None if it was garbage-collected."""
        return self._parameters.optimizer

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step. This method resets the counts of the current step."""
        self._passes = passes
        self.discard()

    def install_hooks(self) -> None:
        """Install gradient hooks on all parameters that require a gradient. Idempotent."""
        self._hooks.install(self._parameters.all())

    def discard(self) -> None:
        """Abandon the current step.

        This method resets the step's counters, drops works in flight, and removes gradients that may be corrupted.
        """
        for slot in self._plan.slots:
            if slot.filled and slot.bucket is not None:
                slot.bucket.discard(slot.position)
        for bucket in self._plan.buckets:
            self._stale += bucket.drop()
        self._clear()

    # Exclude the method from tracing, so that torch.compile can continue to compile its caller after the call.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def finish(self) -> None:
        """Set every parameter's ``grad`` to the reduced gradient.

        All ranks must call this method.

        Parameters without a gradient contribute zeros and receive a gradient. This method does nothing if the last
        backward pass has already completed the reduction, or if this rank is not in the process set.

        Raises:
            PeerLost: a rank was lost.
            StateMismatch: ranks reduce different gradients.
            Invalid: the script changed a gradient that was already being reduced. Raised at the end, so that no other
                rank is left waiting.
            NotInitialized: ``init()`` was not called.
        """
        changed: Slot | None = None
        world = lifecycle.current()
        with world.guard(GRADIENTS), torch.no_grad():
            if self._generation != world.generation:
                self.discard()
                self._generation = world.generation
            included = self._locate(world)
            if self._progress.phase is StepPhase.REDUCED:
                pass
            elif self._size > 1:
                if not self._receiving:
                    self._begin(world.generation)
                if self._next is not None:
                    self._agree_again(world)
                elif self._plan.named and self._agreed != world.generation:
                    self._agree(world, ComparisonPoint.STEP)
                if self._agreed == world.generation:
                    self._launch_rest(world)
                    changed = self._wait(world)
                    self._heed_change(world)
            elif world.elastic and included:
                # Same result as in a larger world, so that the optimizer's step does not depend on the world size.
                for parameter in self._parameters.all():
                    if parameter.requires_grad and parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
            self._progress.learn()
            self._clear()
        if changed is not None:
            raise Invalid(_too_early(changed))

    # ---- the step --------------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Process a gradient that one backward pass has added to ``parameter.grad``."""
        with self._lock:
            slot = self._plan.slot_of.get(id(parameter))
            if (
                slot is not None
                and slot.passes_left == 1
                and self._passes == 1
                and self._known_pass == torch._C._current_graph_task_id()
                and ((gradient := parameter.grad) is None or not gradient.requires_grad)
            ):
                # Models have thousands of parameters, so return early in nearly all calls.
                slot.passes_left = 0
                self._progress.complete += 1
                self._fill(slot, watch=True)
                if slot.bucket is not None and not slot.bucket.missing:
                    self._launch_full()
            else:
                self._receive(parameter)

    def _receive(self, parameter: torch.Tensor) -> None:
        """Begin a step, or count a gradient of the current step.

        Raises:
            AssertionError: the parameter has more gradients than backward passes per step, or its gradient requires a
                gradient.
        """
        try:
            world = lifecycle.current()
        except NotInitialized:
            return
        if world.place.size == 1 or world.broken:
            return
        if self._generation != world.generation:
            self.discard()
        if not self._receiving:
            try:
                self._locate(world)
            except Invalid:  # The process set was removed, which finish() reports.
                return
            if self._size == 1:
                return
            self._begin(world.generation)
        slot = None if self._next else self._plan.slot_of.get(id(parameter))
        if slot is None:
            self._ready.append(parameter)  # A new plan may include the parameter.
            if self._next is not None:
                notify_end(self)
            return
        if slot.passes_left == 0:
            twice = any(other.follows(parameter) for other in reducers() if other is not self)
            raise AssertionError(_too_many(slot, self._passes, twice=twice))
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name} requires a gradient itself, but DistributedOptimizer does not"
                " support create_graph=True: compute such gradients with torch.autograd.grad()"
            )
        notify_end(self)
        if not self._progress.count(slot, self._passes) or self._progress.phase is StepPhase.LATE:
            return
        if self._agreed != world.generation or self._changing:
            self._ready.append(parameter)
        else:
            self._known_pass = torch._C._current_graph_task_id()
        if self._agreed == world.generation:
            self._fill(slot, watch=True)
            if slot.bucket is not None and not slot.bucket.missing:
                self._launch_full()

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def backward_ended(self, inner: bool) -> None:
        """Launch the remaining buckets if this was the step's last pass.

        Raises:
            PeerLost: a rank was lost.
            StateMismatch: ranks reduce different gradients.
        """
        world, slots = lifecycle.current(), self._plan.slots
        if self._generation != world.generation or world.broken:
            return  # If the world has failed, finish() raises the error.
        # Parameters that only other ranks train receive no gradient on this rank.
        complete = self._progress.complete == len(slots) or self._progress.complete == sum(
            slot.parameter.requires_grad for slot in slots
        )
        end = self._progress.pass_ended(
            self._plan_state(world),
            inner=inner,
            complete=complete,
            only_finish=self._never == world.generation,
        )
        if end is PassEnd.NOTHING:
            return
        with world.guard(GRADIENTS), torch.no_grad():
            match end:
                case PassEnd.COMPARE_LAST | PassEnd.COMPARE:
                    last = self._agree(world, _POINT_OF[end])
                    self._progress.compared(last)
                    if not last:
                        return
                case PassEnd.REPLACE_PLAN:
                    self._agree_again(world)
            self._launch_rest(world)
            if not complete:
                # Gradients of further passes do not belong to this step.
                end_counts(self._plan.slots)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def wait_after_backward(self) -> None:
        """Wait for the reduced gradients if this was the step's last pass.

        Raises:
            PeerLost: a rank was lost.
            Invalid: the script changed a gradient that was already being reduced.
        """
        world = lifecycle.current()
        if self._progress.phase is not StepPhase.COMPLETING or self._generation != world.generation:
            return
        with world.guard(GRADIENTS), torch.no_grad():
            changed = self._wait(world)
            self._heed_change(world)
        self._progress.reduced()
        if changed is not None:
            self._clear()
            raise Invalid(_too_early(changed))

    def _plan_state(self, world: Context) -> PlanState:
        if self._next is not None:
            return PlanState.CHANGED
        return PlanState.AGREED if self._agreed == world.generation else PlanState.UNCOMPARED

    def follows(self, parameter: torch.Tensor) -> bool:
        """Return whether this optimizer also trains the given parameter."""
        return any(each is parameter for each in self._parameters.all())

    def _locate(self, world: Context) -> bool:
        if self._process_set is global_process_set:
            self._size = world.place.size
            return True
        if not self._process_set.included():
            self._size = 1
            return False
        self._members = resolve(self._process_set)
        self._size = world.place.size if self._members is None else len(self._members)
        return True

    def members(self, world: Context) -> tuple[int, ...] | None:
        """Return the ranks over which gradients are averaged, in ascending order.

        None means all ranks. The result is empty if this rank is not a member.
        """
        try:
            return self._members if self._locate(world) else ()
        except Invalid:
            return ()

    def _begin(self, generation: int) -> None:
        parameters = self._parameters.all()
        signature = [_trait(parameter) for parameter in parameters]
        own = tuple(int(parameter.requires_grad) for parameter in parameters)
        if signature != self._signature or own != self._own:
            self.install_hooks()
            self._own = own
            self._changing = own != self._agreed_on
        if signature != self._signature:
            if [each[0] for each in signature] != [each[0] for each in self._signature or ()]:
                # New parameters may receive gradients in separate backward passes, so the usual number of passes is
                # unknown.
                self._progress.usual = 0
            self._signature = signature
            named = [
                (self._parameters.name(each, f"parameter {number}"), each)
                for number, each in enumerate(parameters)
            ]
            plan = GradientPlan(self._options, named, lifecycle.current().env.fusion_bytes)
            plan.begin_step(self._passes)
            if self._agreed == generation and self._size > 1:
                # The step flag of the current plan notifies the other ranks of the change.
                self._next = plan
            else:
                self._plan = plan
                self._agreed = None
        elif self._agreed != generation and self._changing:
            self._plan.train(own)
            self._plan.begin_step(self._passes)
        elif not all(work.done() for work in self._stale):
            self._plan.renew()
        self._stale = []
        self._generation = generation
        self._progress.begin()

    def _fill(self, slot: Slot, *, watch: bool) -> None:
        if slot.bucket is None:  # A sparse gradient is not in any bucket.
            return
        slot.bucket.fill(slot.position, watch=watch)
        slot.filled = True
        slot.bucket.missing -= 1

    def _launch_full(self) -> None:
        world, built = lifecycle.current(), self._plan.buckets
        if world.broken:
            return  # finish() raises the error.
        try:
            while self._launched < len(built) and not built[self._launched].missing:
                self._launch_next(world)
        except (CollectiveFailed, Interrupted) as failure:
            world.mark_broken(world.generation, str(failure))

    def _launch_next(self, world: Context) -> None:
        bucket = self._plan.buckets[self._launched]
        mark = StepFlag.CHANGE if self._changing else StepFlag.STEP
        failpoint("bucket")
        moved_tensors.took(bucket.parameters)
        if timeline.on:
            row = self._plan.rows[self._launched]
            timeline.begin(row, "ALLREDUCE")
            began_ns = timeline.now_ns()
            bucket.launch(self._group(world, bucket.device), self._options.wire_op, mark)
            timeline.span(row, "MEMCPY_IN_FUSION_BUFFER", began_ns, timeline.now_ns())
        else:
            bucket.launch(self._group(world, bucket.device), self._options.wire_op, mark)
        self._launched += 1

    def _group(self, world: Context, device: torch.device) -> Collectives:
        assert self._number is not None
        return world.group(self._number.purpose, device, self._members)

    def _launch_rest(self, world: Context) -> None:
        self._absent = [slot.parameter for slot in self._plan.slots if slot.parameter.grad is None]
        for slot in self._plan.slots:
            if not slot.filled:
                self._fill(slot, watch=False)
        while self._launched < len(self._plan.buckets):
            self._launch_next(world)

    def _wait(self, world: Context) -> Slot | None:
        plan = self._plan
        changed: tuple[GradientBucket, int] | None = None
        malloc_tuning.of_process().filled()
        if plan.sparse:
            divisor = self._size if self._options.op is Op.AVERAGE else 1
            plan.reduce_sparse(lambda device: self._group(world, device), divisor)
        for number, bucket in enumerate(plan.buckets):
            if timeline.on:
                began_ns = timeline.now_ns()
                position = bucket.finish()
                timeline.span(plan.rows[number], "WAIT", began_ns, timeline.now_ns())
                timeline.end(plan.rows[number])
            else:
                position = bucket.finish()
            if position is not None:
                changed = (bucket, position)
        if world.first_not_finite is not None and self._members is None and plan.slots:
            _look(world.first_not_finite, self._twin, plan)
        if changed is None:
            return None
        return next(slot for slot in plan.slots if (slot.bucket, slot.position) == changed)

    def _clear(self) -> None:
        self._plan.begin_step(self._passes)
        self._launched = 0
        self._known_pass = -1
        self._progress.clear()
        self._ready.clear()
        if self._next is not None:
            # The step with the new plan was abandoned. Detect the changed parameters again in the next step.
            self._next = self._signature = None

    # ---- the plan --------------------------------------------------------------------------------------------------

    def _agree(self, world: Context, moment: ComparisonPoint, anew: bool = False) -> bool:
        try:
            return self._compare(world, moment, anew)
        except Exception:
            self._clear()  # No work is in flight, so the step can be discarded without a wait.
            raise

    def _compare(self, world: Context, moment: ComparisonPoint, anew: bool) -> bool:
        known = plan_agreement.of(world, self._members)
        digest = digest_of(self._plan.lines())
        last = moment is ComparisonPoint.LAST_PASS
        agreed = known.adopt(self, digest, self._version)
        if agreed is None:
            agreed, last = self._negotiate(world, known, digest, moment, anew)
            if agreed is None:
                return False
        else:
            sparse = {each.number: each.dims for each in agreed.layout.sparse}
            self._plan.train(agreed.layout.trained)
            self._plan.arrange(sparse, agreed.layout.order, bucket_bytes(world, self._plan.device))
            self._agreed_on = agreed.layout.trained
            self._changing = self._own != self._agreed_on
        self._number, self._version = agreed, agreed.version
        for bucket in self._plan.buckets:
            inside = self._group(world, bucket.device).scales_inside
            wire = getattr(torch, bucket.wire().dtype)
            bucket.scales = self._options.scales(self._size, inside, wire)
        self._agreed = world.generation
        # All ranks reset the count at this point, so it stays equal on all ranks.
        self._progress.usual = 0
        return last

    def _negotiate(
        self,
        world: Context,
        known: plan_agreement.Plans,
        digest: int,
        moment: ComparisonPoint,
        anew: bool,
    ) -> tuple[plan_agreement.AgreedPlan | None, bool]:
        plan = self._plan
        dims: dict[int, int] = {  # keyed by the parameter's ID, because slot numbers may change
            id(plan.slots[number].parameter): count for number, count in plan.sparse.items()
        }
        for slot in plan.slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient.is_sparse and not self._sparse_as_dense:
                dims[id(slot.parameter)] = gradient.sparse_dim()
        before = known.find(self)
        device = joined_rank.channel_device(known, plan.device)
        group = world.group(known.channel, device, self._members)
        if group.size == 1:
            return None, False
        replaces = -1 if before is None else before.number
        plan.train(self._own)
        order = plan.own_order(self._ready)
        twin, twins = self._twins()
        proposal = plan_agreement.PlanProposal(
            digest=digest,
            parameters=len(plan.named),
            replaces=replaces,
            anew=int(anew),
            trains=digest_of([str(self._own)]),
            sparse=len(dims),
            rank=group.rank,
            point=moment,
            twin=twin,
            twins=twins,
            order=plan_agreement.order_digest(order),
        )
        sent = plan_agreement.vector(proposal, known.taken())
        verdict = joined_rank.compare(group, device, sent)
        while verdict.again:
            # The ranks run the optimizers' backward passes in different orders, but call step() in the same order.
            # Compare plans in step() instead.
            self._never = world.generation
            if moment is not ComparisonPoint.STEP:
                return None, False
            verdict = joined_rank.compare(group, device, sent)
        if not verdict.equal:
            found_out = plan_difference.find(group, device, verdict.source, plan.lines())
            plan_difference.refuse(world, self._members, plan.lines(), found_out)
        trained = self._own
        if verdict.joined or not verdict.alike:
            trained = joined_rank.compare_trained(group, device, self._own)
        plan.train(trained)
        self._agreed_on, self._changing = self._own, False
        found = {
            slot.number: dims[id(slot.parameter)]
            for slot in plan.slots
            if id(slot.parameter) in dims
        }
        if not verdict.same_order:
            order = plan.own_order(self._ready)
            order = joined_rank.share_order(group, device, verdict.source, order, len(plan.slots))
        if verdict.greatest.sparse:
            found = joined_rank.compare_sparse(group, device, found, len(plan.slots))
            if self._options.wire_op not in joined_rank.GATHERED:
                if verdict.joined:
                    joined_rank.send_layout(group, device, verdict.source, None)
                raise ValueError(
                    "sparse gradients can be reduced only with Average or Sum, not with"
                    f" {self._options.op.name.title()}: pass sparse_as_dense=True"
                )
        plan.arrange(found, order, bucket_bytes(world, plan.device))
        layout, number = plan.layout(digest, self._size), known.number(verdict)
        if verdict.joined:
            joined_rank.send_layout(group, device, verdict.source, layout)
            if number < len(known.agreed) and number != replaces:
                joined_rank.end_plan(world, known.agreed[number], self._members)
        return known.record(number, layout, self), verdict.last

    def _agree_again(self, world: Context) -> None:
        """Agree on a new plan, because this rank's parameters have changed.

        The other ranks take their last step with the old plan, and this rank contributes zeros to it.

        Raises:
            StateMismatch: ranks have different parameters.
            PeerLost: a rank was lost.
        """
        assert self._next is not None
        anew = self._agreed == world.generation
        if anew and self._number is not None:
            joined_rank.end_plan(world, self._number, self._members)
        self._plan, self._next = self._next, None
        self._agreed, usual = None, self._progress.usual
        self._agree(world, ComparisonPoint.STEP, anew)
        self._progress.usual = usual

    def _heed_change(self, world: Context) -> None:
        """Agree on a new plan if the reduced step flag is CHANGE.

        The flag means that a rank has changed which parameters require a gradient. The step has reduced the parameters
        of the old plan. The new plan contains all parameters that any rank trains, and this method reduces the
        gradients of the added ones.

        Raises:
            StateMismatch: ranks have different parameters.
            PeerLost: a rank was lost.
        """
        if self._plan.buckets[0].reduced_flag(self._options.wire_op) is not StepFlag.CHANGE:
            return
        absent = self._absent
        reduced = {
            id(slot.parameter): (slot.parameter, slot.parameter.grad) for slot in self._plan.slots
        }
        ready, usual, ended = list(self._ready), self._progress.usual, self._progress.ended
        self._clear()
        self._agreed, self._ready = None, ready
        self._agree(world, ComparisonPoint.STEP)
        self._ready.clear()
        # Keep the number of backward passes, because it stays the same in later steps.
        self._progress.usual, self._progress.ended = usual, ended
        for parameter in absent:
            if id(parameter) not in self._plan.slot_of:
                # No rank trains the parameter any more. Without a gradient, the optimizer skips it.
                parameter.grad = None
        if self._plan.slot_of.keys() <= reduced.keys():
            return
        kept = [
            (parameter, gradient.clone())
            for parameter, gradient in reduced.values()
            if gradient is not None and id(parameter) in self._plan.slot_of
        ]
        self._launch_rest(world)
        self._wait(world)
        for parameter, gradient in kept:
            if gradient.is_sparse or parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)

    def plan_replaced(self) -> None:
        """Discard the agreed plan, because the other ranks have agreed on another one. See `plan_agreement.Owner`."""
        self._agreed = None
        self._known_pass = -1

    def _twins(self) -> tuple[int, int]:
        """Return this reducer's index among those with equal parameter shapes, by age, and their number."""
        return self._twin, sum(other._kind == self._kind for other in reducers())


def _look(first: FirstNotFinite, twin: int, plan: GradientPlan) -> None:
    samples = [
        each.sample
        for each in plan.buckets
        if isinstance(each, FlatBucket) and each.device.type == "cpu"
    ]
    parameters = ((slot.name, slot.parameter) for slot in plan.slots)
    of = f"{twin} {len(plan.slots)} {plan.slots[0].name}"
    first.look(of, samples, parameters)


def bucket_bytes(world: Context, device: torch.device) -> tuple[int, int]:
    """Return the sizes in bytes at which the first bucket, and any other bucket, is closed.

    They are HOROVOD_FUSION_THRESHOLD or a default. They are equal on all ranks, even if hosts have different numbers of
    ranks.
    """
    full = world.env.fusion_bytes
    if full is None and device.type == "cuda":
        one_host = world.place.local_size == world.place.size
        full = bucket_plan.GPU_FULL_BYTES if one_host else bucket_plan.GPU_FULL_BYTES_APART
    elif full is None:
        full = FULL_BYTES
    return min(FIRST_BYTES, full), full


def _too_many(slot: Slot, passes: int, *, twice: bool) -> str:
    if twice:
        return (
            f"two DistributedOptimizers hold {slot.name}, and one of them received its gradient more than"
            f" backward_passes_per_step={passes} times before its step(): keep one, and remove the other, also from"
            " schedulers and states"
        )
    return (
        f"{slot.name} received more than backward_passes_per_step={passes} gradients before step(), or its first"
        " gradient after as many backward passes as earlier steps had: set backward_passes_per_step to the largest"
        " number of backward passes before a step()"
    )


def _too_early(slot: Slot) -> str:
    return (
        f"the gradient of {slot.name} was changed while it was being reduced, so the change is lost or corrupts the"
        " gradient. Possible causes: this step had fewer backward passes than earlier steps or than"
        " backward_passes_per_step, a hook was registered after DistributedOptimizer was created, or two"
        " DistributedOptimizers hold the parameter. Run the same number of backward passes in every step, or call"
        " optimizer.synchronize() before you change gradients, and then optimizer.step() inside `with"
        " optimizer.skip_synchronize():`. Register hooks before you create DistributedOptimizer, and pass each"
        " parameter to only one"
    )


def _trait(parameter: torch.Tensor) -> tuple[Any, ...]:
    return (id(parameter), parameter.dtype, parameter.device, parameter.shape, parameter.stride())
