"""Collectives of a group with several ranks on several hosts: shared memory within a host, Gloo between hosts.

A large allreduce is split into chunks. The ranks of a host reduce a chunk in shared memory, so that each of them owns a
reduced share of it. Each rank reduces its share with the ranks of the same index on the other hosts (an *inter-node
group*), and the ranks of the host read each other's shares. Every byte crosses the network once per host instead of
once per rank, all ranks of a host send in parallel, and some chunks are on the network while other chunks are in
memory. If hosts have different numbers of ranks, one rank per host, the leader, sends the data of all ranks of the
host.

No group contains all ranks: a rank belongs to the group of its host and to its inter-node group, so it needs one
connection per other host instead of one per other rank. A lost rank is detected by the ranks of these two groups. Each
rank that detects the loss aborts both of its groups, which wakes their other ranks. In this way the failure spreads to
every rank.

All ranks get the same bits. float16 and bfloat16 are summed in float32 within a host, rounded once to half precision
for the network, and summed by Gloo in half precision. A half-precision sum is scaled before it crosses the network, so
that it does not overflow. Other sums are scaled afterwards, so that an average is the sum divided by the number of
ranks, as within a host.

This module implements the interface. `steps` executes the collectives in a thread, in the order of the calls.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from elastic.collectives.dtypes_and_ops import check
from elastic.collectives.hierarchical.ordered_executor import OrderedExecutor
from elastic.collectives.hierarchical.part import GroupPart
from elastic.collectives.hierarchical.plan import Topology
from elastic.collectives.hierarchical.steps import Halves, Scale, Steps
from elastic.collectives.interface import Collectives, Op, Work
from elastic.collectives.shared_memory import arena
from elastic.collectives.single_rank import LocalCollectives
from elastic.collectives.torch_group import as_bytes
from elastic.errors import CollectiveFailed
from elastic.rendezvous.store import Store

_CLOSE_S = 0.1  # seconds in which work in flight usually ends after an abort


class Neighbours(Halves, Protocol):
    """Interface of the connected group of this host's ranks."""

    def close_in_forked_child(self) -> None: ...


class InterNodeGroup(Collectives, Protocol):
    """Interface of a group with one rank of each host, before and after it is connected."""

    def connect(self, store: Store, purpose: str, bind_host: str) -> None: ...

    def look(self) -> None:
        """Fail the group if a connection was lost without Gloo waking this rank."""

    def close_in_forked_child(self) -> None: ...


class HierarchicalCollectives:
    """A hierarchical group, as seen by one of its ranks. Call `connect` first.

    Args:
        topology: placement of the ranks.
        host: the group of this host's ranks. May have one rank if hosts have different numbers of ranks.
        inter_node: the ranks of `Topology.inter_node_ranks`, in that order, or None if there are none.
    """

    scales_inside = True

    def __init__(
        self,
        topology: Topology,
        host: Neighbours | LocalCollectives,
        inter_node: InterNodeGroup | None,
    ) -> None:
        assert (inter_node is None) == (not topology.inter_node_ranks)
        assert not (topology.even and isinstance(host, LocalCollectives)), "Gloo alone does it"
        self.rank = topology.rank
        self.size = topology.size
        self._topology = topology
        self._host = host
        self._inter_node = inter_node

        def end_parts() -> None:
            # Ranks that wait in either of the aborted groups wake up and abort their other group, so that all ranks
            # fail.
            host.abort()
            if inter_node is not None:
                inter_node.abort()

        self._order = OrderedExecutor("elastic-hierarchy", end_parts)
        self._steps = Steps(
            topology,
            GroupPart(host),
            None if inter_node is None else GroupPart(inter_node, inter_node.look),
            None if isinstance(host, LocalCollectives) else host,
        )

    def connect(self, store: Store, purpose: str, bind_host: str) -> None:
        """Block until the inter-node group is connected.

        Raises:
            CollectiveFailed: a rank is late or lost, or `abort` was called.
        """
        if self._inter_node is not None:
            self._inter_node.connect(
                store, f"{purpose}, inter-node group {self._topology.inter_node_group}", bind_host
            )

    # ---- collectives -----------------------------------------------------------------------------------------------

    def allreduce(self, tensor: torch.Tensor, op: Op, scale: float = 1.0, divisor: int = 1) -> Work:
        check(tensor, op)
        flat = tensor.detach().view(-1)
        return self._order.submit(lambda: self._steps.allreduce(flat, op, Scale(scale, divisor)))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        flat = as_bytes(tensor)
        return self._order.submit(lambda: self._steps.broadcast(flat, root))

    def allgather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        flat, places = as_bytes(tensor), [as_bytes(output) for output in outputs]

        def gather() -> None:
            for place, part in zip(places, self._steps.allgather(flat), strict=True):
                place.copy_(part)

        return self._order.submit(gather)

    def alltoall(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int]
    ) -> Work:
        rows, place = tensor.detach(), output.detach()
        return self._order.submit(lambda: self._steps.alltoall(place, rows, received, sent))

    def barrier(self) -> Work:
        return self._order.submit(self._steps.barrier)

    # ---- abort and close -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._order.stop(CollectiveFailed("aborted", aborted=True))

    def drain(self, timeout_s: float) -> bool:
        """Wait, after `abort`, until no collective of this group writes to any tensor. See `Collectives.drain`."""
        until = time.monotonic() + timeout_s
        drained = self._order.drain(timeout_s)
        for part in (self._host, self._inter_node):
            if part is not None:
                drained &= part.drain(max(until - time.monotonic(), 0.0))
        return drained

    def close(self) -> None:
        """Release sockets and threads. See `Collectives.close`."""
        self.abort()
        copies = self._steps.copies
        if not self.drain(_CLOSE_S) and copies is not None:
            own = arena.mine()
            if own is not None:
                own.quarantine(copies)
        self._steps.copies = None
        if self._inter_node is not None:
            self._inter_node.close()
        self._host.close()

    def close_in_forked_child(self) -> None:
        """Release the parent's sockets and its host's memory in a forked child."""
        self._order.close_in_forked_child(
            "process groups can't be used in a forked child: run collectives in the worker itself"
        )
        self._host.close_in_forked_child()
        if self._inter_node is not None:
            self._inter_node.close_in_forked_child()
