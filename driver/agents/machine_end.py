"""What an agent knows of the end of its machine: announced by the machine's cloud, or by SIGTERM. Acts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from elastic.driver.agents.messages import Attach
from elastic.driver.events import Notice
from elastic.driver.launch.environment import without_secrets
from elastic.driver.preemption.watch import Watch
from elastic.driver.sinks import Log

# Before it is killed an agent ends by itself; where there is less time, after half of it.
LAST_S = 5.0


class MachineEnd:
    """``grace_s``: from SIGTERM to SIGKILL. ``changed``: another notice stands, or none. ``end``: the agent is to end,
    and why.
    """

    def __init__(
        self,
        host: str,
        *,
        grace_s: float,
        changed: Callable[[], None],
        end: Callable[[int, str], None],
        log: Log,
    ) -> None:
        self._host = host
        self._leave_s = max(grace_s - LAST_S, grace_s / 2)  # from SIGTERM on
        self._changed = changed
        self._end = end
        self._log = log
        self._watch: Watch | None = None
        self._watches = ""
        self._told = ""  # by SIGTERM
        self._end_by = 0.0

    def watch(self, attach: Attach) -> None:
        """As this driver wishes."""
        if self._watch is not None:
            if self._watches == attach.preemption:
                return
            self._watch.close()
        self._watches = attach.preemption
        own = {**without_secrets(os.environ), "ELASTIC_HOST": self._host}
        environ = {**attach.slurm, **own}
        self._watch = Watch(
            attach.preemption,
            changed=lambda notice: self._changed(),
            log=self._log,
            environ=environ,
        )
        self._watch.begin()

    @property
    def notice(self) -> Notice | None:
        """What stands, with the time that is left."""
        if self._told:
            left_s = self._end_by - asyncio.get_running_loop().time()
            return Notice(self._told, max(0.0, left_s))
        return None if self._watch is None else self._watch.notice

    def told(self, signal: str) -> bool:
        """By a signal, which leaves the workers time to leave. False: it was told before."""
        if self._told:
            return False
        loop = asyncio.get_running_loop()
        self._told = f"its agent received {signal}"
        self._end_by = loop.time() + self._leave_s
        loop.call_later(self._leave_s, self._end, 0, f"{signal}, {self._leave_s:g} s ago")
        self._changed()
        return True

    def nobody_left(self) -> None:
        """The last worker has gone."""
        if self._told:
            self._end(0, self._told)
        elif self._watch is not None:
            self._watch.released()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
