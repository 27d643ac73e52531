"""DiLoCo and LocalSGD: each worker, or island of workers, takes several inner steps independently of the others.

Every rank has a copy of the *outer* parameters, which are bitwise equal on all ranks. The model contains the *inner*
parameters, which differ between workers, or between islands, from one merge to the next. A merge averages ``outer -
inner`` of one fragment into a buffer, runs a step of the outer optimizer with this average as the gradient, and mixes
the result into the inner parameters. If a worker is lost, only the collective fails, and it has written only to that
buffer. The merge is then repeated in the next world.

In an island, DistributedDataParallel averages gradients in every step. The island's leader exchanges the
pseudo-gradients with the other leaders, and broadcasts the mean in the island. With ``grace_s``, a merge does not wait
for late islands: see `rounds` and `exchange`.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import time
from collections.abc import Generator, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic import context
from elastic.api.broadcasting import broadcast_object
from elastic.collectives.interface import Op
from elastic.diloco import quantization
from elastic.diloco.attendance import Attendance, absence
from elastic.diloco.exchange import NAME, QuorumExchange
from elastic.diloco.island_group import IslandGroup
from elastic.diloco.islands import Islands
from elastic.diloco.rounds import (
    Action,
    ApplyMean,
    AwaitMean,
    CompareIsland,
    CompareReports,
    Decisions,
    Follow,
    Rounds,
    ShareMean,
    StartMean,
    TakeInner,
    TakeMerges,
    TakePart,
    WorldId,
    WorldReport,
    adopted,
)
from elastic.diloco.schedule import RoundSchedule, partition
from elastic.diloco.sharded import (
    TensorShape,
    adopt_outer,
    described,
    local_of,
    outer_rows,
    sharded_island,
    with_rows,
)
from elastic.errors import Invalid, NotInitialized, PeerLost, StateMismatch
from elastic.monitoring import moved_tensors
from elastic.negotiation import submission
from elastic.negotiation.messages import ALLGATHER, ALLREDUCE, Members
from elastic.negotiation.pending import Pending
from elastic.runtime import lifecycle
from elastic.runtime.guarded_groups import ByteExchange
from elastic.runtime.worker_runtime import WorkerRuntime

WIRE = (None, torch.float16, torch.bfloat16, torch.float32)
# integer dtypes of the same width as floating-point dtypes, by size in bytes
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
REPORTS = "diloco reports"
REPORT_LIMIT = 128 << 10  # maximum length of a report that is sent through the store, in characters
# first byte of a report: whether the rank has sent it before it received the state, if it receives the state
_BEFORE, _AFTER = b"<", b">"


class MergedValues(NamedTuple):
    """Values of merged fragments, by index of the outer parameter."""

    outer: dict[int, torch.Tensor]
    entries: dict[int, dict[str, Any]]  # of the outer optimizer
    groups: list[dict[str, Any]]  # options of the outer optimizer


class SentReport(NamedTuple):
    """Report of this rank that is being exchanged in the background."""

    world: Hashable
    exchange: ByteExchange


class DiLoCo:
    """Optimizer that implements DiLoCo (arXiv:2311.08105).

    With ``fragments`` and ``delay``, it implements Streaming DiLoCo (arXiv:2501.18512).

    Put it in a `TorchState` instead of the model and the inner optimizer, and call `step` after each inner step::

        diloco = elastic.DiLoCo(model, inner_optimizer, every=100)
        state = elastic.TorchState(diloco=diloco, loader=loader, step=0)
        ...
        loss.backward(); inner_optimizer.step(); inner_optimizer.zero_grad(); diloco.step()
        state.step += 1
        state.commit()

    Args:
        model: model whose parameters with ``requires_grad`` are averaged. All other parameters and the buffers are not.
            With islands, a DistributedDataParallel over `elastic.island_group`, or a model to which ``fully_shard``
            was applied with `elastic.island_mesh`. The outer parameters and the entries of the outer optimizer are
            then sharded like the model, and in float32 if the model has a 16-bit dtype.
        inner_optimizer: any torch optimizer of the model's parameters.
        outer_optimizer: new torch optimizer of the model's trained parameters. DiLoCo replaces its parameters with the
            outer parameters. Default: SGD with lr 0.7 and Nesterov momentum 0.9.
        every: number of inner steps per round, the same on all workers.
        fragments: number of parts into which the parameters are divided. The parts are sent one at a time during the
            round.
        delay: number of inner steps between sending a fragment and merging its mean, so that the collective overlaps
            training.
        mix: weight of the inner parameters in a merge: inner = mix * inner + (1 - mix) * outer. This is the mixing
            factor alpha of arXiv:2501.18512, where figure 8 compares 0 with 0.5 for several delays, and figure 10 uses
            0.5. Default: 0.0 without a delay, else 0.5.
        dtype: dtype to which pseudo-gradients are cast before they are sent: float16, bfloat16 or float32. With int8,
            float8_e4m3fn or ``"int4"`` they are quantized, with a float32 scale for each 128 elements, and each worker
            adds its quantization errors to what it sends in the next round. Default: the parameters' own dtype.
        grace_s: seconds, more than 0, that a merge waits for late islands, or late workers without islands. Afterwards
            the merge averages the changes of the islands that have sent a change, if these islands are a quorum. A late
            island receives the mean and keeps its own change, which takes part in the next merge. A round then ends
            when the fastest island has taken ``every`` inner steps. Default: a merge waits for all islands.
        quorum: number of islands, at least 1, that a merge needs after ``grace_s`` seconds, or all islands if there are
            fewer. Default: half of the islands, rounded up.

    Attributes:
        lacks_merges: whether this worker received a commit of another worker, and has not made the same merges yet.
        replica: the DistributedDataParallel that was given as the model, or None.
        sharded: the shards of the model in this island, or None if the model is not sharded.
        bytes_sent: total size of the pseudo-gradients that this worker has sent, in bytes. 0 unless it leads its
            island.

    Raises:
        Invalid: a number is out of range, an optimizer does not match the model, the model is sharded over another mesh
            than `elastic.island_mesh`, a sharded model is combined with ``grace_s``, a quantized dtype or a fused outer
            optimizer, or ``grace_s`` is combined with float16, whose range weighted changes can exceed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | None,
        outer_optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        fragments: int = 1,
        delay: int = 0,
        mix: float | None = None,
        dtype: torch.dtype | str | None = None,
        grace_s: float | None = None,
        quorum: int | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise Invalid(f"model is a {type(model).__name__}: pass the torch.nn.Module itself")
        self.sharded = sharded_island(model)
        self.replica = None if self.sharded is not None else _replica(model)
        self._group: IslandGroup | None = None
        if self.sharded is not None:
            self._group = self.sharded.group
            _check_sharded(dtype, grace_s)
        elif self.replica is not None:
            self._group = cast(IslandGroup, self.replica.process_group)
        model = model if self.replica is None else self.replica.module
        if dtype not in WIRE and dtype not in quantization.FORMATS:
            raise Invalid(
                f"dtype is {dtype!r}: pass torch.float16, bfloat16, float32, int8 or float8_e4m3fn, 'int4' or"
                " None"
            )
        _check_quorum(grace_s, quorum, dtype)
        self.grace_s, self.quorum = grace_s, quorum
        self.rounds = Rounds(
            RoundSchedule(every, fragments, delay),
            quorum=grace_s is not None,
            replicated=self.sharded is None,
        )
        # Exchange with the other leaders. Not None iff this rank is a leader, ``grace_s`` is given, and there are
        # several leaders.
        self._exchange: QuorumExchange | None = None
        self.mix = (0.5 if delay else 0.0) if mix is None else float(mix)
        if not 0.0 <= self.mix < 1.0:
            raise Invalid(
                f"mix is {mix}: pass a number from 0.0 (take the outer parameters) up to, but not including, 1.0"
            )
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if not named:
            raise Invalid(
                "the model has no trainable parameter: set requires_grad=True for at least one parameter"
            )
        _check_inner(model, inner_optimizer)
        self.model, self.inner_optimizer, self.dtype = model, inner_optimizer, dtype
        self._format = quantization.FORMATS.get(dtype)
        self.names = list(named)
        self.inner: list[torch.Tensor] = list(named.values())
        self.parts = partition([each.numel() for each in self.inner], fragments)
        self.outer = [torch.nn.Parameter(self._outer_value(each)) for each in self.inner]
        self.outer_optimizer = self._pointed_to_outer(outer_optimizer)
        self.bytes_sent = 0
        self.lacks_merges = False
        # Name of this object in a state, which repeats an interrupted merge in the next world; None without a state.
        self.name_in_state: str | None = None
        self._begun: SentReport | None = None  # not None iff `begin_reconcile` has sent a report
        # Quantization errors of this worker's last merged pseudo-gradients, by fragment; empty without quantization.
        self._residuals: list[torch.Tensor] = []
        if self._format is not None:
            elements = [sum(self.inner[i].numel() for i in part) for part in self.parts]
            self._residuals = [
                torch.zeros(n, dtype=torch.float32, device=self.inner[0].device) for n in elements
            ]
        # The last sent fragment and its quantization errors, which become the fragment's residual at the merge.
        self._sent_residual: tuple[int, torch.Tensor] | None = None
        # handle and buffer of the mean, and of the total number of tokens if islands are weighted by tokens
        self._in_flight: list[tuple[int, torch.Tensor]] = []
        self._mean: torch.Tensor | None = None  # mean that was received and not applied
        self._absent: list[str] = []  # islands that did not take part in the mean `_mean`
        # With a sharded model: the leaders of the islands of this world that lack merges.
        self._lacking: tuple[int, ...] = ()
        # On a leader with a sharded model: the change of the island, from the comparison until it is sent.
        self._gathered: torch.Tensor | None = None
        self._absent_before: list[str] = []  # islands that did not take part in the previous mean
        self._waited_s = 0.0  # time in seconds that the leader waited for the mean `_mean`
        self._outer_before: list[
            torch.Tensor
        ] = []  # copy of the outer parameters before the state of another rank is received

    def _outer_value(self, inner: torch.Tensor) -> torch.Tensor:
        """Return a copy of a parameter, in float32 if it is sharded and has a 16-bit dtype.

        torch's CPU kernels round 16-bit elements at the end of a tensor differently from others. Islands of different
        sizes divide rows differently, so their outer parameters would differ.
        """
        value = inner.detach().clone()
        return value.float() if self.sharded is not None and value.element_size() == 2 else value

    def _pointed_to_outer(self, given: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        if given is None:
            return torch.optim.SGD(self.outer, lr=0.7, momentum=0.9, nesterov=True)
        if given is self.inner_optimizer:
            raise Invalid(
                "the outer and the inner optimizer are the same object: create two optimizers"
            )
        if not isinstance(given, torch.optim.Optimizer):
            raise Invalid(
                f"outer_optimizer is {given!r}: pass an optimizer, for example"
                " torch.optim.SGD(model.parameters(), lr=0.7)"
            )
        if self.sharded is not None and any(each.get("fused") for each in given.param_groups):
            raise Invalid(
                "the outer optimizer is fused, so its rounding depends on the number of rows of a rank, and the outer"
                " parameters of islands of different sizes would differ: omit fused=True"
            )
        twins = {id(i): o for i, o in zip(self.inner, self.outer, strict=True)}
        listed = [id(each) for group in given.param_groups for each in group["params"]]
        if given.state or sorted(listed) != sorted(twins):
            raise Invalid(
                "the outer optimizer is not new, or does not have exactly the trained parameters of the model:"
                " create it as torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)"
            )
        for group in given.param_groups:
            group["params"] = [twins[id(each)] for each in group["params"]]
        return given

    # ---- interface for scripts -------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Number of inner steps of the job.

        Every change of the world sets it to the maximum over all workers, so that all workers merge after the same
        steps.
        """
        return self.rounds.position

    @property
    def own_steps(self) -> int:
        """Number of inner steps that this worker's inner parameters contain; equal for all workers of an island."""
        return self.rounds.own_steps

    @property
    def merged(self) -> list[int]:
        """Number of merges of each fragment."""
        return self.rounds.merged

    @property
    def round(self) -> int:
        """Number of complete rounds: the smallest number of merges of any fragment."""
        return min(self.merged)

    def step(self, tokens: float | None = None) -> None:
        """Increment the inner step counter, then send and merge the fragments that are due.

        Call it after each step of the inner optimizer. It communicates only in steps in which a fragment is sent or
        merged. If the world fails during this call and the object is in a state, the merge is repeated in the next
        world, and the following ``commit()`` keeps this inner step before it raises.

        Args:
            tokens: number of tokens, or samples, in this worker's batch. Changes are then weighted by the number of
                tokens since the last merge. Default: all islands have equal weights. Pass it on all workers or on none.

        Raises:
            PeerLost: the world failed, and this object is not part of a state.
            StateMismatch: the inner parameters of this island's workers differ.
            Invalid: the tokens are negative, not finite, or passed in some steps only, or ``dtype`` is float16, which
                weighted changes can exceed.
        """
        if tokens is not None and self.dtype is torch.float16:
            raise Invalid(
                "tokens= is not supported with dtype=torch.float16, whose range weighted changes can exceed: pass"
                " dtype=torch.bfloat16"
            )
        rt = _context()
        if self.sharded is not None:
            self.sharded.reshard()
        try:
            self._run(self.rounds.step(_world_of(rt), self._islands(rt), tokens))
            self._receive_early()
        except PeerLost:
            if self.name_in_state is None or rt is None or rt.alone or not rt.elastic:
                raise

    # ---- implementation --------------------------------------------------------------------------

    def _run(self, actions: Generator[Action, Any, None]) -> None:
        answer = None
        try:
            while True:
                answer = self._perform(actions.send(answer))
        except StopIteration:
            pass
        except PeerLost:
            self._in_flight = []
            self.rounds.interrupted()
            raise

    def _receive_early(self) -> None:
        """Receive the mean of the sent fragment if it is complete, although the merge is due in a later step.

        If the world ends before that step, this rank can still catch up with ranks that have applied the mean.
        """
        pending = self.rounds.pending
        if pending is None or not self._in_flight or not self.rounds.keeps_means:
            return
        if all(submission.over(handle) for handle, _ in self._in_flight):
            try:
                self._mean = self._received(pending.fragment)
            except PeerLost:
                self.rounds.interrupted()
                raise
            self.rounds.mean_received()

    def _islands(self, rt: context.Context | None) -> Islands:
        if self._group is not None:
            return self._group.islands
        size = 1 if rt is None else submission.group_size(torch.device("cpu"))
        return Islands.apart(size, 0 if rt is None or size == 1 else rt.place.rank)

    def _perform(self, action: Action) -> Sequence[Any] | None:
        match action:
            case CompareReports(report):
                self._in_flight, self._exchange, self._gathered = [], None, None
                reports = self._compare_reports(report)
                if self.sharded is not None:
                    self._lacking = lacking_islands(reports, self.rounds.islands.leaders)
                return reports
            case TakeMerges():
                self._take_merges(action)
            case TakePart(merge, leaders):
                self._take_part(merge, leaders)
            case Follow(merge, root):
                return self._decisions(merge, root)
            case TakeInner(root, kept):
                self._take_inner(root, kept)
            case CompareIsland(sent, tokens):
                return self._compare_island(sent.fragment, tokens)
            case StartMean(sent, leaders, weight):
                self._mean = None
                self._send(sent.fragment, leaders, weight)
            case AwaitMean(fragment):
                if self._mean is None or self.rounds.quorum:
                    self._mean = self._received(fragment)
                return self._absent
            case ShareMean(fragment, root):
                self._mean = self._shared(fragment, root)
                return self._absent
            case ApplyMean(fragment, missed, repeated):
                assert self._mean is not None
                mean, self._mean = self._mean, None
                self._apply(fragment, mean, missed)
                if not repeated:
                    self._report_merge()
        return None

    def _compare_reports(self, report: str) -> Sequence[str]:
        begun, self._begun = self._begun, None
        rt = lifecycle.active()
        if _context() is None or submission.group_size(torch.device("cpu")) == 1:
            return [report]
        if rt is None or not self._is_distant(rt):
            return submission.agree("diloco", "position", report)
        if begun is None or begun.world != _world_of(rt):
            begun = self._send_report(rt, report)
        with rt.guard(REPORTS):
            blobs = begun.exchange.wait()
        if not all(blobs):
            return submission.agree("diloco", "position", report)
        # A rank whose script runs code while it enters the world reports afterwards.
        senders = {} if rt.world is None else rt.world.senders
        senders = {rank: sender for rank, sender in senders.items() if blobs[rank][:1] == _BEFORE}
        reports = adopted([blob[1:].decode() for blob in blobs], senders)
        if reports[rt.place.rank] != report:
            raise StateMismatch(
                "DiLoCo's counters changed while this worker entered a world, so its merges would differ from those of"
                " the other workers: change them only in steps"
            )
        return reports

    def _is_distant(self, rt: WorkerRuntime) -> bool:
        """Return whether ranks exchange reports through the store. Equal on all ranks.

        Between distant hosts, this takes fewer round trips than the first negotiated collective of a world.
        """
        # A sharded island may restore an older commit than this rank has, so reports are not known in advance.
        return rt.place.several_hosts and self.name_in_state is not None and self.sharded is None

    def _send_report(self, rt: WorkerRuntime, report: str, when: bytes = _AFTER) -> SentReport:
        blob = self._report_blob(report, when)
        exchange = rt.start_exchange(f"{REPORTS} {self.name_in_state}", blob)
        return SentReport(_world_of(rt), exchange)

    def _report_blob(self, report: str, when: bytes) -> bytes:
        """Return a report as it is sent. It is empty if the report is too long: all ranks then use a collective."""
        return when + report.encode() if len(report) <= REPORT_LIMIT else b""

    def _take_part(self, merge: int, leaders: tuple[int, ...]) -> None:
        """Start taking part in this world's merges in the background. This method is called on a leader."""
        rt = context.current()
        assert self.grace_s is not None
        attendance = Attendance(leaders, self.quorum, merge)
        with rt.guard(NAME):
            self._exchange = QuorumExchange(rt, leaders, attendance, self.grace_s, self._zeros)

    def _decisions(self, merge: int, root: int) -> Decisions:
        """Return the leaders' decisions, beginning with merge number ``merge``.

        They are the same on all workers of this island.
        """
        found = Decisions(0, False) if self._exchange is None else self._exchange.decisions(merge)
        if self._group is None or len(self._group.islands.members) == 1:
            return found
        shared = torch.tensor([found.decided, int(found.wanted)], dtype=torch.int64, device="cpu")
        self._group.share(shared, root)
        decided, wanted = shared.tolist()
        return Decisions(decided, bool(wanted))

    def _take_merges(self, action: TakeMerges) -> None:
        """Receive merges from a rank on which their collectives completed, if they failed on this rank.

        All ranks, or all ranks of the island, must call this method.
        """
        root = action.root
        if self.sharded is not None:
            indices = [i for each in action.sent for i in self.parts[each]]
            self.copy_outer(root, self._lacking, indices)
            if action.fragments:
                self.adopt_gained(dict.fromkeys(action.fragments, False))
            return
        mine = self._merges(action.sent) if context.current().place.rank == root else None
        if action.in_island:
            assert self._group is not None
            theirs = self._group.broadcast_object(mine, root)
        else:
            theirs = broadcast_object(mine, root, "diloco.merges")
        if not action.fragments:
            return
        self.remember_outer()
        gained = {i for fragment in action.fragments for i in self.parts[fragment]}
        with torch.no_grad():
            for i in gained:
                self.outer[i].copy_(theirs.outer[i])
        # Entries of other fragments keep their values.
        own = self.outer_optimizer.state_dict()
        places = self._places()
        taken = {places[i]: theirs.entries[i] for i in gained if i in theirs.entries}
        self.outer_optimizer.load_state_dict(
            {"state": own["state"] | taken, "param_groups": theirs.groups}
        )
        self.adopt_gained({each: each in action.missed for each in action.fragments})

    def _merges(self, fragments: Iterable[int]) -> MergedValues:
        """Return the outer parameters of these fragments, and their entries in the outer optimizer."""
        state, places = self.outer_optimizer.state_dict(), self._places()
        indices = [i for fragment in fragments for i in self.parts[fragment]]
        entries = {i: state["state"][places[i]] for i in indices if places[i] in state["state"]}
        outer = {i: self.outer[i].detach() for i in indices}
        return MergedValues(outer, entries, state["param_groups"])

    def _places(self) -> list[int]:
        """Return the index in the outer optimizer's ``state_dict()`` of each outer parameter."""
        stepped = [
            id(each) for group in self.outer_optimizer.param_groups for each in group["params"]
        ]
        return [stepped.index(id(each)) for each in self.outer]

    def _take_inner(self, root: int, kept: bool) -> None:
        """Receive the inner state of another worker of this island. Collective in the island.

        Joining workers lack this state, and so do workers whose last step was interrupted. The ranks of a sharded
        island have restored the same commit, so none of them lacks it.
        """
        if self.sharded is not None:
            return
        assert self._group is not None
        mine = self.own_state() if self._group.islands.rank == root else None
        theirs = self._group.broadcast_object(mine, root)
        if not kept:
            self.take_own_state(theirs | {"counts": self.rounds.own()})

    def _compare_island(self, fragment: int, tokens: float) -> list[float]:
        """Return the tokens of the members of this island.

        With a sharded model, this method gathers the change of the island on the leader instead of comparing it.

        Raises:
            StateMismatch: the changes of the members differ.
        """
        group, rt = self._group, context.current()
        assert group is not None
        if self.sharded is not None:
            self._gathered = self._gather(self.parts[fragment])
            counted = torch.tensor([tokens], dtype=torch.float64, device="cpu")
            return [float(each) for each in group.rows(counted)]
        with torch.no_grad():
            change = self._change(self.parts[fragment])
            if self._format is not None and not group.islands.leads:
                # The result is not sent: packing records this worker's quantization errors, which it sends if it
                # becomes the leader.
                self._quantized(fragment, change, self._format)
        digest = change.view(_INTEGERS[change.element_size()]).sum(dtype=torch.int64).cpu()
        counted = torch.tensor([tokens], dtype=torch.float64, device="cpu").view(torch.int64)
        rows = group.rows(torch.cat([counted, digest.reshape(1)]))
        if len({int(row[1]) for row in rows}) > 1 and not rt.env.allow_inexact:
            raise StateMismatch(
                f"the inner parameters of ranks {list(group.islands.members)} differ, although these ranks form one"
                f" island ({group.islands.name}): call the DistributedDataParallel model, not its module, and change"
                " parameters only through the inner optimizer"
            )
        return [float(row[:1].view(torch.float64)) for row in rows]

    def _send(self, fragment: int, leaders: tuple[int, ...], weight: float | None) -> None:
        """Start averaging a fragment's pseudo-gradients among the leaders of the islands.

        This method is called on a leader.
        """
        exchange = self._exchange
        with torch.no_grad():
            flat = self._change(self.parts[fragment])
            if self._format is not None:
                buffer = quantization.weighted(
                    self._quantized(fragment, flat, self._format), weight
                )
            else:
                flat = flat if weight is None else flat * weight
                buffer = flat.to(self.dtype) if isinstance(self.dtype, torch.dtype) else flat
        if exchange is not None:
            assert weight is not None
            merge, weighted = sum(self.merged), bool(self.rounds.weighted)
            collectives = self._collectives(merge, exchange.members, buffer, weight)
            with context.current().guard(NAME):
                exchange.send(merge, collectives, weighted)
            moved_tensors.took([buffer])
            return
        self.bytes_sent += buffer.nbytes
        name, rt = f"{self._collectives_name()}.{fragment}", _context()
        members = None if rt is None or len(leaders) == rt.place.size else leaders
        total = torch.tensor([0.0 if weight is None else weight], dtype=torch.float64, device="cpu")
        if rt is None:
            self._in_flight = [(-1, buffer), (-1, total)]
        elif self._format is not None:
            # Packed values can't be summed during the transfer, and unpacking them first would increase the number of
            # bytes sent.
            handle = submission.start_allgather([buffer], name, members=members, pick=_first)
            self._in_flight = [(handle, buffer)]
        elif weight is None:
            self._in_flight = [(_reduce(buffer, name, Op.AVERAGE, members), buffer)]
        else:
            # Reduced with SUM instead of AVERAGE, so that the ranks raise an error if only some workers report tokens.
            self._in_flight = [
                (_reduce(buffer, name, Op.SUM, members), buffer),
                (_reduce(total, f"{name}.tokens", Op.SUM, members), total),
            ]

    def _collectives_name(self) -> str:
        """Return the first part of the names of collectives, which differs for each object of a state."""
        name = self.name_in_state
        return NAME if name in (None, NAME) else f"{NAME}.{name}"

    def _collectives(
        self, merge: int, members: Members, buffer: torch.Tensor, weight: float
    ) -> list[Pending]:
        """Return the collectives of a merge with a quorum.

        Args:
            merge: number of the merge.
            members: ranks of the leaders.
            buffer: packed or weighted pseudo-gradients, 1-dimensional.
            weight: weight of this island, 0 if it is absent.
        """
        name = f"{NAME}.{merge}"
        if self._format is not None:
            gathered = Pending(ALLGATHER, f"{ALLGATHER}.{name}", members, [buffer], buffer.device)
            gathered.lasting = False
            return [gathered]
        total = torch.tensor([weight], dtype=torch.float64, device="cpu")
        made = []
        for what, tensor in ((name, buffer), (f"{name}.tokens", total)):
            reduced = Pending(
                ALLREDUCE,
                f"{ALLREDUCE}.{what}",
                members,
                [tensor],
                tensor.device,
                op=Op.SUM,
                into=[tensor],
            )
            # A name is never reused, so that collectives of different merges cannot be matched.
            reduced.lasting = False
            made.append(reduced)
        return made

    def _zeros(self, merge: int, members: Members) -> list[Pending]:
        """Return the collectives of a merge from which this island is absent. Thread-safe."""
        fragment, device = self.rounds.schedule.merge(merge).fragment, self.inner[0].device
        elements, dtype = self._kind(fragment)
        if self._format is not None:
            elements = quantization.packed_bytes(elements, self._format) + quantization.WEIGHT_BYTES
            dtype = torch.uint8
        elif isinstance(self.dtype, torch.dtype):
            dtype = self.dtype
        zeros = torch.zeros(elements, dtype=dtype, device=device)
        return self._collectives(merge, members, zeros, 0.0)

    def _change(self, part: range) -> torch.Tensor:
        """Return the pseudo-gradients of the parameters in ``part``, 1-dimensional. Called on a leader."""
        if self.sharded is not None:
            found, self._gathered = self._gathered, None
            if found is None:  # This rank is alone in its island.
                found = self._gather(part)
            assert found is not None
            return found
        return torch.cat([(self.outer[i] - self.inner[i]).reshape(-1) for i in part])

    @torch.no_grad()
    def _gather(self, part: range) -> torch.Tensor | None:
        """Gather the change of a sharded island on the leader. Return None on other ranks."""
        assert self.sharded is not None
        change = [local_of(self.outer[i]) - local_of(self.inner[i]) for i in part]
        return self.sharded.gather(change, self._shapes(part), self._dtype_of(part))

    def _shapes(self, part: range) -> list[TensorShape]:
        return [TensorShape(tuple(self.inner[i].shape)) for i in part]

    def _quantized(
        self, fragment: int, change: torch.Tensor, code: quantization.CodeFormat
    ) -> torch.Tensor:
        """Pack pseudo-gradients together with earlier errors, and keep the new errors until the fragment is merged.

        Args:
            fragment: number of the fragment.
            change: pseudo-gradients, 1-dimensional.
            code: format of the packed elements.

        Returns:
            A 1-dimensional uint8 tensor, see `quantization.pack`.
        """
        wanted = change.float() + self._residuals[fragment]
        packed = quantization.pack(wanted, code)
        errors = wanted - quantization.unpack(packed, len(wanted), code)
        self._sent_residual = fragment, errors
        return packed

    def _received(self, fragment: int) -> torch.Tensor:
        """Wait for the mean of the fragment that was sent last, and return it. This method is called on a leader."""
        began = time.monotonic()
        try:
            return self._awaited(fragment)
        finally:
            self._waited_s = time.monotonic() - began

    def _awaited(self, fragment: int) -> torch.Tensor:
        started, self._in_flight = self._in_flight, []
        exchange, islands = self._exchange, self.rounds.islands
        self._absent = []
        weighted = self.rounds.quorum or bool(self.rounds.weighted)
        if exchange is None:
            mean, *totals = [
                buffer if handle < 0 else submission.synchronize(handle)
                for handle, buffer in started
            ]
        else:
            with context.current().guard(f"{NAME}.{fragment}"):
                merge = exchange.wait(sum(self.merged))
                assert merge.collectives is not None
                for each in merge.collectives:
                    each.wait()
                mean, *totals = [each.result()[0] for each in merge.collectives]
            sent = merge.collectives[0].tensors
            moved_tensors.took(sent)
            self.bytes_sent += sum(each.nbytes for each in sent)
            mean = mean[0] if self._format is not None else mean
            self._absent = [islands.names[r] for r in islands.leaders if r not in merge.present]
            self._log_absence(sum(self.merged), islands)
        if self._format is not None:
            elements, rows = len(self._residuals[fragment]), len(islands.leaders)
            return quantization.mean(mean, elements, self._format, rows, weighted=weighted)
        if weighted:
            # If no worker has a token, all changes are zero and need no division.
            mean = mean.to(self._kind(fragment)[1]) / (float(totals[0]) or 1.0)
        return mean

    def _report_merge(self) -> None:
        rt, islands = lifecycle.active(), self.rounds.islands
        if rt is not None and rt.place.rank == 0 and not rt.provisional:
            merges = sum(self.merged) + 1
            names = [islands.names[leader] for leader in islands.leaders]
            rt.report_merge(merges, self.position, names, self._absent, self._waited_s)

    def _log_absence(self, merge: int, islands: Islands) -> None:
        before, self._absent_before = self._absent_before, self._absent
        if islands.rank == 0 and self.grace_s is not None:
            line = absence(merge, self._absent, before, self.grace_s)
            if line:
                print(f"elastic: diloco: {line}", file=sys.stderr, flush=True)

    def _shared(self, fragment: int, root: int) -> torch.Tensor:
        """Receive the mean of a fragment from a rank of this island, usually its leader."""
        assert self._group is not None
        if self.sharded is not None:
            return self._scattered(fragment, self._mean)
        if self.rounds.islands.rank == root:
            assert self._mean is not None
            mean = self._mean
        else:
            elements, dtype = self._kind(fragment)
            if self._format is not None:
                dtype = torch.float32
            elif isinstance(self.dtype, torch.dtype) and not (
                self.rounds.weighted or self.rounds.quorum
            ):
                dtype = self.dtype
            mean = torch.empty(elements, dtype=dtype, device=self.inner[0].device)
        if self.rounds.quorum:
            islands = self.rounds.islands
            names = [islands.names[leader] for leader in islands.leaders]
            absent = torch.tensor(
                [name in self._absent for name in names], dtype=torch.bool, device="cpu"
            )
            self._group.share(absent, root)
            self._absent = [
                name for name, is_absent in zip(names, absent.tolist(), strict=True) if is_absent
            ]
        self._group.share(mean, root)
        return mean

    def _scattered(self, fragment: int, mean: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's rows of the mean, which the leader of a sharded island sends."""
        assert self.sharded is not None
        part = self.parts[fragment]
        dtype = self._dtype_of(part)
        if isinstance(self.dtype, torch.dtype) and not self.rounds.weighted:
            dtype = self.dtype
        return self.sharded.scatter(mean, self._shapes(part), dtype, self.inner[0].device)

    def _kind(self, fragment: int) -> tuple[int, torch.dtype]:
        """Return the number of elements of a fragment and the dtype of its mean."""
        part = self.parts[fragment]
        return sum(self.inner[i].numel() for i in part), self._dtype_of(part)

    def _dtype_of(self, part: range) -> torch.dtype:
        return functools.reduce(torch.promote_types, [self.inner[i].dtype for i in part])

    def _apply(self, fragment: int, mean: torch.Tensor, missed: bool = False) -> None:
        """Step the outer optimizer with the mean pseudo-gradients of one fragment, and mix the result into the model.

        Args:
            fragment: number of the fragment.
            mean: mean pseudo-gradients, a 1-dimensional floating-point tensor. With a sharded model, this rank's rows.
            missed: whether the mean does not contain the change of this island.
        """
        if missed:
            self.remember_outer(fragment)
        part, start = self.parts[fragment], 0
        for outer in self.outer:
            outer.grad = None
        for i in part:
            outer = self.outer[i]
            rows = local_of(outer)
            piece = mean[start : start + rows.numel()].view_as(rows)
            outer.grad = with_rows(piece.to(outer.dtype, copy=True), outer)
            start += rows.numel()
        self.outer_optimizer.step()
        for i in part:
            self.outer[i].grad = None
        self.adopt_gained({fragment: missed})

    def remember_outer(self, fragment: int | None = None) -> None:
        """Copy the outer parameters of one fragment, or of all, before they change. `adopt_gained` uses the copy."""
        part = range(len(self.outer)) if fragment is None else self.parts[fragment]
        self._outer_before = [
            each.detach().clone() if i in part else each.detach()
            for i, each in enumerate(self.outer)
        ]

    def adopt_gained(self, gained: dict[int, bool]) -> None:
        """Complete merges after this rank received the merged outer parameters.

        Args:
            gained: the merged fragments, and whether the merge lacks the change of this island. `remember_outer` must
                have been called before a merge that lacks it.
        """
        before, self._outer_before = self._outer_before, []
        for fragment, missed in gained.items():
            if not missed:
                self.adopt(fragment)
                continue
            self._sent_residual = None  # The errors are added to the change again when it is sent.
            with torch.no_grad():
                for i in self.parts[fragment]:
                    self.inner[i].add_(self.outer[i] - before[i])

    def adopt(self, fragment: int) -> None:
        """Complete a merge that contains the change of this island, after this rank received the outer parameters.

        Args:
            fragment: index of the merged fragment.
        """
        if self._residuals:
            number, errors = self._sent_residual or (-1, self._residuals[fragment])
            # Errors that were sent in a step that was later rolled back must not be sent twice.
            self._residuals[fragment] = errors if number == fragment else torch.zeros_like(errors)
            self._sent_residual = None
        self._mix_in(self.parts[fragment])

    def _mix_in(self, indices: Iterable[int]) -> None:
        with torch.no_grad():
            for i in indices:
                inner, outer = local_of(self.inner[i]), local_of(self.outer[i])
                outer = outer.to(inner.dtype)
                if self.mix:
                    inner.lerp_(outer, 1.0 - self.mix)
                else:
                    inner.copy_(outer)

    # ---- interface for the state handler ---------------------------------------------------------

    def stop_group(self) -> str:
        """Return the name of the workers with which this worker takes its inner steps, which does not change."""
        if self._group is not None:
            return self._group.islands.name
        return f"worker {lifecycle.current().env.worker}"

    def metadata(self) -> dict[str, str]:
        """Return the metadata with which `reconcile` compares this rank with the other ranks of the next world.

        Called before this rank becomes ready for the next world. The counters must not change until `reconcile`, which
        otherwise raises StateMismatch.
        """
        report = self._report_blob(self.rounds.report(), _BEFORE)
        known = self.name_in_state is not None and self.sharded is None and report
        return {f"{REPORTS} {self.name_in_state}": report.decode()} if known else {}

    def begin_reconcile(self) -> None:
        """Send the report that `reconcile` compares with those of the other ranks, if their hosts are distant.

        Called before some ranks receive the state of another rank. The other ranks compute the reports of those ranks
        as they will be afterwards, and need not wait for them. On ranks where it is not called, `reconcile` sends the
        report. No effect after the first call in a world.
        """
        rt = lifecycle.active()
        if rt is None or rt.world is None or rt.provisional or not self._is_distant(rt):
            return
        world = _world_of(rt)
        begun = self._begun is not None and self._begun.world == world
        if self.rounds.is_new(world) and not begun:
            self._begun = self._send_report(rt, self.rounds.report(), _BEFORE)

    def reconcile(self) -> None:
        """Synchronize with the ranks of a new world, and complete a pending merge of the previous world.

        All ranks must call this method.

        Raises:
            PeerLost: a rank was lost.
        """
        rt = _context()
        self._run(self.rounds.enter(_world_of(rt), self._islands(rt)))
        self.lacks_merges = False

    def take_shared(self, values: dict[str, Any]) -> None:
        """Set the counters to the values that `Rounds.shared` returned on another rank, or in an earlier commit."""
        self._in_flight, self._exchange = [], None
        self.rounds.take_shared(values)

    def copy_outer(self, root: int, lacking: Sequence[int], indices: Sequence[int]) -> None:
        """Copy outer parameters and their entries of the outer optimizer from one sharded island to others.

        All ranks of these islands must call this method. On the ranks of other islands, it returns immediately.

        Args:
            root: leader of the island that sends.
            lacking: leaders of the islands that receive.
            indices: indices of the parameters, equal on all ranks.

        Raises:
            PeerLost: a rank was lost.
        """
        sharded = self.sharded
        assert sharded is not None
        leader = sharded.group.islands.leader
        if leader not in (root, *lacking):
            return
        sends = leader == root
        optimizer, outer = self.outer_optimizer, self.outer
        theirs = described(optimizer, outer) if sends else None
        theirs = sharded.copy_object(theirs, root, lacking)
        if not sends:
            adopt_outer(optimizer, outer, theirs, indices)
        sharded.copy_between(root, lacking, outer_rows(optimizer, outer, theirs, indices))

    def own_state(self) -> dict[str, Any]:
        """Return copies of the state that may differ between workers.

        It consists of the model, the inner optimizer, the quantization residuals, and `Rounds.own`.
        """
        optimizer = self.inner_optimizer
        model = {name: each.detach().clone() for name, each in self._model_tensors().items()}
        inner = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
        return {
            "model": model,
            "optimizer": inner,
            "counts": self.rounds.own(),
            # not copied, because it is replaced and never written in place
            "residuals": list(self._residuals),
        }

    def take_own_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `own_state` returned, and clear gradients.

        Args:
            state: result of `own_state`.
        """
        self.rounds.take_own(state["counts"])
        self._residuals = list(state["residuals"])
        with torch.no_grad():
            for name, live in self._model_tensors().items():
                live.copy_(state["model"][name])
        if self.inner_optimizer is not None:
            self.inner_optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for each in (*self.model.parameters(), *self.outer):
            each.grad = None

    def others(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers and frozen parameters by name. These tensors are not averaged."""
        trained = set(self.names)
        return {name: each for name, each in self._model_tensors().items() if name not in trained}

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        return {name: each.detach() for name, each in found.items()}


class LocalSGD(DiLoCo):
    """Optimizer that implements Local SGD: workers average their parameters after every ``every`` local steps.

    This is `DiLoCo` with an outer SGD of learning rate 1 without momentum. Without ``optimizer``, commits do not
    contain the state of the optimizer.

    Args:
        model, optimizer, every, dtype: see `DiLoCo`.

    Example::

        local = elastic.LocalSGD(model, optimizer, every=20)
        state = elastic.TorchState(local=local, step=0)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        super().__init__(model, optimizer, every=every, dtype=dtype)
        self.outer_optimizer = torch.optim.SGD(self.outer, lr=1.0)


def lacking_islands(reports: Sequence[str], leaders: Sequence[int]) -> tuple[int, ...]:
    """Return the leaders of the islands that have fewer merges than others.

    Args:
        reports: reports of all ranks, see `Rounds.report`.
        leaders: leaders of all islands.
    """
    merges = {leader: sum(WorldReport.decoded(reports[leader]).merged) for leader in leaders}
    return tuple(leader for leader in leaders if merges[leader] < max(merges.values()))


def _check_sharded(dtype: torch.dtype | str | None, grace_s: float | None) -> None:
    if dtype in quantization.FORMATS:
        raise Invalid(
            f"dtype={dtype!r} is not supported with a model that fully_shard was applied to, whose quantization errors"
            " no rank would hold: pass dtype=torch.bfloat16"
        )
    if grace_s is not None:
        raise Invalid(
            "grace_s= is not supported with a model that fully_shard was applied to: omit grace_s="
        )


def _replica(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the model if it is a DDP module over an island, or None if it does not average its gradients.

    Raises:
        Invalid: the model averages its gradients with other workers.
    """
    replicas = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
    if not replicas:
        return None
    if replicas != [model] or not isinstance(model.process_group, IslandGroup):
        raise Invalid(
            "the model averages its own gradients over all workers, or contains a module that does: pass a plain"
            " torch.nn.Module, or DistributedDataParallel(model, process_group=elastic.island_group())"
        )
    return replicas[0]


def _reduce(buffer: torch.Tensor, name: str, op: Op, members: tuple[int, ...] | None) -> int:
    return submission.start_allreduce(
        [buffer], name, op, members=members, into=[buffer], pick=lambda results: results[0]
    )


def _check_quorum(
    grace_s: float | None, quorum: int | None, dtype: torch.dtype | str | None
) -> None:
    if quorum is not None and grace_s is None:
        raise Invalid(
            "quorum was given without grace_s: pass grace_s=, the seconds that a merge waits for late islands"
        )
    number = isinstance(grace_s, int | float) and not isinstance(grace_s, bool)
    if grace_s is not None and not (number and 0 < grace_s < math.inf):
        raise Invalid(f"grace_s is {grace_s!r}: pass a number of seconds greater than 0")
    if quorum is not None and (
        not isinstance(quorum, int) or isinstance(quorum, bool) or quorum < 1
    ):
        raise Invalid(f"quorum is {quorum!r}: pass an integer of 1 or more")
    if grace_s is not None and dtype is torch.float16:
        raise Invalid(
            "grace_s= is not supported with dtype=torch.float16, whose range weighted changes can exceed: pass"
            " dtype=torch.bfloat16"
        )


def _first(gathered: tuple[list[torch.Tensor], list[int]]) -> torch.Tensor:
    return gathered[0][0]


def _check_inner(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise Invalid if the inner optimizer averages gradients, or has parameters that do not belong to the model."""
    if optimizer is None:
        return
    if hasattr(optimizer, "skip_synchronize"):
        raise Invalid(
            "the inner optimizer is a DistributedOptimizer, which averages gradients over all workers in each step:"
            " pass the optimizer inside of it"
        )
    own = {id(each) for each in model.parameters()}
    stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if not stepped <= own:
        raise Invalid(
            f"the inner optimizer has {len(stepped - own)} parameters that do not belong to the model, and that would"
            " differ between workers: create the optimizer from model.parameters(), after the model is complete"
        )


def _world_of(rt: context.Context | None) -> WorldId | None:
    return None if rt is None else WorldId(rt.generation, id(rt))


def _context() -> context.Context | None:
    """Return the runtime, or None before ``init()``, when a worker trains alone."""
    try:
        return context.current()
    except NotInitialized:
        return None
