"""Tracking of preemption notices for an agent's machine, from a cloud provider or SIGTERM. Performs I/O."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from elastic.driver.agents.messages import Attach
from elastic.driver.events import Notice
from elastic.driver.launch.worker_environment import without_secrets
from elastic.driver.output_interfaces import Log
from elastic.driver.preemption.watch import Watch

# The agent exits this many seconds before the expected SIGKILL, or after half of the grace period between SIGTERM and
# SIGKILL if that is later.
LAST_S = 5.0


class HostPreemption:
    """Tracker of the preemption of one machine.

    Args:
        host: name of the machine.
        grace_s: seconds from SIGTERM to SIGKILL.
        changed: called when the notice changes.
        end: ends the agent after SIGTERM. Called with a reason.
        log: called with the level and the text of each log line.
    """

    def __init__(
        self,
        host: str,
        *,
        grace_s: float,
        changed: Callable[[], None],
        end: Callable[[str], None],
        log: Log,
    ) -> None:
        self._host = host
        # seconds after SIGTERM within which the workers must leave
        self._leave_s = max(grace_s - LAST_S, grace_s / 2)
        self._changed = changed
        self._end = end
        self._log = log
        self._watch: Watch | None = None
        self._watches = ""
        self._signal_reason = ""  # reason for the workers to leave; empty before SIGTERM
        self._end_by = 0.0

    def watch(self, attach: Attach) -> None:
        """Watch the source of preemption notices that the driver has requested in ``attach``."""
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
        """Return the current preemption notice, with the remaining time, or None."""
        if self._signal_reason:
            left_s = self._end_by - asyncio.get_running_loop().time()
            return Notice(self._signal_reason, max(0.0, left_s))
        return None if self._watch is None else self._watch.notice

    def handle_signal(self, signal: str) -> bool:
        """Handle a signal after which workers get time to leave. Return False if one was already handled."""
        if self._signal_reason:
            return False
        loop = asyncio.get_running_loop()
        self._signal_reason = f"its agent received {signal}"
        self._end_by = loop.time() + self._leave_s
        loop.call_later(self._leave_s, self._end, f"{signal}, {self._leave_s:g} s ago")
        self._changed()
        return True

    def all_workers_exited(self) -> None:
        """Handle the exit of the last worker."""
        if self._signal_reason:
            self._end(self._signal_reason)
        elif self._watch is not None:
            self._watch.released()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
