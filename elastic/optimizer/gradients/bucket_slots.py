"""Buckets of an optimizer's gradients, and the slots that assign parameters to them.

`bucket_plan` assigns gradients to buckets by size, and the ranks agree on its input (see `plan_agreement`). This module
creates the buffers and assigns a slot to each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elastic.collectives.algorithms import sparse as sparse_gradients
from elastic.collectives.interface import Collectives
from elastic.optimizer.gradients import bucket_plan, malloc_tuning, plan_agreement
from elastic.optimizer.gradients.flat_buckets import (
    CompressedGradient,
    FlagBucket,
    FlatBucket,
    GradientBucket,
)
from elastic.optimizer.gradients.gradient_options import Options


class Slot:
    """Place of one trainable parameter in the plan, with the progress of its gradient in the current step."""

    __slots__ = ("bucket", "filled", "name", "number", "parameter", "passes_left", "position")

    def __init__(self, number: int, name: str, parameter: torch.Tensor) -> None:
        self.number = number
        self.name = name
        self.parameter = parameter
        self.passes_left = 0
        self.filled = False  # whether the gradient was copied into the bucket
        # None for a sparse gradient, or until the buckets are arranged
        self.bucket: GradientBucket | None = None
        self.position = 0  # index of the slot in the bucket


class GradientPlan:
    """Plan for a fixed list of named parameters: a slot for each trained parameter and, once arranged, the buckets.

    Initially, the trained parameters are those that require a gradient on this rank. Later, they are those that require
    a gradient on any rank.
    """

    def __init__(
        self,
        options: Options,
        named: Sequence[tuple[str, torch.Tensor]],
        fusion_bytes: int | None = None,
    ) -> None:
        self._options = options
        self._fusion_bytes = fusion_bytes
        self._full_at = (0, 0)  # sizes in bytes at which the first bucket, and any other, is closed
        self.named = named
        self._train(tuple(int(parameter.requires_grad) for _, parameter in named))
        self.sparse: dict[int, int] = {}  # number of sparse dimensions, by slot number
        # slot numbers in the agreed order in which gradients become ready; None until agreed
        self.order: tuple[int, ...] | None = None
        self.buckets: list[GradientBucket] = []  # empty until `arrange` is called
        self.rows: list[str] = []  # name of each bucket in the timeline

    @property
    def device(self) -> torch.device:
        return self.named[0][1].device

    def lines(self) -> list[str]:
        """Return the settings that must be equal on all ranks before buckets are arranged, as one line each."""
        return self._options.lines(self.named, self._fusion_bytes)

    def own_order(self, ready: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the order of gradients that this rank proposes.

        This is the agreed order, or else the order observed in this step.
        """
        count = len(self.slots)
        numbers = [self.slot_of[id(each)].number for each in ready if id(each) in self.slot_of]
        return (
            self.order
            or bucket_plan.seen_order(numbers, count)
            or bucket_plan.expected_order(count)
        )

    def train(self, trained: tuple[int, ...]) -> None:
        """Set which parameters are trained: 1 for trained, 0 for others, by parameter.

        If this changes, discard the buckets.
        """
        if trained != self.trained:
            self._train(trained)
            self.sparse, self.order, self.buckets, self.rows = {}, None, [], []

    def _train(self, trained: tuple[int, ...]) -> None:
        self.trained = trained
        chosen = [pair for pair, wanted in zip(self.named, trained, strict=True) if wanted]
        self.slots = [Slot(number, name, each) for number, (name, each) in enumerate(chosen)]
        self.slot_of = {id(slot.parameter): slot for slot in self.slots}

    def arrange(
        self, sparse: dict[int, int], order: tuple[int, ...], full_at: tuple[int, int]
    ) -> None:
        """Create the buckets for these arguments, which are equal on all ranks. Buckets that would not change are kept.

        Args:
            sparse: number of sparse dimensions, by slot number.
            order: slot numbers, in the order in which their gradients become ready.
            full_at: sizes in bytes at which the first bucket, and any other, is closed.
        """
        wanted = sparse, order, full_at
        if not self.buckets or wanted != (self.sparse, self.order, self._full_at):
            self.sparse, self.order, self._full_at = wanted
            self._build()

    def renew(self) -> None:
        """Reallocate the buckets, because abandoned collectives may still write to their current memory."""
        scales = [bucket.scales for bucket in self.buckets]
        self._build()
        for bucket, scale in zip(self.buckets, scales, strict=True):
            bucket.scales = scale

    def layout(self, digest: int, size: int) -> plan_agreement.StepPlan:
        """Return a description of the plan with which a joined rank can take part in steps of ``size`` ranks."""
        assert self.order is not None
        sparse = []
        for number, dims in sorted(self.sparse.items()):
            parameter = self.slots[number].parameter
            dtype, device = str(parameter.dtype).removeprefix("torch."), parameter.device.type
            sparse.append(
                plan_agreement.Sparse(number, tuple(parameter.shape), dims, dtype, device)
            )
        scales = self._options.scales(size, inside=True, wire=torch.float32)
        return plan_agreement.StepPlan(
            digest,
            self.trained,
            int(self._options.wire_op),
            scales.reducing,
            scales.reducing_over,
            self.order,
            tuple(bucket.wire() for bucket in self.buckets),
            tuple(sparse),
        )

    def begin_step(self, passes: int) -> None:
        """Reset the slots and buckets for a step in which every parameter receives ``passes`` gradients."""
        for slot in self.slots:
            slot.passes_left = passes
            slot.filled = False
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    # ---- construction ----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        dense = [slot for slot in self.slots if slot.number not in self.sparse]
        in_memory = [slot.parameter for slot in dense if slot.parameter.device.type == "cpu"]
        sizes = [each.nbytes for each in in_memory]
        malloc_tuning.of_process().keep(max(sizes, default=0), sum(sizes))
        for slot in self.slots:
            slot.bucket = None
        self.buckets, self.rows = [], []
        planned = self._planned(dense)
        if not self._options.casts or not planned:
            self._add(FlagBucket(self.device), [])
        for each in planned:
            slots = [dense[member] for member in each.members]
            self._add(self._bucket(each, [slot.parameter for slot in slots]), slots)

    def _planned(self, dense: Sequence[Slot]) -> list[bucket_plan.Bucket]:
        """Return the buckets for dense slots. Their ``members`` are indices into ``dense``.

        With a user-defined compression, each gradient has its own bucket.
        """
        items = [
            bucket_plan.Gradient(
                f"{slot.parameter.dtype} {slot.parameter.device}",
                slot.parameter.numel(),
                slot.parameter.element_size(),
            )
            for slot in dense
        ]
        order = None
        if self.order is not None:
            index_of = {slot.number: index for index, slot in enumerate(dense)}
            order = [index_of[number] for number in self.order if number in index_of]
        if not self._options.casts:
            return bucket_plan.plan(items, order=order, first_bytes=0, full_bytes=0)
        first_bytes, full_bytes = self._full_at
        groups = self._options.grouped([slot.parameter for slot in dense])
        return bucket_plan.plan(
            items, order=order, groups=groups, first_bytes=first_bytes, full_bytes=full_bytes
        )

    def _bucket(
        self, planned: bucket_plan.Bucket, parameters: Sequence[torch.Tensor]
    ) -> GradientBucket:
        if not self._options.casts:
            return CompressedGradient(parameters[0], self._options.compression)
        return FlatBucket(
            parameters,
            planned.offsets,
            planned.elements,
            self._options.wire_dtype(parameters[0]),
            marked=not self.buckets,
        )

    def _add(self, bucket: GradientBucket, slots: Sequence[Slot]) -> None:
        self.rows.append(_row(len(self.buckets), sorted(slots, key=lambda slot: slot.number)))
        self.buckets.append(bucket)
        for position, slot in enumerate(slots):
            slot.bucket, slot.position = bucket, position

    # ---- sparse gradients ------------------------------------------------------------------------------------------

    def reduce_sparse(self, group_of: Callable[[torch.device], Collectives], divisor: int) -> None:
        """Replace sparse gradients by their sum over all ranks, divided by ``divisor``.

        Raises:
            CollectiveFailed: a rank was lost.
        """
        by_device: dict[torch.device, list[int]] = {}
        for number in sorted(self.sparse):
            by_device.setdefault(self.slots[number].parameter.device, []).append(number)
        for device, numbers in by_device.items():
            gradients = [self._sparse_gradient(number) for number in numbers]
            totals = sparse_gradients.total(group_of(device), gradients, divisor=divisor)
            for number, gradient in zip(numbers, totals, strict=True):
                self.slots[number].parameter.grad = gradient

    def _sparse_gradient(self, number: int) -> torch.Tensor:
        parameter, sparse_dims = self.slots[number].parameter, self.sparse[number]
        if parameter.grad is None:
            return sparse_gradients.empty(parameter, sparse_dims)
        return parameter.grad if parameter.grad.is_sparse else parameter.grad.to_sparse(sparse_dims)


def _row(number: int, slots: Sequence[Slot]) -> str:
    names = [slot.name for slot in slots]
    members = (
        names[0]
        if len(names) == 1
        else f"{names[0]} .. {names[-1]} ({len(names)})"
        if names
        else "none"
    )
    return f"gradients {number}: {members}"
