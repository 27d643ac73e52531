"""The loop under ``@elastic.run``: form a world, bring the state to all, train, and again when the
world changes.

Interruptions reach user code only in the training thread: at a collective, an optimizer step or
synchronize, at ``commit()`` and ``check_host_updates()``. A user's own exception is never recovered
here: it ends this process, and the driver decides what that means for the others.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from elastic import runtime
from elastic.errors import Invalid, LeaveRequested, PeerLost, StateMismatch, WorldChanging
from elastic.horovod_errors import HorovodInternalError, HostsUpdatedInterrupt
from elastic.protocol import COPY, World
from elastic.runtime import Runtime
from elastic.state.state import State, has_custom_sync

Value = TypeVar("Value")


def run(func: Callable[..., Value]) -> Callable[..., Value]:
    """Decorates a training function whose first argument is a State; returns what the function
    returns.

    The function is called again after every change of the world, with the state of the last commit (after a failure)
    or the present one (after a planned change). Raises StateMismatch if this worker's state can't
    match the others', and whatever the function raises.
    """

    if not callable(func):
        raise Invalid(f"elastic.run decorates a function, not a {type(func).__name__}")

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Value:
        if not isinstance(state, State):
            raise Invalid(
                f"the first argument of a function under elastic.run is a State, not a"
                f" {type(state).__name__}; pass TorchState(model=..., optimizer=...)"
            )
        rt = runtime.current()
        rt.enter()
        try:
            return _train(rt, func, state, args, kwargs)
        except LeaveRequested as end:
            if rt.lost_driver:
                print(f"elastic: {end}", file=sys.stderr)
            sys.exit(0 if rt.asked_to_leave else 1)
        except StateMismatch:
            raise
        except Exception as error:
            # The traceback is worded before the process ends, because the driver quotes it if the
            # job fails.
            rt.raised(f"{type(error).__name__}: {error}", traceback.format_exc())
            raise
        finally:
            rt.leave()

    return wrapper


def _train(rt: Runtime, func: Callable[..., Value], state: State, args: Any, kwargs: Any) -> Value:
    first = True
    while True:
        try:
            _enter_world(rt, state, first=first)
            first = False
            value = func(state, *args, **kwargs)
            rt.returned()
            return value
        except (PeerLost, HorovodInternalError, HostsUpdatedInterrupt) as error:
            if not isinstance(error, PeerLost):
                # Raised by user code, at a place that the driver knows nothing of: as any failure.
                rt.fail_world(f"{type(error).__name__}: {error}")
            rt.mark_raised()
            rt.drain()
            if not state.valid():
                rt.forget_commit()
            elif state.held_back():
                rt.step_back()
            state.restore()
            rt.mark_restored()
        except WorldChanging:
            rt.mark_raised()
            # Unchanged since commit(), or the state at check_host_updates(): a planned change loses
            # nothing.
            state.save()
            rt.committed()
            state.report_commit()
            rt.mark_restored()
        if rt.alone and rt.place.size == 1:
            state.on_reset()


def _enter_world(rt: Runtime, state: State, *, first: bool) -> None:
    """Waits for a world and brings the state to those of its members that lack it. Raises
    PeerLost.
    """
    if rt.alone:
        if first:
            state.sync()
        return
    text = state.layout()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
    world = rt.next_world(digest, text)
    if first:
        state.reset()
    else:
        state.on_reset()
    copied = 0
    if has_custom_sync(state):
        state.sync()
    else:
        copied = _copy_state(rt, state, world)
    rt.adopt(copied)
    if copied:
        rt.report_digest(state.digest(), 0)


def _copy_state(rt: Runtime, state: State, world: World) -> int:
    """Rank 0 sends to the ranks that lack the newest commit; the others go on at once. Returns
    bytes copied.
    """
    size, rank = world.place.size, world.place.rank
    lacking = range(max(1, world.holders), size)
    if world.holders == 0:
        state.save()  # the first world: what rank 0 holds now is where all begin
    if rank != 0 and rank not in lacking:
        return 0
    if not lacking:
        return 0
    group = rt.group("state", torch.device("cpu"), (0, *lacking))
    with rt.guard(COPY):
        copied = state.transfer(group, root=0)
    if rank != 0:
        state.save()
        state.reset()  # samplers divide what is left among the ranks of this world
    return copied
