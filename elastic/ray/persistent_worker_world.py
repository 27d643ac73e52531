"""World of a persistent worker. It is formed before the first call, and formed again after a call that failed.

In other static jobs, a failed collective ends the job, because a partly executed script cannot be undone. Calls to
persistent workers are independent of each other, and a failed call is reported to its caller. The ranks therefore
abandon a failed world without notifying the driver, and rendezvous again before the next call: see
`call_results.REGROUP`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic.collectives.interface import Op
from elastic.errors import CollectiveFailed, Invalid
from elastic.protocol.calls import Called
from elastic.ray.world_after_failed_call import Regroupings
from elastic.rendezvous import worker_settings
from elastic.rendezvous.worker_settings import Environment
from elastic.runtime import lifecycle
from elastic.runtime.driver_connection import Link
from elastic.runtime.recovery import AbortGroups, Action, Phase, Recovery
from elastic.runtime.session import Session
from elastic.runtime.worker_runtime import WorkerRuntime


class ServedSession(Session):
    """Session whose world can be abandoned without ending the job.

    Args:
        given_up: reason why collectives fail until the next world. Empty if collectives are possible.
    """

    given_up = ""

    def give_up(self, reason: str, needed: Callable[[], bool] = lambda: True) -> None:
        """Abandon the current world without notifying the driver. Thread-safe.

        Args:
            reason: reason to state in the errors of collectives.
            needed: function that returns whether to abandon the world. Called under the lock.
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
    """Runtime of a persistent worker. See `persistent_worker.CallWorld`."""

    def __init__(self, env: Environment, link: Link) -> None:
        self._served = ServedSession(env, link)
        self._regroupings = Regroupings()  # guarded by the session's lock
        super().__init__(env, link, self._served)

    @property
    def rank(self) -> int:
        return self.place.rank

    def settle(self) -> None:
        """Wait, for a limited time, until the driver has received a call's reports.

        This method is called before the call's value is sent.
        """
        if self.reporting is not None:
            self.reporting.settle()

    def call_off(self) -> None:
        """Cancel the current call: blocking collectives raise an error. Thread-safe.

        Every rank must then call `regroup`.
        """
        self._served.give_up(CALLED_OFF, self._regroupings.receive)

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
        """Join a world, when ``init()`` is called.

        Raises CollectiveFailed if the current call was cancelled, because the ranks received a request to regroup.
        """
        regroupings = self._regroupings
        if not regroupings.ahead:
            if self._served.recovery.phase is Phase.TRAINING:
                return  # The rendezvous formed the world for the request that this rank acts on.
            self._meet()
        if regroupings.ahead or regroupings.over:
            self._served.give_up(CALLED_OFF, lambda: regroupings.over)
            raise CollectiveFailed(CALLED_OFF)

    def _meet(self) -> None:
        """Rendezvous with all other ranks and form a new world.

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
    """Join this process's job and enter its first world. Raises the same exceptions as ``init()``."""
    env = worker_settings.read()
    if env.driver is None:
        raise Invalid(
            "this process was not started by a driver: start workers through elastic.ray.Executor"
        )
    served = ServedRuntime(env, Link(env.driver, env.secret, env.worker, tls=env.tls))
    served.connect()
    lifecycle.adopt(served)
    lifecycle.init()
    return served
