"""Decides when gradients are averaged: counts backward passes, launches full buckets in plan order, waits for them.

The plan is a function of the parameters and of the order in which their gradients became ready in one rank's first
step. It is equal on all ranks, so a step needs no negotiation: bucket k is launched when it is full and bucket k-1 has
been launched. Before a plan is first used in a generation the ranks compare it once, in one or two small messages, and
launch nothing earlier. Each reducer has a group of its own, so two optimizers may launch in any order; and ranks
that have joined can follow each of them: see `elastic.optimizer.plan_agreement`.

The reduction is over when the last backward pass of a step returns, so what the script does to gradients then is done
to the reduced ones. Which pass is the last? The one after which no gradient is missing. Where some are, parameters may
be unused, or another loss may follow: the last is then the one that was the last in other steps, by its number.
If no pass turns out to be the last, as in the first such step, or where ranks run the passes of two optimizers in
different orders, `GradientReducer.finish` completes the step.

Gradient hooks run inside backward, half way: they never raise an interruption. A hook that cannot launch marks the
generation broken and returns; `finish` raises. What is waited for at the end of a pass raises from backward() itself.
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
from elastic.optimizer import (
    bucket_plan,
    joined_rank,
    malloc_tuning,
    plan_agreement,
    plan_difference,
)
from elastic.optimizer.flat_buckets import Compressor, FlatBucket, GradientBucket
from elastic.optimizer.gradient_options import Options, digest_of
from elastic.optimizer.gradients.gradient_hooks import GradientHooks, OptimizerParameters, tell_end
from elastic.optimizer.gradients.gradient_plan import GradientPlan, Slot
from elastic.optimizer.gradients.not_finite import FirstNotFinite
from elastic.optimizer.plan_agreement import StepFlag
from elastic.protocol.messages import GRADIENTS
from elastic.runtime import lifecycle

FIRST_BYTES = bucket_plan.FIRST_BYTES
FULL_BYTES = bucket_plan.FULL_BYTES


# Those of this process, wherever they are in their steps.
reducers: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
_numbers = itertools.count()
# By the shapes of their parameters: those with equal ones can't be told apart by their plans.
_made: collections.Counter[int] = collections.Counter()


class GradientReducer:
    """Reduces the gradients of one optimizer. All methods but the hooks belong to the training thread."""

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
        self._lock = threading.Lock()  # each device has its own backward thread

        self._hooks = GradientHooks(self)

        # The plan.
        self._signature: list[tuple[Any, ...]] | None = None
        self._own: tuple[int, ...] = ()  # 1 for each parameter that requires a gradient here
        self._told: tuple[int, ...] = ()  # the same, as the others know it
        self._changing = False  # whether the two differ
        self._next: GradientPlan | None = None  # what the agreed one is given up for, in this step
        self._plan = GradientPlan(self._options, [])
        self._agreed: int | None = None  # the generation whose members have compared this plan
        self._number: plan_agreement.Agreed | None = None  # which one it is there
        self._version = -1  # of that number's plan

        # The present step.
        self._generation: int | None = None
        self._size = 1  # of those that it averages over
        self._members: tuple[int, ...] | None = None  # None: the whole world
        self._begun = False
        # In their order, as long as the plan is not agreed, or is about to be another.
        self._ready: list[torch.Tensor] = []
        self._launched = 0  # buckets
        self._complete = 0  # slots that have all their gradients
        self._partial = 0  # slots that have some of their gradients
        self._ended = 0  # backward passes that brought any
        self._usual = 0  # such passes in other steps; 0: not known
        # Of autograd's engine; it brings gradients of a step that began as agreed.
        self._known_pass = -1
        self._late = False  # no pass is the last of this step: all ranks reduce in finish()
        self._never: int | None = None  # the generation in which none is the last of any step
        self._early = False  # the last pass is over, and nothing is missing or to come
        self._reduced = False
        self._absent: list[torch.Tensor] = []  # had no gradient in this step
        self._stale: list[Work] = []  # of an abandoned step; they may still write into the buffers
        reducers.add(self)

    @property
    def pending(self) -> bool:
        """Whether backward has run since the last `finish`, in the present world of more than one."""
        try:
            return self._begun and self._generation == lifecycle.current().generation
        except NotInitialized:
            return False

    @property
    def passes(self) -> int:
        return self._passes

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """None once it is gone."""
        return self._parameters.optimizer

    def set_passes(self, passes: int) -> None:
        """Backward passes per step, from now on. What has been counted in this step is forgotten."""
        self._passes = passes
        self.discard()

    def install_hooks(self) -> None:
        """Have backward call us for every parameter that requires a gradient. Safe to repeat."""
        self._hooks.install(self._parameters.all())

    def discard(self) -> None:
        """Abandon the present step: counters, works under way, and the gradients that these may have garbled."""
        for slot in self._plan.slots:
            if slot.filled and slot.bucket is not None:
                slot.bucket.discard(slot.position)
        for bucket in self._plan.buckets:
            self._stale += bucket.drop()
        self._clear()

    # A compiled function that calls it goes on behind it: nothing here is worth tracing.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def finish(self) -> None:
        """Make every parameter's ``grad`` the reduced one. Raises PeerLost, StateMismatch, Invalid, NotInitialized.

        Parameters without a gradient contribute zeros and get one. Does nothing if that was done when the last backward
        pass ended, nor on a rank outside the process set. Invalid if the script has changed a gradient that was taken
        in before: raised at the end, so that no other rank is left waiting.
        """
        changed: Slot | None = None
        world = lifecycle.current()
        with world.guard(GRADIENTS), torch.no_grad():
            if self._generation != world.generation:
                self.discard()
                self._generation = world.generation
            included = self._locate(world)
            if self._reduced:
                pass
            elif self._size > 1:
                if not self._begun:
                    self._begin(world.generation)
                if self._next is not None:
                    self._agree_anew(world)
                elif self._plan.named and self._agreed != world.generation:
                    self._agree(world, plan_agreement.Moment.STEP)
                if self._agreed == world.generation:
                    self._launch_rest(world)
                    changed = self._wait(world)
                    self._heed_change(world)
            elif world.elastic and included:
                # As in a larger world, so that an optimizer does the same whatever the size is.
                for parameter in self._parameters.all():
                    if parameter.requires_grad and parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
            self._usual = max(self._usual, self._ended)
            self._clear()
        if changed is not None:
            raise Invalid(_too_early(changed))

    # ---- the step --------------------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """``parameter.grad`` has received one backward pass."""
        with self._lock:
            slot = self._plan.slot_of.get(id(parameter))
            if (
                slot is not None
                and slot.passes_left == 1
                and self._passes == 1
                and self._known_pass == torch._C._current_graph_task_id()
                and ((gradient := parameter.grad) is None or not gradient.requires_grad)
            ):
                # As nearly always. Models have thousands of parameters, and for each nothing else is asked.
                slot.passes_left = 0
                self._complete += 1
                self._fill(slot, watch=True)
                if slot.bucket is not None and not slot.bucket.missing:
                    self._launch_full()
            else:
                self._receive(parameter)

    def _receive(self, parameter: torch.Tensor) -> None:
        """Begins a step, or learns that it has begun; raises AssertionError where the script has made a mistake."""
        try:
            world = lifecycle.current()
        except NotInitialized:
            return
        if world.place.size == 1 or world.broken:
            return
        if self._generation != world.generation:
            self.discard()
        if not self._begun:
            try:
                self._locate(world)
            except Invalid:  # the process set was removed: finish() says so
                return
            if self._size == 1:
                return
            self._begin(world.generation)
        slot = None if self._next else self._plan.slot_of.get(id(parameter))
        if slot is None:
            self._ready.append(parameter)  # the next plan may have it
            if self._next is not None:
                tell_end(self)
            return
        if slot.passes_left == 0:
            twice = any(other.follows(parameter) for other in reducers if other is not self)
            raise AssertionError(_too_many(slot, self._passes, twice=twice))
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(
                f"the gradient of {slot.name} requires a gradient itself: create_graph=True cannot be combined with"
                " DistributedOptimizer, compute such gradients with torch.autograd.grad()"
            )
        tell_end(self)
        self._partial += slot.passes_left == self._passes
        slot.passes_left -= 1
        if slot.passes_left:
            return
        self._partial -= 1
        self._complete += 1
        if self._late:
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
        """Launch all that is left if this was the step's last pass. Raises PeerLost, StateMismatch."""
        world = lifecycle.current()
        if not self._begun or self._reduced or self._generation != world.generation or world.broken:
            return  # finish() says why, where that has to be said
        if self._next is not None:
            self._ended += not inner
            if not inner and 0 < self._usual <= self._ended:  # else finish() tells the others
                with world.guard(GRADIENTS), torch.no_grad():
                    self._agree_anew(world)
                    self._early = True
                    self._launch_rest(world)
            return
        # Those that only other ranks train get no gradient here.
        slots = self._plan.slots
        complete = self._complete == len(slots) or self._complete == sum(
            slot.parameter.requires_grad for slot in slots
        )
        if inner and not complete:
            return
        self._ended += 1
        if self._partial or self._late or self._never == world.generation:
            return
        last = complete or 0 < self._usual <= self._ended
        with world.guard(GRADIENTS), torch.no_grad():
            if self._agreed == world.generation:
                self._early = last
            else:
                # Also with gradients missing: ranks that have all of theirs wait here.
                moment = plan_agreement.Moment.LAST_PASS if last else plan_agreement.Moment.PASS
                self._early = self._agree(world, moment)
                self._late = not self._early
            if self._early:
                self._launch_rest(world)
                if not complete:
                    for slot in self._plan.slots:
                        slot.passes_left = 0  # it is too late for one

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def wait_after_backward(self) -> None:
        """Make the gradients the reduced ones if this was the step's last pass. Raises PeerLost, Invalid."""
        world = lifecycle.current()
        if not self._early or self._reduced or self._generation != world.generation:
            return
        with world.guard(GRADIENTS), torch.no_grad():
            changed = self._wait(world)
            self._heed_change(world)
        self._begun = self._reduced = True
        if changed is not None:
            self._clear()
            raise Invalid(_too_early(changed))

    def follows(self, parameter: torch.Tensor) -> bool:
        """Whether this optimizer, too, takes the gradients of a parameter."""
        return any(each is parameter for each in self._parameters.all())

    def _locate(self, world: Context) -> bool:
        """With whom to average in this step. Whether this rank is one of them. Raises Invalid."""
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
        """The ranks that average, None for all; an empty tuple if this rank is not among them."""
        try:
            return self._members if self._locate(world) else ()
        except Invalid:
            return ()

    def _begin(self, generation: int) -> None:
        """The first gradient, or finish(), of a step."""
        parameters = self._parameters.all()
        signature = [_trait(parameter) for parameter in parameters]
        own = tuple(int(parameter.requires_grad) for parameter in parameters)
        if signature != self._signature or own != self._own:
            self.install_hooks()
            self._own = own
            self._changing = own != self._told
        if signature != self._signature:
            if [each[0] for each in signature] != [each[0] for each in self._signature or ()]:
                self._usual = 0  # others may come with passes of their own
            self._signature = signature
            named = [
                (self._parameters.name(each, f"parameter {number}"), each)
                for number, each in enumerate(parameters)
            ]
            plan = GradientPlan(self._options, named, lifecycle.current().env.fusion_bytes)
            plan.begin_step(self._passes)
            if self._agreed == generation and self._size > 1:
                self._next = plan  # the others have to be told, with the plan that they have
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
        self._begun = True

    def _fill(self, slot: Slot, *, watch: bool) -> None:
        if slot.bucket is None:  # sparse
            return
        slot.bucket.fill(slot.position, watch=watch)
        slot.filled = True
        slot.bucket.missing -= 1

    def _launch_full(self) -> None:
        world, built = lifecycle.current(), self._plan.buckets
        if world.broken:
            return  # finish() says so
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
        """Returns one whose gradient the script has changed meanwhile, if there is any."""
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
        self._complete = self._partial = self._ended = 0
        self._begun = self._late = self._early = self._reduced = False
        self._ready.clear()
        if self._next is not None:  # abandoned: the next step begins with what has changed
            self._next = self._signature = None

    # ---- the plan --------------------------------------------------------------------------------------------------

    def _agree(self, world: Context, moment: plan_agreement.Moment, anew: bool = False) -> bool:
        """Compare the plan with the other members'; learn their order, and which gradients are sparse on any of them.

        Changes nothing in a world of one, which is also what a newcomer has before it joined, nor if ranks compare
        different plans at the end of a backward pass: they do so again in step(). Returns whether this is the end of
        the step's last pass on all ranks.
        """
        try:
            return self._compare(world, moment, anew)
        except Exception:
            self._clear()  # nothing is under way
            raise

    def _compare(self, world: Context, moment: plan_agreement.Moment, anew: bool) -> bool:
        if self._options.casts:
            for slot in self._plan.slots:
                if slot.parameter.is_complex():
                    raise TypeError(
                        f"{slot.name} is {slot.parameter.dtype}, which can't be reduced: keep its real and"
                        " imaginary parts as a parameter, and create the complex tensor from that with"
                        " torch.view_as_complex()"
                    )
        known = plan_agreement.of(world, self._members)
        digest = digest_of(self._plan.lines())
        last = moment is plan_agreement.Moment.LAST_PASS
        agreed = known.adopt(self, digest, self._version)
        if agreed is None:
            agreed, last = self._negotiate(world, known, digest, moment, anew)
            if agreed is None:
                return False
        else:
            sparse = {each.number: each.dims for each in agreed.layout.sparse}
            self._plan.train(agreed.layout.trained)
            self._plan.arrange(sparse, agreed.layout.order, bucket_bytes(world, self._plan.device))
            self._told = agreed.layout.trained
            self._changing = self._own != self._told
        self._number, self._version = agreed, agreed.version
        for bucket in self._plan.buckets:
            inside = self._group(world, bucket.device).scales_inside
            wire = getattr(torch, bucket.wire().dtype)
            bucket.scales = self._options.scales(self._size, inside, wire)
        self._agreed = world.generation
        self._usual = 0  # the same on all ranks
        return last

    def _negotiate(
        self,
        world: Context,
        known: plan_agreement.Plans,
        digest: int,
        moment: plan_agreement.Moment,
        anew: bool,
    ) -> tuple[plan_agreement.Agreed | None, bool]:
        """Compare with all others, also with those that have joined. See `_agree`, for None as well."""
        plan = self._plan
        dims: dict[int, int] = {  # by id, because the numbers may change
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
        own = plan_agreement.PlanDigest(digest, len(plan.named), replaces, int(anew))
        trains = digest_of([str(self._own)])
        plan.train(self._own)
        order = plan.own_order(self._ready)
        proposal = plan_agreement.proposal(
            own, trains, len(dims), group.rank, known.taken(), moment, *self._twins(), order
        )
        verdict = joined_rank.compare(group, device, proposal)
        while verdict.again:
            # Ranks run the backward passes of optimizers in different orders. In step() the order is one.
            self._never = world.generation
            if moment is not plan_agreement.Moment.STEP:
                return None, False
            verdict = joined_rank.compare(group, device, proposal)
        if not verdict.equal:
            found_out = plan_difference.find(group, device, verdict.source, plan.lines())
            plan_difference.refuse(world, self._members, plan.lines(), found_out)
        trained = self._own
        if verdict.joined or not verdict.alike:
            trained = joined_rank.compare_trained(group, device, self._own)
        plan.train(trained)
        self._told, self._changing = self._own, False
        found = {
            slot.number: dims[id(slot.parameter)]
            for slot in plan.slots
            if id(slot.parameter) in dims
        }
        if not verdict.same_order:
            order = plan.own_order(self._ready)
            order = joined_rank.share_order(group, device, verdict.source, order, len(plan.slots))
        if verdict.sparse:
            found = joined_rank.compare_sparse(group, device, found, len(plan.slots))
            if self._options.wire_op not in joined_rank.GATHERED:
                if verdict.joined:
                    joined_rank.tell_layout(group, device, verdict.source, None)
                raise ValueError(
                    "sparse gradients can be reduced with Average and Sum, not with"
                    f" {self._options.op.name.title()}: pass sparse_as_dense=True"
                )
        plan.arrange(found, order, bucket_bytes(world, plan.device))
        layout, number = plan.layout(digest, self._size), known.number(verdict)
        if verdict.joined:
            joined_rank.tell_layout(group, device, verdict.source, layout)
            if number < len(known.agreed) and number != replaces:
                joined_rank.end_plan(world, known.agreed[number], self._members)
        return known.record(number, layout, self), verdict.last

    def _agree_anew(self, world: Context) -> None:
        """Parameters are other ones than in the plan: this rank takes its last step with zeros, and has a new plan.

        Raises StateMismatch, PeerLost.
        """
        assert self._next is not None
        anew = self._agreed == world.generation
        if anew and self._number is not None:
            joined_rank.end_plan(world, self._number, self._members)
        self._plan, self._next = self._next, None
        self._agreed, usual = None, self._usual
        self._agree(world, plan_agreement.Moment.STEP, anew)
        self._usual = usual

    def _heed_change(self, world: Context) -> None:
        """On some rank, as the mark may say, other parameters require a gradient than before; the step has been taken
        without those. Agrees on all that are trained on any rank, and reduces the gradients of those that are new.

        Raises StateMismatch, PeerLost.
        """
        if self._plan.buckets[0].heard(self._options.wire_op) is not StepFlag.CHANGE:
            return
        absent = self._absent
        reduced = {
            id(slot.parameter): (slot.parameter, slot.parameter.grad) for slot in self._plan.slots
        }
        ready, usual, ended = list(self._ready), self._usual, self._ended
        self._clear()
        self._agreed, self._ready = None, ready
        self._agree(world, plan_agreement.Moment.STEP)
        self._ready.clear()
        # The same passes bring the gradients of the steps to come.
        self._usual, self._ended = usual, ended
        for parameter in absent:
            if id(parameter) not in self._plan.slot_of:
                parameter.grad = None  # frozen on every rank now: the optimizer leaves it alone
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
        """See `plan_agreement.Owner`."""
        self._agreed = None
        self._known_pass = -1

    def _twins(self) -> tuple[int, int]:
        """How many this process made before for parameters of equal shapes, and how many of all these are left."""
        return self._twin, sum(other._kind == self._kind for other in list(reducers))


def _look(first: FirstNotFinite, twin: int, plan: GradientPlan) -> None:
    """At the first elements of each bucket on the CPU: what it costs does not grow with them."""
    samples = [
        each.sample
        for each in plan.buckets
        if isinstance(each, FlatBucket) and each.device.type == "cpu"
    ]
    parameters = ((slot.name, slot.parameter) for slot in plan.slots)
    of = f"{twin} {len(plan.slots)} {plan.slots[0].name}"
    first.look(of, samples, parameters)


def bucket_bytes(world: Context, device: torch.device) -> tuple[int, int]:
    """When the first bucket, and when any other, is full: HOROVOD_FUSION_THRESHOLD, or what suits the device.

    The same on all ranks of a world, also where hosts have different numbers of them.
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
            f" backward_passes_per_step={passes} times before its step(): keep one, and drop the old one also from"
            " schedulers and states"
        )
    return (
        f"{slot.name} received more than backward_passes_per_step={passes} gradients before step(),"
        " or its first one after as many backward passes as other steps had; increase"
        " backward_passes_per_step to the most backward passes that there are before a step()"
    )


def _too_early(slot: Slot) -> str:
    return (
        f"the gradient of {slot.name} was changed when its reduction had begun and was not over, so that change is lost"
        " or garbled. The reduction is over when the backward pass returns that brings the last gradient of a step, or"
        " after as many passes as other steps had. This step had fewer, or fewer than backward_passes_per_step for"
        " some parameters: run the same number of backward passes in every step, or call optimizer.synchronize()"
        " before gradients are clipped or changed, and optimizer.step() inside"
        " `with optimizer.skip_synchronize():`. A hook that changes gradients has to be registered before"
        " DistributedOptimizer is made, and a parameter belongs to one of them only"
    )


def _trait(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Of a parameter whose gradient finds its place in the plan that was made for it."""
    return (id(parameter), parameter.dtype, parameter.device, parameter.shape, parameter.stride())
