"""Monitor of the sources of preemption notices for this machine, each in a separate thread. Makes no decisions.

With ``auto``, the available sources are detected once. If there are none, nothing is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping

from elastic.driver.events import Notice
from elastic.driver.output_interfaces import Log
from elastic.driver.preemption.aws import Aws
from elastic.driver.preemption.azure import Azure
from elastic.driver.preemption.command import Command
from elastic.driver.preemption.google_cloud import GoogleCloud
from elastic.driver.preemption.slurm import Slurm
from elastic.driver.preemption.source import NoticeSource, PreemptionNotice, SourceError
from elastic.errors import Invalid

AUTO, OFF = "auto", "off"
NAMED: dict[str, Callable[[Mapping[str, str]], NoticeSource]] = {
    "aws": Aws,
    "gcp": GoogleCloud,
    "azure": Azure,
    "slurm": Slurm,
}
FAILS = 5  # number of consecutive failures after which the problem is logged
LONGEST_PAUSE_S = 30.0  # maximum interval between queries after failures, in seconds
SAME_S = 2.0  # two end times that differ by fewer seconds count as equal


def check(wanted: str) -> None:
    """Raise Invalid if the value of ``--preemption`` is neither a known source nor a command."""
    if not wanted.strip():
        raise Invalid("--preemption is empty: pass auto, aws, gcp, azure, slurm, a command, or off")
    if wanted in (AUTO, OFF, *NAMED) or " " in wanted or os.sep in wanted:
        return
    if shutil.which(wanted) is None:
        raise Invalid(
            f"--preemption is {wanted}, which is neither one of auto, aws, gcp, azure, slurm and off, nor the"
            " path of a command: pass one of these, or a command with its path"
        )


class Watch:
    """Monitor of the preemption notices for one machine.

    ``changed`` is called in the event loop's thread, with the current notice or None.
    """

    def __init__(
        self,
        wanted: str,
        *,
        changed: Callable[[Notice | None], None],
        log: Log,
        environ: Mapping[str, str],
    ) -> None:
        self._wanted = wanted
        self._changed = changed
        self._log = log
        self._environ = environ
        self._standing: dict[str, PreemptionNotice] = {}  # current notices, by source
        self._over = threading.Event()
        self._released = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._catches_signals = False

    def begin(self) -> None:
        if self._wanted == OFF:
            return
        for source in self._candidates():
            name = f"preemption-{source.name}"
            threading.Thread(target=self._run, args=(source,), name=name, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        if self._catches_signals:
            self._loop.remove_signal_handler(signal.SIGUSR1)

    @property
    def notice(self) -> Notice | None:
        """Current notice with the remaining time, or None.

        If there are several notices, it is the one with the earliest end.
        """
        if not self._standing:
            return None
        now = time.time()
        first = min(self._standing.values(), key=lambda e: float("inf") if e.at is None else e.at)
        return Notice(first.text, None if first.at is None else max(0.0, first.at - now))

    def released(self) -> None:
        """Acknowledge the current notices, because no worker runs on this host any longer."""
        if self._standing:
            self._released.set()

    # ---- source threads --------------------------------------------------------------------------------------------

    def _candidates(self) -> list[NoticeSource]:
        if self._wanted in NAMED:
            factories: list[Callable[[Mapping[str, str]], NoticeSource]] = [NAMED[self._wanted]]
        elif self._wanted == AUTO:
            factories = [*NAMED.values()]
        else:
            return [Command(self._wanted, self._environ)]
        sources = []
        for factory in factories:
            try:
                source = factory(self._environ)
            except SourceError as error:
                self._log("warning", f"preemption notices are not watched: {error}")
                continue
            if isinstance(source, Slurm) and source.here():
                self._catch_signals(source)
            sources.append(source)
        return sources

    def _catch_signals(self, slurm: Slurm) -> None:
        # Setting a signal handler fails outside the main thread.
        with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
            self._loop.add_signal_handler(signal.SIGUSR1, slurm.signalled)
            self._catches_signals = True

    def _run(self, source: NoticeSource) -> None:
        if not source.here():
            if self._wanted != AUTO:
                text = "does not respond to requests for preemption notices; retrying"
                self._call_in_loop(self._log, "warning", f"{source.name} {text}")
            else:
                return
        self._call_in_loop(
            self._log, "debug", f"watching for preemption notices from {source.name}"
        )
        failed = 0
        while not self._over.is_set():
            try:
                ends = source.look()
                if self._released.is_set() and ends is not None:
                    source.released()
                    self._released.clear()
                if failed >= FAILS:
                    self._call_in_loop(self._log, "info", f"{source.name} answers again")
                failed = 0
                self._call_in_loop(self._update, source.name, ends)
            except SourceError as error:
                failed += 1
                if failed == FAILS:
                    text = f"preemption notices from {source.name} can't be read: {error}; retrying"
                    self._call_in_loop(self._log, "warning", text)
            hint = source.hint()
            if hint:
                self._call_in_loop(self._log, "warning", hint)
            self._over.wait(min(LONGEST_PAUSE_S, source.pause_s * 2 ** min(failed, 10)))

    def _call_in_loop(self, what: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(what, *args)

    # ---- event loop's thread ---------------------------------------------------------------------------------------

    def _update(self, name: str, ends: PreemptionNotice | None) -> None:
        before = self._standing.get(name)
        if self._over.is_set() or ends == before:
            return
        if ends is not None and before is not None and _same(ends, before):
            return
        if ends is None:
            del self._standing[name]
            if not self._standing:
                # Discard an acknowledgement that was not sent, because its notice was withdrawn.
                self._released.clear()
        else:
            self._standing[name] = ends
        self._changed(self.notice)


def _same(one: PreemptionNotice, other: PreemptionNotice) -> bool:
    if one.text != other.text or one.at is None or other.at is None:
        return one == other
    return abs(one.at - other.at) < SAME_S
