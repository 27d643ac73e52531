"""A persistent worker's world: it stands before the first call, and outlives a call that fails on some ranks. Acts.

In any other static job a broken collective ends the job, because half a program can't be undone. Here the program is a
sequence of calls, and a failed one is told to its caller. So a broken world is given up without a word to the driver,
and the ranks meet anew before the next call: see `calls.REGROUP`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic.collectives.interface import Op
from elastic.errors import CollectiveFailed, Invalid
from elastic.protocol.calls import Called
from elastic.ray.regroupings import Regroupings
from elastic.rendezvous import environment
from elastic.rendezvous.environment import Environment
from elastic.runtime import lifecycle
from elastic.runtime.link import Link
from elastic.runtime.recovery import Action, Cut, Phase, Recovery
from elastic.runtime.session import Session
from elastic.runtime.worker import Runtime


class ServedSession(Session):
    """``given_up`` is why collectives can't be called until the next world; empty where they can."""

    given_up = ""

    def give_up(self, reason: str, needed: Callable[[], bool] = lambda: True) -> None:
        """The present world is over; the driver is not told. From any thread. ``needed`` is asked under the lock."""

        def decide(recovery: Recovery) -> list[Action]:
            if not needed() or recovery.phase is not Phase.TRAINING:
                return []
            self.given_up = reason
            recovery.pause()
            return [Cut(recovery.generation, reason)]

        self.update(decide)

    def mark_broken(self, generation: int, reason: str, calls: tuple[Called, ...] = ()) -> None:
        if generation == self.recovery.generation:
            self.give_up(reason)

    @property
    def broken(self) -> bool:
        return bool(self.given_up) or super().broken

    def raise_if_broken(self) -> None:
        if self.given_up:
            raise CollectiveFailed(self.given_up)
        super().raise_if_broken()

    def why(self, error: CollectiveFailed) -> str:
        return self.given_up or super().why(error)


CALLED_OFF = "a call has failed on another rank"


class ServedRuntime(Runtime):
    """What a persistent worker asks of its world; see `serve_calls.CallWorld`."""

    def __init__(self, env: Environment, link: Link) -> None:
        self._served = ServedSession(env, link)
        self._regroupings = Regroupings()  # under the session's lock
        super().__init__(env, link, self._served)

    @property
    def rank(self) -> int:
        return self.place.rank

    def settle(self) -> None:
        """Waits until the driver has what a call has reported, within a bound: its value comes after that."""
        if self.reporting is not None:
            self.reporting.settle()

    def call_off(self) -> None:
        """From any thread. The present call has no future: what blocks in a collective raises. `regroup` comes next,
        on every rank.
        """
        self._served.give_up(CALLED_OFF, self._regroupings.tell)

    # ---- the next world, in the thread that makes the calls ------------------------------------------------------

    def regroup(self) -> None:
        """Meets the other ranks in a new world; all of them have to come. Raises DriverLost, JobOver."""
        with self._served.lock:
            to_meet = self._regroupings.begin()
        if to_meet:
            lifecycle.shutdown()
        lifecycle.init()

    def first_world(self) -> None:
        """In ``init()``. A function that calls it in a call that is called off may meet those that regroup already."""
        regroupings = self._regroupings
        if not regroupings.ahead:
            if self._served.recovery.phase is Phase.TRAINING:
                return  # met for the word that this rank acts on now
            self._meet()
        if regroupings.ahead or regroupings.over:
            self._served.give_up(CALLED_OFF, lambda: regroupings.over)
            raise CollectiveFailed(CALLED_OFF)

    def _meet(self) -> None:
        """All ranks in a new world. Raises DriverLost, JobOver, CollectiveFailed."""
        regroupings, session = self._regroupings, self._served
        with session.lock:
            regroupings.meet()
        session.given_up = ""
        largest = torch.tensor([regroupings.number], dtype=torch.int64, device="cpu")
        try:
            super().first_world()
            with self.guard("meeting the other ranks"):
                self.group("calls", largest.device).allreduce(largest, Op.MAX).wait()
        finally:
            with session.lock:
                regroupings.met(int(largest))


def join() -> ServedRuntime:
    """Joins the job that this process was started for, and its first world. Raises what ``init()`` raises."""
    env = environment.read()
    if env.driver is None:
        raise Invalid("no driver started this worker: it is for workers of elastic.ray.Executor")
    served = ServedRuntime(env, Link(env.driver, env.secret, env.worker, tls=env.tls))
    served.connect()
    lifecycle.adopt(served)
    lifecycle.init()
    return served
