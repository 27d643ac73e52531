"""Collectives and messages of a ``torch.distributed.ProcessGroup``, with torch's signatures.

torch's Python functions call these methods directly. torch's C++ code (DDP's reducer, functional collectives) calls the
methods through a trampoline. `collective_calls` implements them, and `following_group` issues the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from elastic.collectives.interface import MAX_TAG, Collectives
from elastic.errors import Invalid
from elastic.runtime import lifecycle
from elastic.torch_backend import collective_calls, reductions
from elastic.torch_backend.collective_calls import CollectiveCall
from elastic.torch_backend.compile_exclusion import keep_out
from elastic.torch_backend.following_group import FollowingGroup
from elastic.torch_backend.works import ElasticFuture, ElasticWork, Futures


class ElasticProcessGroup(FollowingGroup):
    """Process group of the backend ``elastic``. See `FollowingGroup` for its arguments."""

    # ---- broadcasts and gathers ----------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: int | None = None) -> ElasticWork:
        tensors = _listed(tensors)
        root = (0 if opts is None else opts.rootRank) if root is None else root

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.broadcast(group, tensors, root)

        return self.call("broadcast", tensors[0], begin, tensors, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> ElasticWork:
        root = opts.rootRank
        lists = inputs[0] if self.getRank() == root else None
        self._fits("scatter", lists, outputs[0])

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.scatter(group, outputs[0], lists, root)

        return self.call("scatter", outputs[0], begin, list(outputs), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> ElasticWork:
        root = opts.rootRank
        lists = outputs[0] if self.getRank() == root else None
        self._fits("gather", lists, inputs[0])

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.gather(group, lists, inputs[0], root)

        return self.call("gather", inputs[0], begin, list(lists or ()), opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> ElasticWork:
        inputs = _listed(inputs)
        outputs = [outputs] if isinstance(outputs[0], torch.Tensor) else outputs
        for lists, tensor in zip(outputs, inputs, strict=True):
            self._fits("allgather", lists, tensor)

        def begin(group: Collectives) -> CollectiveCall:
            begun = CollectiveCall()
            for lists, tensor in zip(outputs, inputs, strict=True):
                begun.add(collective_calls.allgather(group, lists, tensor))
            return begun

        results = [each for lists in outputs for each in lists]
        return self.call("allgather", inputs[0], begin, results, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> ElasticWork:
        """Gather tensor ``i`` of each rank into ``outputs[rank][i]``."""
        by_tensor = [list(each) for each in zip(*outputs, strict=True)]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> ElasticWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> ElasticWork:
        size = self.getSize()
        for output, tensor in zip(outputs, inputs, strict=True):
            _same_kind("all_gather_into_tensor", output, tensor)
            if output.numel() != size * tensor.numel():
                raise ValueError(
                    f"the output of all_gather_into_tensor has {output.numel()} elements, but {size} ranks with"
                    f" {tensor.numel()} elements each need {size * tensor.numel()}: pass an output of this size"
                )

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.allgather_into(group, outputs, inputs)

        return self.call("all_gather_into_tensor", inputs[0], begin, list(outputs), opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # ---- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> ElasticWork:
        tensors = _listed(tensors)
        reduction = reductions.read(getattr(opts, "reduceOp", opts)) if opts else reductions.SUM

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.allreduce(group, tensors, reduction)

        return self.call("allreduce", tensors[0], begin, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> ElasticWork:
        tensors = _listed(tensors)
        reduction = reductions.read(opts.reduceOp)

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.reduce(group, tensors[0], opts.rootRank, reduction)

        return self.call("reduce", tensors[0], begin, tensors, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> ElasticWork:
        for output, lists in zip(outputs, inputs, strict=True):
            self._fits("reduce_scatter", lists, output)
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> ElasticWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> ElasticWork:
        size = self.getSize()
        for output, tensor in zip(outputs, inputs, strict=True):
            _same_kind("reduce_scatter_tensor", output, tensor)
            if tensor.numel() != size * output.numel():
                raise ValueError(
                    f"the input of reduce_scatter_tensor has {tensor.numel()} elements, but {size} ranks that receive"
                    f" {output.numel()} elements each need {size * output.numel()}: pass an input of this size"
                )
        return self._reduce_scatter("reduce_scatter_tensor", outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, name: str, outputs: Any, inputs: Any, opts: Any) -> ElasticWork:
        reduction = reductions.SUM if opts is None else reductions.read(opts.reduceOp)

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.reduce_scatter(group, outputs, inputs, reduction)

        return self.call(name, outputs[0], begin, list(outputs), opts)

    # ---- all-to-all exchanges ------------------------------------------------------------------------------------

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> ElasticWork:
        if not len(outputs) == len(inputs) == self.getSize():
            raise ValueError(
                f"all_to_all got {len(inputs)} input and {len(outputs)} output tensors: pass one of each for each of"
                f" the {self.getSize()} ranks"
            )

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.alltoall(group, outputs, inputs)

        return self.call("all_to_all", inputs[0], begin, list(outputs), opts)

    def all_to_all_single(
        self, output: Any, tensor: Any, received: Any, sent: Any, opts: Any = None
    ) -> ElasticWork:
        _same_kind("all_to_all_single", output, tensor)

        def begin(group: Collectives) -> CollectiveCall:
            return collective_calls.alltoall_rows(group, output, tensor, received, sent)

        return self.call("all_to_all_single", tensor, begin, [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> ElasticWork:
        return self.call("barrier", _device(opts), collective_calls.barrier, [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Barrier at which rank 0 names the ranks that did not arrive. Raises the errors of `ElasticWork.wait`."""
        rt = lifecycle.current()
        if rt.provisional or self.getSize() == 1:
            self.barrier().wait(timeout)
            return
        limit_s = self.timeout_s if timeout is None else timeout.total_seconds()
        with rt.guard("monitored_barrier"):
            self.messages.monitored_barrier(
                rt, rt.env.collective_timeout_s if limit_s is None else limit_s, wait_all_ranks
            )

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> ElasticWork:
        (tensor,) = _listed(tensors)
        _check_tag("send", tag)
        rt = self.with_others("send")
        with rt.guard("send"):
            begun = self.messages.send(rt, tensor, to, tag)
        return self.under_way("send", begun, [tensor])

    def recv(self, tensors: Any, source: int | None, tag: int = 0) -> ElasticWork:
        (tensor,) = _listed(tensors)
        _check_tag("recv", tag)
        rt = self.with_others("recv")
        with rt.guard("recv"):
            begun, message = self.messages.receive(rt, tensor, source, tag)
        work = self.under_way("recv", begun, [tensor])
        work.message = message
        return work

    def recv_anysource(self, tensors: Any, tag: int = 0) -> ElasticWork:
        return self.recv(tensors, None, tag)

    def _fits(self, name: str, lists: Sequence[torch.Tensor] | None, one: torch.Tensor) -> None:
        if lists is None:
            return
        if len(lists) != self.getSize():
            raise ValueError(
                f"{name} got a list of {len(lists)} tensors: pass {self.getSize()} tensors, one for each rank of the"
                " group"
            )
        for each in lists:
            _same_kind(name, each, one)
            if each.numel() != one.numel():
                raise ValueError(
                    f"{name}: tensors of {list(each.shape)} and {list(one.shape)} have different numbers of"
                    " elements: pass tensors of equal sizes, or use all_to_all_single with split "
                    "sizes"
                )


def _listed(tensors: Any) -> list[torch.Tensor]:
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if not found:
        raise Invalid("a collective got an empty list: pass at least one tensor")
    return found


def _check_tag(name: str, tag: int) -> None:
    if not 0 <= tag <= MAX_TAG:
        raise Invalid(f"{name} was called with tag {tag}: pass a tag from 0 to {MAX_TAG}")


def _device(opts: Any) -> torch.device:
    device = getattr(opts, "device", None)
    return torch.device("cpu") if device is None else torch.device(device)


def _same_kind(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype is not other.dtype or one.device.type != other.device.type:
        raise ValueError(
            f"{name}: a tensor of {one.dtype} on {one.device} and one of {other.dtype} on {other.device}: pass tensors"
            " of one dtype on one device"
        )


# Aliases that torch's own code uses.
for _theirs, _ours in {
    "_allgather_base": ElasticProcessGroup.all_gather_single,
    "_reduce_scatter_base": ElasticProcessGroup.reduce_scatter_single,
}.items():
    setattr(ElasticProcessGroup, _theirs, _ours)

keep_out(FollowingGroup, ElasticProcessGroup, ElasticWork, ElasticFuture, Futures)
