"""The world of a persistent worker. It is formed before the first call, and survives calls that fail on some ranks.

In other static jobs, a failed collective ends the job, because a partly executed script cannot be undone. Here each
call is separate, and a failed call is reported to its caller. A failed world is therefore abandoned without notifying
the driver, and the ranks rendezvous again before the next call: see `call_results.REGROUP`.
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
from elastic.runtime.recovery import AbortGroups, Action, Phase, Recovery
from elastic.runtime.session import Session
from elastic.runtime.worker_runtime import WorkerRuntime


class ServedSession(Session):
    """Session whose world can be abandoned without ending the job.

    Args:
        given_up: reason why collectives are not possible until the next world. Empty if they are possible.
    """

    given_up = ""

    def give_up(self, reason: str, needed: Callable[[], bool] = lambda: True) -> None:
        """End the current world without notifying the driver. Thread-safe.

        Args:
            reason: reason for the errors of collectives.
            needed: returns whether to end the world. Called under the lock.
        """

        def decide(recovery: Recovery) -> list[Action]:
            if not needed() or recovery.phase is not Phase.TRAINING:
                return []
            self.given_up = reason
            recovery.pause()
            return [AbortGroups(recovery.generation, reason)]

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


class ServedRuntime(WorkerRuntime):
    """Runtime of a persistent worker. See `serve_calls.CallWorld`."""

    def __init__(self, env: Environment, link: Link) -> None:
        self._served = ServedSession(env, link)
        self._regroupings = Regroupings()  # guarded by the lock of the session
        super().__init__(env, link, self._served)

    @property
    def rank(self) -> int:
        return self.place.rank

    def settle(self) -> None:
        """Wait, up to a limit, until the driver has received the reports of a call, before its value is sent."""
        if self.reporting is not None:
            self.reporting.settle()

    def call_off(self) -> None:
        """Cancel the current call, so that blocking collectives raise. Thread-safe. Every rank then calls `regroup`."""
        self._served.give_up(CALLED_OFF, self._regroupings.tell)

    # ---- the next world, in the calling thread -------------------------------------------------------------------

    def regroup(self) -> None:
        """Form a new world with all other ranks.

        Raises:
            DriverLost: the worker lost its connection to the driver.
            JobOver: the job has failed.
        """
        with self._served.lock:
            to_meet = self._regroupings.begin()
        if to_meet:
            lifecycle.shutdown()
        lifecycle.init()

    def first_world(self) -> None:
        """Enter a world in ``init()``. In a cancelled call, the other ranks may already be regrouping."""
        regroupings = self._regroupings
        if not regroupings.ahead:
            if self._served.recovery.phase is Phase.TRAINING:
                return  # The world was formed for the request that this rank acts on.
            self._meet()
        if regroupings.ahead or regroupings.over:
            self._served.give_up(CALLED_OFF, lambda: regroupings.over)
            raise CollectiveFailed(CALLED_OFF)

    def _meet(self) -> None:
        """Form a new world of all ranks.

        Raises:
            DriverLost: the worker lost its connection to the driver.
            JobOver: the job has failed.
            CollectiveFailed: a rank was lost while the world formed.
        """
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
    """Join this process's job and its first world. Raises the same errors as ``init()``."""
    env = environment.read()
    if env.driver is None:
        raise Invalid(
            "this process was not started by a driver: start workers through elastic.ray.Executor"
        )
    served = ServedRuntime(env, Link(env.driver, env.secret, env.worker, tls=env.tls))
    served.connect()
    lifecycle.adopt(served)
    lifecycle.init()
    return served
