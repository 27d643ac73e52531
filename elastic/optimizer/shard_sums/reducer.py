"""Scheduling of the sums over a step's shards: buckets are reduced one by one during the last shard's backward pass.

As the gradients of a shard become ready, they are added to those of earlier shards along the tree (`buckets`). In a
rank's last shard, full buckets are launched in plan order. The loop over the shards ends when all buckets are complete.
From then on, each gradient is the mean over all shards on all ranks, including spares.

The first step of a world launches nothing before the end of its loop. At that point, the ranks compare their plans and
adopt rank 0's order of gradients: the one agreed earlier, or else the order observed in its last shard. Buckets follow
this order, so that the first buckets are full early. Sums are elementwise and do not depend on the order.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic import failpoints
from elastic.api.compression import Compression
from elastic.collectives import raise_together
from elastic.collectives.interface import Collectives, Op, SumsTrees, Work
from elastic.context import Context
from elastic.errors import CollectiveFailed, Interrupted, Invalid, StateMismatch
from elastic.exact import reduction_tree
from elastic.exact.shard_step import PassResult, ShardStep
from elastic.exact.shards import Shards
from elastic.failpoints import actions, failpoint
from elastic.monitoring import moved_tensors
from elastic.optimizer.gradients import bucket_plan, malloc_tuning, not_finite
from elastic.optimizer.gradients.flat_buckets import Compressor
from elastic.optimizer.gradients.gradient_hooks import GradientHooks, OptimizerParameters
from elastic.optimizer.shard_sums.buckets import ShardBucket
from elastic.optimizer.shard_sums.partial_sums import PartialsExchange
from elastic.optimizer.shard_sums.plan import ShardPlan, ShardSlot
from elastic.protocol.messages import GRADIENTS
from elastic.runtime import lifecycle
from elastic.state.snapshots import digest

PURPOSE = f"{GRADIENTS} of shards"


class ShardReducer:
    """Reducer that sums the gradients of one optimizer over shards.

    Args:
        optimizer: optimizer of the parameters.
        names: names of the parameters.
        shards: shards of each step.
        op: AVERAGE over shards, or SUM.
        compression: built-in compression, which only changes the dtype.
        passes: number of backward passes per shard.
        sparse_as_dense: whether to convert sparse gradients to dense ones.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        shards: Shards,
        *,
        op: Op,
        compression: Compressor,
        passes: int,
        sparse_as_dense: bool,
    ) -> None:
        self._parameters = OptimizerParameters(optimizer, names)
        self.shards = shards
        self._divisor = shards.count if op is Op.AVERAGE else 1
        self._passes = passes
        self._sparse_as_dense = sparse_as_dense
        self._hooks = GradientHooks(self)
        self._lock = threading.Lock()  # needed because each device has its own backward thread
        self._plan = ShardPlan(compression)
        # parameters in the order in which their gradients became ready in the last shard
        self._ready: list[int] = []
        self._step: ShardStep | None = None
        self._program: reduction_tree.Program = ()
        # for each shard of this rank, whether it completes a partial sum
        self._complete: dict[int, bool] = {}
        self._shard: reduction_tree.Merge | None = None
        self._last = False
        # assignment of shards to ranks that the ranks have compared
        self._held: tuple[tuple[int, ...], ...] | None = None
        self._agreed: int | None = None  # generation in which the ranks last compared the plan
        self._in_memory = False  # whether all ranks can access each other's buckets
        self._launched = 0
        self._stale: list[Work] = []
        # whether the current shard's gradients are kept to merge later ones with them
        self._keeps = False
        self._storages: set[int] = set()  # storages of these gradients
        self._noting = False  # whether digests of the gradients are requested
        # digests of checked shards and of second passes, by shard and parameter
        self._digests: dict[int, dict[str, int]] = {}
        self._second_digests: dict[int, dict[str, int]] = {}
        # whether the current shard is checked: its gradients are compared with other ranks'
        self._checked = False
        # whether to look for shards with suspicious gradients: infinite, NaN or unusually large
        self._examines = False
        # smallest and largest gradients of each shard
        self._extremes: dict[int, list[torch.Tensor]] = {}
        self._second_pass: int | None = None  # shard whose second pass is in progress, or None
        self._kept: list[torch.Tensor | None] = []  # gradients as they were before the second pass
        shards.listen(self, trains=optimizer)

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], shards: Shards
    ) -> ShardReducer:
        """Create a reducer for an optimizer without a wrapper, with Average and one backward pass per shard.

        Raises:
            Invalid: an option is not supported.
        """
        shards.check_workers(lifecycle.current().env.workers_min)
        made = cls(
            optimizer,
            names,
            shards,
            op=Op.AVERAGE,
            compression=Compression.none,
            passes=1,
            sparse_as_dense=False,
        )
        made.install_hooks()
        return made

    # ---- interface for the optimizer -----------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        return self._passes

    @property
    def order(self) -> tuple[int, ...] | None:
        """Return the agreed order of the trained parameters, or None until the ranks have agreed."""
        return self._plan.order

    @property
    def launched(self) -> int:
        """Return the number of buckets launched in the current step."""
        return self._launched

    @property
    def pending(self) -> bool:
        """Return whether the script is inside the loop over a step's shards."""
        return self._step is not None and self.shards.present is not None

    def set_passes(self, passes: int) -> None:
        self._passes = passes

    def install_hooks(self) -> None:
        self._hooks.install(self._parameters.all())

    def finish(self) -> None:
        """Raise Invalid inside the loop over the shards, because gradients are complete only when it ends."""
        if self.pending:
            raise Invalid(
                "optimizer.step() or synchronize() was called within the loop over the shards of step"
                f" {self.shards.step}: the gradient is not complete until all shards are computed, so call it after"
                " the loop"
            )

    def discard(self) -> None:
        """Abandon the current step."""
        self._forget()
        for slot in self._plan.slots.values():
            slot.bucket.parameters[slot.position].grad = None

    # ---- the step ------------------------------------------------------------------------------------------------

    def step_begins(self, step: ShardStep) -> None:
        trained = [each for each in self._parameters.all() if each.requires_grad]
        full = lifecycle.current().env.fusion_bytes or bucket_plan.FULL_BYTES
        if self._plan.train(trained, full):
            self.install_hooks()
            self._agreed = None
        self._plan.keep_memory(max((each.place for each in step.merges), default=0))
        self._noting = lifecycle.current().env.digest_tensors
        if not all(work.done() for work in self._stale):
            for bucket in self._plan.buckets:
                # Allocate new memory, because operations in flight may still write to the old buffers.
                bucket.make(bucket.depth)
        self._stale = []
        depth = max(1, len(step.partials[step.rank])) if self.shards.exact else 1
        for bucket in self._plan.buckets:
            if bucket.depth < depth:
                bucket.make(depth)
            bucket.step_begins()
        if self._step is None or self._step.held is not step.held:
            # Compare again: with another assignment of shards, the buffers may no longer fit into the shared memory.
            if self._held is not step.held:
                self._agreed, self._held = None, step.held
            self._program = reduction_tree.program(step.partials, self.shards.count)
            complete = reduction_tree.completes(step.merges)
            self._complete = {
                each.shard: done for each, done in zip(step.merges, complete, strict=True)
            }
        self._step, self._launched, self._shard, self._last = step, 0, None, False
        self._second_pass, self._digests, self._extremes = None, {}, {}
        self._second_digests = {}
        self._examines = bool(self.shards.verify) and len(step.held) > 1
        self._ready.clear()

    def shard_begins(self, merge: reduction_tree.Merge, last: bool) -> None:
        # Add each gradient to the previous sum directly, so that no gradients have to be kept.
        if not self.shards.exact:
            before = int(self._shard is not None)
            merge = reduction_tree.Merge(merge.shard, before, before)
        complete = self._complete[merge.shard] if self.shards.exact else last
        self._shard, self._last = merge, last
        self._checked = merge.shard in self.shards.checked
        self._keeps = merge.merges == 0 and not complete
        self._storages.clear()
        for slot in self._plan.slots.values():
            slot.passes_left = self._passes
        for bucket in self._plan.buckets:
            bucket.shard_begins(merge, complete, last, self._divisor_of_root(bucket))

    def _divisor_of_root(self, bucket: ShardBucket) -> int:
        """Return the divisor for a partial sum.

        It is 1 unless there is only one rank, so that its partial is already the complete sum.
        """
        alone = self._step is not None and len(self._step.held) == 1
        return self._divisor if alone and self.shards.exact and not bucket.compressed else 1

    @torch.no_grad()
    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Process a gradient that one backward pass has added to ``parameter.grad``."""
        with self._lock:
            if failpoints.in_use():
                self._may_flip(parameter)
            if self._second_pass is None:
                self._receive(parameter)

    def _may_flip(self, parameter: torch.Tensor) -> None:
        """Flip a bit of a gradient that was just computed, if a failpoint requests it. For tests."""
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse:
            return

        def flip(seed: int) -> str:
            content = gradient.view(-1).view(torch.uint8) if gradient.is_contiguous() else None
            if content is None or not content.numel():
                return ""
            place = seed % content.numel()
            content[place] ^= 1 << seed % 8
            return f"a bit of the gradient of {self._parameters.name(parameter)}"

        actions.flippers["gradient"] = flip
        failpoint("shard-gradient")

    def _receive(self, parameter: torch.Tensor) -> None:
        slot = self._plan.slots.get(id(parameter))
        if slot is None or self._shard is None or not self.pending:
            raise Invalid(
                f"{self._parameters.name(parameter)} received a gradient outside the loop over the shards: call"
                " backward() within `for batch in shards.over(loader)`, and freeze or add parameters only"
                " between steps"
            )
        if slot.passes_left == 0:
            raise Invalid(
                f"{self._parameters.name(parameter)} received more than backward_passes_per_step={self._passes}"
                f" gradients in shard {self._shard.shard}: set backward_passes_per_step to the number of"
                " backward passes per shard"
            )
        slot.passes_left -= 1
        if slot.passes_left == 0:
            self._take(slot)
            if self._last:
                self._ready.append(slot.number)
                if slot.bucket.missing == 0:
                    self._launch_full()

    def _take(self, slot: ShardSlot) -> None:
        parameter = slot.bucket.parameters[slot.position]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            if not self._sparse_as_dense:
                raise Invalid(
                    f"the gradient of {self._parameters.name(parameter)} is sparse, but shards support only"
                    " dense gradients: pass sparse_as_dense=True to DistributedOptimizer"
                )
            parameter.grad = gradient = gradient.to_dense()
        if gradient is not None and (self._noting or self._checked):
            assert self._shard is not None
            name, shard = self._parameters.name(parameter), self._shard.shard
            found = digest.digest([(name, gradient.detach().cpu())])
            if self._noting:
                self.shards.gradients[f"{shard} {name}"] = found
            if self._checked:
                self._digests.setdefault(shard, {})[f"{slot.number} {name}"] = found
        if gradient is not None and self._examines:
            assert self._shard is not None
            self._extremes.setdefault(self._shard.shard, []).extend(
                not_finite.extremes(not_finite.examined(gradient))
            )
        if gradient is not None and self._keeps:
            storage = gradient.untyped_storage().data_ptr()
            if storage in self._storages:
                # The backward pass may use the same memory for several parameters' gradients, so an in-place sum on one
                # gradient would change the others.
                parameter.grad = gradient.clone()
            self._storages.add(storage)
        slot.bucket.take(slot.position)

    @torch.no_grad()
    def shard_ends(self, shard: int) -> None:
        """Process the remaining parameters at the end of a shard.

        These are the parameters without a gradient, or with fewer backward passes than others.
        """
        for slot in self._plan.slots.values():
            if slot.passes_left:
                slot.passes_left = 0
                self._take(slot)

    # ---- verification --------------------------------------------------------------------------------------------

    def second_pass_begins(self, shard: int) -> None:
        trained = self._trained()
        self._kept = [parameter.grad for parameter, _ in trained]
        for parameter, _ in trained:
            parameter.grad = None
        self._second_pass = shard

    @torch.no_grad()
    def second_pass_ends(self, shard: int) -> PassResult:
        found, extremes = {}, list[torch.Tensor]()
        for (parameter, number), kept in zip(self._trained(), self._kept, strict=True):
            gradient, parameter.grad = parameter.grad, kept
            if gradient is not None:
                name = self._parameters.name(parameter)
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                found[f"{number} {name}"] = digest.digest([(name, dense.detach().cpu())])
                extremes += not_finite.extremes(not_finite.examined(dense))
        self._second_pass, self._kept = None, []
        self._second_digests[shard] = found
        return PassResult(_digest_of(found), _largest(extremes))

    def digest_of(self, shard: int) -> int:
        return _digest_of(self._digests.get(shard, {}))

    def largest(self, shard: int) -> float:
        return _largest(self._extremes.get(shard, []))

    def state_of(self, shard: int) -> dict[str, Any]:
        return {
            "parameters": {
                f"{number} {self._parameters.name(parameter)}": parameter.detach().cpu()
                for parameter, number in self._trained()
            },
            "digests": self._digests.get(shard, {}),
            "second_digests": self._second_digests.get(shard, {}),
        }

    def _trained(self) -> list[tuple[torch.Tensor, int]]:
        slots = self._plan.slots.values()
        return [(slot.bucket.parameters[slot.position], slot.number) for slot in slots]

    @torch.no_grad()
    def step_ends(self) -> None:
        """Complete the gradients at the end of the loop over the shards.

        All ranks must call this method.

        Raises:
            PeerLost: a rank was lost.
            StateMismatch: ranks reduce different gradients.
            Invalid: the script changed a gradient within the loop.
        """
        step, world = self._step, lifecycle.current()
        assert step is not None
        if step.merges:
            for bucket in self._plan.buckets:
                bucket.check_untouched(self._parameters.name)
        with world.guard(GRADIENTS):
            if self._plan.buckets:
                if self._agreed != world.generation:
                    self._agree(world)
                while self._launched < len(self._plan.buckets):
                    self._launch_next(world)
                # Start the second half of every bucket's exchange before waiting for any of them.
                for bucket in self._plan.buckets:
                    if isinstance(bucket.work, PartialsExchange):
                        bucket.work.advance()
                for bucket in self._plan.buckets:
                    assert bucket.work is not None
                    bucket.work.wait()
                    bucket.work = None
                    bucket.give(self._divisor)
            malloc_tuning.of_process().filled()
        self._shard = None

    def step_abandoned(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._second_pass, self._kept = None, []
        for bucket in self._plan.buckets:
            bucket.drop()
            if bucket.work is not None:
                self._stale.append(bucket.work)
                bucket.work = None
        self._step = self._shard = None
        self._launched = 0

    # ---- launch of buckets ---------------------------------------------------------------------------------------

    @property
    def all_launched(self) -> bool:
        return self._launched == len(self._plan.buckets)

    def _launch_full(self) -> None:
        """Launch full buckets. This method runs in a hook, so unlike `step_ends` it never raises an interruption."""
        world = lifecycle.current()
        before = [each for each in self.shards.turn_of(self) if isinstance(each, ShardReducer)]
        if (
            world.broken
            or self._agreed != world.generation
            or not all(each.all_launched for each in before)
        ):
            return
        try:
            while not self.all_launched and self._plan.buckets[self._launched].missing == 0:
                self._launch_next(world)
        except (CollectiveFailed, Interrupted) as failure:
            world.mark_broken(world.generation, str(failure))

    def _launch_next(self, world: Context) -> None:
        bucket = self._plan.buckets[self._launched]
        failpoint("bucket")
        moved_tensors.took_elements(bucket.elements)
        bucket.work = self._launch(world, bucket)
        self._launched += 1

    def _launch(self, world: Context, bucket: ShardBucket) -> Work:
        step = self._step
        assert step is not None
        group = world.group(PURPOSE, bucket.device)
        target, elements = bucket.sent[0], bucket.sent_elements
        divisor = 1 if bucket.compressed else self._divisor
        if not self.shards.exact:
            if not step.merges:
                target.zero_()
            return group.allreduce(target, Op.SUM, divisor=divisor)
        if len(step.held) == 1:
            # In a world of one rank, this is already the complete sum (see `_divisor_of_root`).
            return group.barrier()
        if self._in_memory and isinstance(group, SumsTrees):
            return group.reduce_tree(bucket.sent, elements, self._program, divisor)
        counts = [len(nodes) for nodes in step.partials]
        return PartialsExchange(group, list(bucket.sent), elements, self._program, counts, divisor)

    def _agree(self, world: Context) -> None:
        """Compare plans, and check whether all buckets are in shared memory.

        All ranks must call this method.

        Raises:
            StateMismatch: ranks have different parameters or shards.
        """
        group = world.group(PURPOSE, self._plan.buckets[0].device)
        if group.size > 1:
            found = self._of_all(group, _digest(self._lines()), _digest(self.shards.arithmetic))
            differs = [rank for rank, row in enumerate(found) if row[0] != found[0][0]]
            if differs:
                error = StateMismatch(
                    f"the optimizers of rank 0 and rank {differs[0]} have different parameters or Shards: pass"
                    " DistributedOptimizer the same ones, in the same order, on every rank"
                )
                raise_together.raise_together(group, error)
            others = [str(rank) for rank, row in enumerate(found) if row[1] != found[0][1]]
            if others:
                self._computes_differently(world, group, f"rank {', '.join(others)}")
            self._share_order(group)
            shared = all(bucket.shared for bucket in self._plan.buckets)
            self._in_memory = all(row[0] for row in self._of_all(group, int(shared)))
        self._agreed = world.generation

    def _lines(self) -> list[str]:
        names = {id(each): self._parameters.name(each) for each in self._parameters.all()}
        return [*self.shards.layout, f"divisor {self._divisor}", *self._plan.lines(names)]

    def _of_all(self, group: Collectives, *own: int) -> list[list[int]]:
        row = torch.tensor(own, dtype=torch.int64, device=self._plan.buckets[0].device)
        rows = [torch.empty_like(row) for _ in range(group.size)]
        group.allgather(rows, row).wait()
        return [each.tolist() for each in rows]

    def _share_order(self, group: Collectives) -> None:
        """Adopt the order of gradients of rank 0, which always has a shard.

        All ranks must call this method.
        """
        order = torch.tensor(
            self._plan.own_order(self._ready),
            dtype=torch.int64,
            device=self._plan.buckets[0].device,
        )
        group.broadcast(order, 0).wait()
        self._plan.take_order(tuple(order.tolist()))

    def _computes_differently(self, world: Context, group: Collectives, ranks: str) -> None:
        differs = f"{ranks}: number of threads, CPU instructions or library versions differ from those of rank 0"
        if not world.env.allow_inexact:
            error = StateMismatch(
                f"{differs}; this is rank {world.place.rank}: {', '.join(self.shards.arithmetic[:6])}. Make them"
                " the same, set ELASTIC_ALLOW_INEXACT=1, or pass exact=False to Shards"
            )
            raise_together.raise_together(group, error)
        if world.place.rank == 0:
            self.shards.computes_differently(differs)
        elif self.shards.inexact_since is None:
            self.shards.inexact_since = self.shards.step


def _largest(extremes: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute value: infinity for NaN, 0.0 without values.

    This function synchronizes once with a GPU.
    """
    if extremes and extremes[0].is_cuda:
        devices = {each.device for each in extremes}
        found = [
            torch.stack([e.double() for e in extremes if e.device == d]).cpu() for d in devices
        ]
        values = torch.cat(found).tolist()
    else:
        values = [float(each) for each in extremes]
    return max((math.inf if math.isnan(each) else abs(each) for each in values), default=0.0)


def _digest_of(found: dict[str, int]) -> int:
    return _digest([f"{name} {value}" for name, value in sorted(found.items())])


def _digest(lines: list[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest(), "big")
