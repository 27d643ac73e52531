"""ZeRO-1 for `DistributedOptimizer`: each rank steps its part of every parameter and receives the other parts.

Gradients are reduced as usual. The elements of each flattened parameter are divided among the shards like the rows in
`elastic.sharding.row_layout`. ``optimizer.state`` is keyed by whole parameter and contains the entries of this rank's
elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic.collectives.interface import Collectives
from elastic.errors import Fixed, Invalid, NotElastic, NotPicklable
from elastic.failpoints import failpoint
from elastic.optimizer.wrapped_optimizer import WrappedOptimizer
from elastic.optimizer.zero1_gathers import Slice, gathers
from elastic.runtime import lifecycle
from elastic.sharding.row_layout import owners, rows_of

# names of torch optimizers that update each element independently of the others
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
# state entries that belong to a whole parameter rather than to its elements
NUMBERS = ("step", "eta", "mu", "mu_product")
GATHERED_BYTES = 4 << 20  # maximum number of bytes that a rank contributes to one gather


def check(optimizer: torch.optim.Optimizer) -> None:
    """Raise Invalid unless the optimizer updates each element of a parameter independently of the others."""
    kind = type(optimizer)
    if kind not in [getattr(torch.optim, name) for name in ELEMENTWISE]:
        raise Invalid(
            f"zero=1 does not support {kind.__module__}.{kind.__name__}, because it may not update each element"
            f" independently: use one of torch.optim's {', '.join(ELEMENTWISE)}, or omit zero"
        )
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if not parameter.is_contiguous():
                raise Invalid(
                    f"zero=1 requires contiguous parameters, but parameter {index} of group {number} has strides"
                    f" {tuple(parameter.stride())}: omit memory_format or zero"
                )


def whole_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the whole parameters of all parameter groups.

    During a step of a `DividedOptimizer`, ``param_groups`` contains only this rank's parts.
    """
    if isinstance(optimizer, DividedOptimizer) and optimizer.stepped:
        return list(optimizer.stepped)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class DividedOptimizer(WrappedOptimizer):
    """Optimizer that `DistributedOptimizer` returns with ``zero=1``.

    Args:
        zero_order: rank that holds each shard, in shard order.
    """

    zero_order: tuple[int, ...]
    # whole parameters of all groups; set only during a step
    stepped: Sequence[torch.Tensor] = ()
    _gather_memory: dict[tuple[Any, ...], torch.Tensor]  # buffers for gathers, keyed by layout

    def divide(self, order: Sequence[int]) -> None:
        """Divide the parameters among the ranks of a new world.

        This method does not change the state entries, which still belong to this rank's previous shard.
        """
        self.zero_order = tuple(order)
        self._gather_memory = {}

    def take_own_entries(self) -> None:
        """Keep only this rank's elements of the state entries of whole parameters.

        The entries are those of a plain optimizer's ``state_dict()``.
        """
        for parameter, entries in self.state.items():
            own = rows_of(parameter.numel(), self._shard(), len(self.zero_order))
            for key, entry in entries.items():
                if (
                    isinstance(entry, torch.Tensor)
                    and entry.shape == parameter.shape
                    and key not in NUMBERS
                ):
                    entries[key] = entry.reshape(-1)[own.begin : own.end].clone()

    def state_dict(self) -> dict[str, Any]:
        """Raise Invalid, because each rank has only a part of the state."""
        raise Invalid(
            "state_dict() is not available with zero=1, because each rank holds only a part of the optimizer's"
            " state: pass the optimizer to elastic.TorchState, which commits all parts"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the complete ``state_dict()`` of a plain optimizer and keep this rank's part."""
        super().load_state_dict(state_dict)
        self.take_own_entries()

    def __reduce__(self) -> tuple[Any, ...]:
        raise NotPicklable(
            f"a {type(self).__name__} with zero=1 can't be copied or pickled, because each rank holds only a"
            " part of its state: copy the optimizer before you wrap it"
        )

    def _apply_gradients(
        self, step: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        size = lifecycle.current().place.size
        if size != len(self.zero_order):
            raise NotElastic(
                f"this optimizer (zero=1) is divided among {len(self.zero_order)} workers, but the world now has"
                f" {size} workers: pass the optimizer to elastic.TorchState together with its model",
                Fixed.OPTIMIZER,
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        wholes = [list(group["params"]) for group in self.param_groups]
        everything = [parameter for group in wholes for parameter in group]
        entries = self.state
        parts = [[self._part(parameter) for parameter in group] for group in wholes]
        kept: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for whole, part in zip(everything, [p for group in parts for p in group], strict=True):
            if whole in entries:
                kept[part] = entries[whole]
        try:
            self.stepped = everything
            for group, some in zip(self.param_groups, parts, strict=True):
                group["params"] = some
            self.state = kept
            step()
        finally:
            for group, some in zip(self.param_groups, wholes, strict=True):
                group["params"] = some
            self.state = entries
            self.stepped = ()
        for whole, part in zip(everything, [p for group in parts for p in group], strict=True):
            if kept.get(part):
                entries[whole] = kept[part]
        failpoint("zero-gather")
        self._gather([each for each in everything if each.requires_grad])
        return loss

    def _shard(self) -> int:
        return owners(self.zero_order)[lifecycle.current().place.rank]

    def _part(self, parameter: torch.Tensor) -> torch.Tensor:
        own = rows_of(parameter.numel(), self._shard(), len(self.zero_order))
        part = parameter.detach().view(-1)[own.begin : own.end]
        gradient = parameter.grad
        if gradient is not None:
            if gradient.is_sparse:
                raise Invalid(
                    "zero=1 requires dense gradients, but a parameter has a sparse gradient: pass sparse=False to"
                    " its Embedding, or omit zero"
                )
            part.grad = gradient.detach().reshape(-1)[own.begin : own.end]
        return part

    def _gather(self, parameters: list[torch.Tensor]) -> None:
        """Gather, into the parameters, the elements that other ranks have updated.

        All ranks must call this method.

        Raises:
            PeerLost: a rank was lost.
        """
        rt = lifecycle.current()
        if rt.place.size == 1 or not parameters:
            return
        with rt.guard("gather of the parameters"), torch.no_grad():
            kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for parameter in parameters:
                flat = parameter.detach().view(-1)
                kinds.setdefault((flat.device, flat.dtype), []).append(flat)
            for (device, dtype), flats in kinds.items():
                group = rt.group("parameters", device)
                limit = max(1, GATHERED_BYTES // dtype.itemsize)
                for slices in gathers(tuple(map(len, flats)), group.size, limit):
                    self._gather_slices(group, flats, slices)

    def _gather_slices(
        self, group: Collectives, flats: list[torch.Tensor], slices: list[Slice]
    ) -> None:
        shards = len(self.zero_order)
        sizes = [each.end - each.begin for each in slices]
        kind = flats[0].device, flats[0].dtype
        memory = self._gather_memory.get(kind)
        if memory is None or memory.shape[1] < sum(sizes):
            memory = self._gather_memory[kind] = flats[0].new_zeros((shards + 1, sum(sizes)))
        buffer = [row[: sum(sizes)] for row in memory]

        def views(
            shard: int, received: torch.Tensor
        ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            """Return two lists of views: of the parameters, and of the data received for them from a shard's rank."""
            ours, theirs = [], []
            for each, room in zip(slices, received.split(sizes), strict=True):
                rows = each.of(shard, len(flats[each.parameter]), shards)
                if len(rows):
                    ours.append(flats[each.parameter][rows.begin : rows.end])
                    theirs.append(room[: len(rows)])
            return ours, theirs

        mine = buffer.pop()
        stepped, room = views(self._shard(), mine)
        if stepped:
            torch._foreach_copy_(room, stepped)
        group.allgather(buffer, mine).wait()
        for shard, rank in enumerate(self.zero_order):
            if rank != group.rank:
                stale, fresh = views(shard, buffer[rank])
                if stale:
                    torch._foreach_copy_(stale, fresh)
