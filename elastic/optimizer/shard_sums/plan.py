"""Buckets of an optimizer's gradients that are summed over shards, and the slots that assign parameters to them.

`gradients/bucket_plan.py` assigns gradients to buckets by size and by the order in which they become ready. This module
creates the buffers and assigns a slot to each trained parameter. Sums are elementwise, so their results do not depend
on the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic.optimizer.gradients import bucket_plan, malloc_tuning
from elastic.optimizer.gradients.flat_buckets import Compressor
from elastic.optimizer.shard_sums.buckets import ShardBucket


class ShardSlot:
    """Place of a trained parameter in a bucket, with its number of remaining backward passes in the current shard."""

    __slots__ = ("bucket", "number", "passes_left", "position")

    def __init__(self, number: int, bucket: ShardBucket, position: int) -> None:
        self.number = number  # index of the parameter among the trained parameters
        self.bucket = bucket
        self.position = position
        self.passes_left = 0


class ShardPlan:
    """Buckets and slots of one optimizer.

    Attributes:
        slots: slots, keyed by the parameter's ID.
        order: order of the parameters on which the ranks have agreed, or None.
    """

    def __init__(self, compression: Compressor) -> None:
        self.slots: dict[int, ShardSlot] = {}
        self.buckets: list[ShardBucket] = []
        self.order: tuple[int, ...] | None = None
        self._compression = compression
        self._trained: Sequence[torch.Tensor] = []
        self._signature: list[tuple[object, ...]] = []
        self._full_bytes = bucket_plan.FULL_BYTES
        self._in_memory: list[int] = []  # size in bytes of each gradient

    def train(self, parameters: Sequence[torch.Tensor], full_bytes: int) -> bool:
        """Create buckets for these parameters. Return whether the set of trained parameters has changed."""
        signature: list[tuple[object, ...]] = [
            (id(each), each.dtype, each.device, each.shape, each.stride()) for each in parameters
        ]
        if signature == self._signature:
            return False
        self._signature, self._trained = signature, parameters
        self.order, self._full_bytes = None, full_bytes
        self._in_memory = [each.nbytes for each in parameters if each.device.type == "cpu"]
        self._arrange()
        return True

    def keep_memory(self, waiting: int) -> None:
        """Tune malloc for steps in which ``waiting`` gradients of each parameter exist at the same time."""
        memory = malloc_tuning.of_process()
        memory.keep(max(self._in_memory, default=0), max(1, waiting) * sum(self._in_memory))

    def own_order(self, ready: Sequence[int]) -> tuple[int, ...]:
        """Return the order of gradients that this rank proposes.

        This is the agreed order, or else the order observed in this step.
        """
        count = len(self._trained)
        return (
            self.order or bucket_plan.seen_order(ready, count) or bucket_plan.expected_order(count)
        )

    def take_order(self, order: tuple[int, ...]) -> None:
        """Set the agreed order.

        If it differs from the previous one, move the gradients of the current step to new buckets.
        """
        if order == self.order:
            return
        self.order, before = order, self.slots
        self._arrange()
        for key, slot in self.slots.items():
            partials = before[key].bucket.values(before[key].position)
            if slot.bucket.depth < len(partials):
                slot.bucket.make(len(partials))
            places = slot.bucket.values(slot.position)
            torch._foreach_copy_(places[: len(partials)], partials)

    def lines(self, name_of: dict[int, str]) -> list[str]:
        """Return the lines of settings that must be equal on all ranks.

        Args:
            name_of: parameter names, keyed by the parameter's ID.
        """
        described = [
            f"{name_of[id(each)]} {each.dtype} as {self._sent_dtype(each)} {list(each.shape)}"
            for each in self._trained
        ]
        return [f"buckets of {self._full_bytes}", *described]

    def _arrange(self) -> None:
        self.slots, self.buckets = {}, []
        sent = [self._sent_dtype(each) for each in self._trained]
        items = [
            bucket_plan.Gradient(
                f"{each.dtype} as {dtype} on {each.device}", each.numel(), dtype.itemsize
            )
            for each, dtype in zip(self._trained, sent, strict=True)
        ]
        first = min(bucket_plan.FIRST_BYTES, self._full_bytes)
        for planned in bucket_plan.plan(
            items, order=self.order, first_bytes=first, full_bytes=self._full_bytes
        ):
            parameters = [self._trained[member] for member in planned.members]
            dtype = sent[planned.members[0]]
            bucket = ShardBucket(parameters, planned.offsets, planned.elements, dtype)
            self.buckets.append(bucket)
            for position, member in enumerate(planned.members):
                self.slots[id(parameters[position])] = ShardSlot(member, bucket, position)

    def _sent_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return self._compression.compress(parameter.new_empty(0))[0].dtype
