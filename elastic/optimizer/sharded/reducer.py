"""Decides when the gradients of a step's shards are summed: bucket by bucket while the last shard's backward runs.

Gradients of a shard go into their buckets as they come (`buckets`), where they are added to those of the shards before,
along the tree. In a rank's last shard a bucket that is full is launched, in the order of the plan. The loop over the
shards ends when all have arrived: from there on every gradient is the mean over all shards, on every rank, and spares
have it, too.

The first step of a world launches nothing before its loop ends: there the ranks compare their plans, and take over the
order in which rank 0 saw backward make gradients, in its last shard, or had learned before. Buckets are cut along it,
so that the first ones are full early. Sums don't depend on that: each element is added up by itself.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping

import torch

from elastic.api.compression import Compression
from elastic.collectives import agreement
from elastic.collectives.interface import Collectives, Op, Work
from elastic.collectives.local import LocalCollectives
from elastic.collectives.shared_memory.process_group import SharedCollectives
from elastic.context import Context
from elastic.errors import CollectiveFailed, Interrupted, Invalid, StateMismatch
from elastic.exact import tree
from elastic.exact.shards import Shards
from elastic.exact.step import ShardStep
from elastic.failpoints import failpoint
from elastic.monitoring import moved_tensors
from elastic.optimizer import bucket_plan, malloc_tuning
from elastic.optimizer.flat_buckets import Compressor
from elastic.optimizer.gradients.gradient_hooks import GradientHooks, OptimizerParameters
from elastic.optimizer.sharded.buckets import ShardBucket
from elastic.optimizer.sharded.exchange import PartialsExchange
from elastic.optimizer.sharded.plan import ShardPlan, ShardSlot
from elastic.protocol.messages import GRADIENTS
from elastic.runtime import lifecycle
from elastic.state.snapshots import digest

PURPOSE = f"{GRADIENTS} of shards"


class ShardReducer:
    """Of one optimizer. ``passes``: backward passes of each shard. ``op``: AVERAGE over shards, or SUM.
    ``compression``: one of ours, which only changes the dtype.
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
        self._lock = threading.Lock()  # each device has its own backward thread
        self._plan = ShardPlan(compression)
        self._ready: list[int] = []  # what has a gradient in the last shard, in that order
        self._step: ShardStep | None = None
        self._program: tree.Program = ()
        self._complete: dict[int, bool] = {}  # shards of this rank: whether they complete a partial
        self._shard: tree.Merge | None = None
        self._last = False
        self._agreed: int | None = None  # the generation whose ranks have compared this plan
        self._in_memory = False  # ... and can all reach each other's buckets
        self._launched = 0
        self._stale: list[Work] = []
        self._keeps = False  # gradients of the present shard wait for others, as they are
        self._storages: set[int] = set()  # ... and have these
        self._noting = False  # digests of gradients are asked for
        shards.listen(self, trains=optimizer)

    @classmethod
    def of(
        cls, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], shards: Shards
    ) -> ShardReducer:
        """For a loop that lets ``optimizer`` step as it is: averages, one backward pass a shard. Raises Invalid."""
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

    # ---- what an optimizer asks ----------------------------------------------------------------------------------

    @property
    def passes(self) -> int:
        return self._passes

    @property
    def order(self) -> tuple[int, ...] | None:
        """Of the parameters that are trained, as ranks have agreed on it; None as long as they have not."""
        return self._plan.order

    @property
    def launched(self) -> int:
        """Buckets of the present step that travel."""
        return self._launched

    @property
    def pending(self) -> bool:
        """Whether a step's loop is under way."""
        return self._step is not None and self.shards.present is not None

    def set_passes(self, passes: int) -> None:
        self._passes = passes

    def install_hooks(self) -> None:
        self._hooks.install(self._parameters.all())

    def finish(self) -> None:
        """Gradients are the mean since the loop over the shards ended. Raises Invalid before that."""
        if self.pending:
            raise Invalid(
                "optimizer.step() or synchronize() was called within the loop over the shards of step"
                f" {self.shards.step}, which has no gradient before all of them are computed: call it after the"
                " loop"
            )

    def discard(self) -> None:
        """Abandon the present step."""
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
                bucket.make(bucket.depth)  # somebody may still write into the memory of before
        self._stale = []
        depth = max(1, len(step.partials[step.rank])) if self.shards.exact else 1
        for bucket in self._plan.buckets:
            if bucket.depth < depth:
                bucket.make(depth)
            bucket.step_begins()
        if self._step is None or self._step.held is not step.held:
            self._program = tree.program(step.partials, self.shards.count)
            complete = tree.completes(step.merges)
            self._complete = {
                each.shard: done for each, done in zip(step.merges, complete, strict=True)
            }
        self._step, self._launched, self._shard, self._last = step, 0, None, False
        self._ready.clear()

    def shard_begins(self, merge: tree.Merge, last: bool) -> None:
        if not self.shards.exact:  # one after the other, to what there is
            before = int(self._shard is not None)
            merge = tree.Merge(merge.shard, before, before)
        complete = self._complete[merge.shard] if self.shards.exact else last
        self._shard, self._last = merge, last
        self._keeps = merge.merges == 0 and not complete
        self._storages.clear()
        for slot in self._plan.slots.values():
            slot.passes_left = self._passes
        for bucket in self._plan.buckets:
            bucket.shard_begins(merge, complete, last, self._divisor_of_root(bucket))

    def _divisor_of_root(self, bucket: ShardBucket) -> int:
        """By which the partial is divided where it is made: on the only rank of a world it is the root."""
        alone = self._step is not None and len(self._step.held) == 1
        return self._divisor if alone and self.shards.exact and not bucket.compressed else 1

    @torch.no_grad()
    def on_gradient(self, parameter: torch.Tensor) -> None:
        """``parameter.grad`` has received one backward pass."""
        with self._lock:
            self._receive(parameter)

    def _receive(self, parameter: torch.Tensor) -> None:
        slot = self._plan.slots.get(id(parameter))
        if slot is None or self._shard is None or not self.pending:
            raise Invalid(
                f"{self._parameters.name(parameter)} received a gradient outside the loop over the shards: call"
                " backward() within `for batch in shards.over(loader)`, and freeze or add parameters between two"
                " steps"
            )
        if slot.passes_left == 0:
            raise Invalid(
                f"{self._parameters.name(parameter)} received more than backward_passes_per_step={self._passes}"
                f" gradients in shard {self._shard.shard}: set it to the number of backward passes of a shard"
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
                    f"the gradient of {self._parameters.name(parameter)} is sparse, and shards can't sum it in a"
                    " fixed order: pass sparse_as_dense=True to DistributedOptimizer"
                )
            parameter.grad = gradient = gradient.to_dense()
        if self._noting and gradient is not None:
            self._note(self._parameters.name(parameter), gradient)
        if gradient is not None and self._keeps:
            storage = gradient.untyped_storage().data_ptr()
            if storage in self._storages:
                # Backward gives one piece of memory to parameters whose views were added up, and others are to be
                # added to each of them. torch's own accumulation gets such sums wrong.
                parameter.grad = gradient.clone()
            self._storages.add(storage)
        slot.bucket.take(slot.position)

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        assert self._shard is not None
        found = digest.digest([(name, gradient.detach().cpu())])
        self.shards.gradients[f"{self._shard.shard} {name}"] = found

    @torch.no_grad()
    def shard_ends(self, shard: int) -> None:
        """Parameters without a gradient, or with fewer passes than others, have what they have."""
        for slot in self._plan.slots.values():
            if slot.passes_left:
                slot.passes_left = 0
                self._take(slot)

    @torch.no_grad()
    def step_ends(self) -> None:
        """Raises PeerLost, StateMismatch, Invalid."""
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
                # Each waits for its first half, and starts the second, before any is waited for to its end.
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
        for bucket in self._plan.buckets:
            bucket.drop()
            if bucket.work is not None:
                self._stale.append(bucket.work)
                bucket.work = None
        self._step = self._shard = None
        self._launched = 0

    # ---- launching -----------------------------------------------------------------------------------------------

    @property
    def all_launched(self) -> bool:
        return self._launched == len(self._plan.buckets)

    def _launch_full(self) -> None:
        """In a hook, which never raises an interruption: `step_ends` does."""
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
        target = bucket.flat[0]
        divisor = 1 if bucket.compressed else self._divisor
        if not self.shards.exact:
            if not step.merges:
                target.zero_()
            return group.allreduce(target, Op.SUM, divisor=divisor)
        if len(step.held) == 1:
            return group.barrier()  # the root is there; see `_divisor_of_root`
        if self._in_memory and isinstance(group, SharedCollectives):
            return group.reduce_tree(bucket.places, bucket.elements, self._program, divisor)
        counts = [len(nodes) for nodes in step.partials]
        return PartialsExchange(group, bucket.flat, bucket.elements, self._program, counts, divisor)

    def _agree(self, world: Context) -> None:
        """Compare plans, and where they lie. Collective. Raises StateMismatch."""
        group = world.group(PURPOSE, self._plan.buckets[0].device)
        if not isinstance(group, LocalCollectives):
            found = self._of_all(group, _digest(self._lines()), _digest(self.shards.arithmetic))
            differs = [rank for rank, row in enumerate(found) if row[0] != found[0][0]]
            if differs:
                error = StateMismatch(
                    f"the optimizers of rank 0 and rank {differs[0]} have other parameters or Shards: pass"
                    " DistributedOptimizer the same ones, in the same order, on every rank"
                )
                agreement.raise_together(group, error)
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
        """These numbers of every rank."""
        row = torch.tensor(own, dtype=torch.int64, device=self._plan.buckets[0].device)
        rows = [torch.empty_like(row) for _ in range(group.size)]
        group.allgather(rows, row).wait()
        return [each.tolist() for each in rows]

    def _share_order(self, group: Collectives) -> None:
        """All take the order of rank 0, which always has a shard."""
        order = torch.tensor(
            self._plan.own_order(self._ready),
            dtype=torch.int64,
            device=self._plan.buckets[0].device,
        )
        group.broadcast(order, 0).wait()
        self._plan.take_order(tuple(order.tolist()))

    def _computes_differently(self, world: Context, group: Collectives, who: str) -> None:
        """Where a driver compares, only those come here that were let in."""
        differs = f"{who} computes differently from rank 0: other threads, instructions or versions"
        if not world.env.allow_inexact:
            error = StateMismatch(
                f"{differs}; this is rank {world.place.rank}: {', '.join(self.shards.arithmetic[:6])}. Make them"
                " the same, set ELASTIC_ALLOW_INEXACT=1, or pass exact=False to Shards"
            )
            agreement.raise_together(group, error)
        if world.place.rank == 0:
            self.shards.computes_differently(differs)
        elif self.shards.inexact_since is None:
            self.shards.inexact_since = self.shards.step


def _digest(lines: list[str]) -> int:
    """56 bits."""
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest(), "big")
