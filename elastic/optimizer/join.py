"""`join`: lets a rank without more data contribute zeros to reductions until all ranks have joined.

The negotiation engine handles named collectives. The gradients of a DistributedOptimizer are not negotiated in every
step, so this module handles them: a joined rank always has a contribution of zeros pending for the first buffer of
every plan, and for the next agreement on a plan (see `gradients/plan_agreement.py`). Joined ranks therefore cause no
additional messages in the steps of other ranks.
"""

from __future__ import annotations

import gc
import time

import torch

from elastic.collectives import own_gpu
from elastic.collectives.interface import Collectives, Work
from elastic.context import Context
from elastic.errors import Invalid, StateMismatch
from elastic.negotiation import submission
from elastic.optimizer.gradients import (
    gradient_reducer,
    joined_rank,
    plan_agreement,
    plan_difference,
)
from elastic.optimizer.gradients.joined_rank import JoinedRank, Members
from elastic.runtime import lifecycle

# Shortest and longest polling interval in seconds. Polling is cheap for the other ranks: they wait for a joined rank
# only in the second and later buffers of a step.
SOON_S = 0.0002
LATER_S = 0.001
# interval in seconds between checks whether the other ranks are creating a group
FORMING_S = 0.05


def _is_divided() -> bool:
    # Use a generator: the variable of a for loop would keep a dropped optimizer alive.
    return any(hasattr(each.optimizer, "zero_order") for each in gradient_reducer.reducers())


def join(device: int = -1) -> int:
    """Wait until all ranks have joined, and return the last rank to join. Call this on a rank that has run out of data.

    Until then, this rank contributes zeros to the other ranks' allreduces (an average is still divided by the number of
    all ranks) and to the gradients of their DistributedOptimizers. This rank's own parameters, gradients and optimizers
    do not change. Other collectives raise TensorMismatch on the ranks that call them.

    Args:
        device: ignored. Zeros are created on the device of the other ranks' tensors.

    Raises:
        PeerLost: a rank was lost.
        StateMismatch: the other ranks' optimizers differ.
        Invalid: an optimizer of this rank has ``zero=1``.
        NotInitialized: ``init()`` was not called.
    """
    rt = lifecycle.current()
    if _is_divided():
        # Collect optimizers that the script has dropped, so that they are not counted.
        gc.collect()
    if _is_divided():
        raise Invalid(
            "join() can't be used with a DistributedOptimizer that has zero=1, because a joined rank does not"
            " update its part of the parameters: give all ranks the same number of batches"
        )
    own_gpu.settle()
    handle = submission.start_join()
    last: int | None = None
    shared: list[_SharedPlans] | None = None
    noted = False
    pause_s = SOON_S
    while True:
        # Leave the guard after each event, so that the driver receives this worker's progress.
        with rt.guard("join"):
            while not noted and not rt.broken:
                # As soon as this rank contributes zeros, other ranks can finish a reduction. Register the join first.
                noted = submission.join_noted(handle)
                if not noted:
                    time.sleep(SOON_S)
            if shared is None:  # From now on, the joined rank contributes zeros.
                shared = [_SharedPlans(rt, members) for members in _sharing_optimizers(rt)]
            while True:
                if last is None and submission.poll(handle):
                    last = submission.synchronize(handle)
                all_joined = last is not None
                moved = [plans.turn(time.monotonic(), all_joined) for plans in shared]
                if any(moved) or rt.broken:
                    pause_s = SOON_S
                    break
                if last is not None and all(plans.over for plans in shared):
                    return last
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.05, LATER_S)


def _sharing_optimizers(rt: Context) -> list[Members]:
    if rt.provisional or rt.place.size == 1:
        return []
    members = dict.fromkeys([None, *plan_agreement.every(rt)])
    for reducer in gradient_reducer.reducers():
        members.setdefault(reducer.members(rt))
    return [each for each in members if each is None or len(each) > 1]


class _SharedPlans:
    def __init__(self, rt: Context, members: Members) -> None:
        self._rt = rt
        self._members = members
        self._known = plan_agreement.of(rt, members)
        self._shadows = {
            agreed.number: JoinedRank(rt, agreed, members) for agreed in self._known.agreed
        }
        self._proposed: tuple[Collectives, torch.device, torch.Tensor, Work] | None = None
        self._nobody_proposes = False
        self._look_at = 0.0

    @property
    def over(self) -> bool:
        """Whether all ranks have joined."""
        waits = self._proposed is not None and not self._nobody_proposes
        return not waits and all(each.over for each in self._shadows.values())

    def turn(self, now: float, all_joined: bool) -> bool:
        """Take part in pending agreements and steps. Return whether there were any."""
        moved = self._proposed is None and self._look(now, all_joined)
        for each in self._shadows.values():
            if each.done():
                each.take()
                moved = True
        if self._proposed is not None and not self._nobody_proposes and self._proposed[3].done():
            self._take_part()
            moved = True
        return moved

    def _look(self, now: float, all_joined: bool) -> bool:
        if all_joined and not self._known.channel_open:
            # No rank will agree on another plan, and rank 0, which creates groups, may have exited.
            return False
        types = [joined_rank.CPU.type]
        if not self._known.agreed and torch.cuda.is_available():
            # The first plan is agreed on the device of its gradients, which may be a GPU.
            types.append("cuda")
        if not self._known.channel_open:
            if now < self._look_at:
                return False
            self._look_at = now + FORMING_S
            purpose = self._known.channel
            types = [each for each in types if self._rt.wanted(purpose, each, self._members)]
        for type in types:
            device = own_gpu.of(type)
            group = self._rt.group(self._known.channel, device, self._members)
            neutral = plan_agreement.vector(None, self._known.taken())
            self._proposed = (group, device, *joined_rank.propose(group, device, neutral))
            return True
        return False

    def _take_part(self) -> None:
        assert self._proposed is not None
        group, device, numbers, work = self._proposed
        work.wait()
        verdict = plan_agreement.verdict(numbers.tolist())
        if verdict.source is None:
            self._nobody_proposes = True
            return
        if verdict.again:
            neutral = plan_agreement.vector(None, self._known.taken())
            self._proposed = (group, device, *joined_rank.propose(group, device, neutral))
            return
        if not verdict.equal:
            found = plan_difference.find(group, device, verdict.source, None)
            raise StateMismatch(
                f"the optimizers of the active ranks differ: {plan_difference.words(found)}. Pass DistributedOptimizer"
                " the same parameters and options on every rank"
            )
        trained = joined_rank.compare_trained(group, device, [0] * verdict.greatest.parameters)
        parameters = sum(trained)
        if not verdict.same_order:
            joined_rank.share_order(group, device, verdict.source, None, parameters)
        if verdict.greatest.sparse:
            joined_rank.compare_sparse(group, device, {}, parameters)
        layout = joined_rank.receive_layout(group, device, verdict.source)
        number = self._known.number(verdict)
        before = self._shadows.get(number)
        while before is not None and not before.ended:
            before.take()
        agreed = self._known.record(number, layout, None)
        self._shadows[number] = JoinedRank(self._rt, agreed, self._members)
        self._proposed = None


__all__ = ["join"]
