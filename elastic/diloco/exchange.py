"""Merges between the leaders of islands, without waiting for late islands.

`attendance` decides which islands take part.

The engine's thread receives the notifications of the other leaders while the script computes. It starts the collectives
of a merge when the merge is decided: with the change of this island, or with zeros of weight 0 if the island is absent,
so that all ranks run the same collectives. The script takes the result later.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from elastic.context import Context
from elastic.diloco.attendance import Attendance, Notification
from elastic.diloco.rounds import Decisions
from elastic.errors import CollectiveFailed, Invalid
from elastic.negotiation.messages import ALL, NOTIFY, Members, Request
from elastic.negotiation.pending import Pending

# Maximum number of decided merges whose results this rank buffers for its script, because each takes the memory of a
# fragment. If the buffer is full, the other ranks wait for the script.
MOST_HELD = 8
NAME = "diloco"

_CHECK_S = 0.05  # interval in seconds at which `wait` checks whether the world has ended


@dataclass
class DecidedMerge:
    """Merge whose participating islands are decided.

    Attributes:
        present: leaders of the islands in the mean.
        collectives: the collectives of the merge, or None until they are started.
    """

    present: tuple[int, ...]
    collectives: list[Pending] | None = None


class QuorumExchange:
    """The merges of one world, as seen by one leader.

    Args:
        rt: the runtime.
        leaders: ranks of all leaders.
        attendance: the decisions, beginning with the next merge.
        grace_s: seconds for which a merge waits for late islands, counted from the first change that is sent for the
            merge.
        zeros: called with the number of a merge and the leaders. Returns its collectives for an absent island.

    Raises:
        CollectiveFailed: the world has ended.
    """

    def __init__(
        self,
        rt: Context,
        leaders: tuple[int, ...],
        attendance: Attendance,
        grace_s: float,
        zeros: Callable[[int, Members], list[Pending]],
    ) -> None:
        self._rank = rt.place.rank
        self.members: Members = ALL if len(leaders) == rt.place.size else leaders
        self._leaders = leaders
        self._attendance = attendance
        self._grace_s = grace_s
        self._zeros = zeros
        self._engine = rt.engine()
        self._changed = threading.Condition(threading.RLock())  # guards all fields below
        self._merges: dict[int, DecidedMerge] = {}
        self._offered: tuple[int, list[Pending]] | None = None
        self._timer: threading.Timer | None = None
        self._error: Exception | None = None
        self._engine.listen(self._receive)

    # ---- calls of the script's thread ------------------------------------------------------------

    def send(self, merge: int, collectives: list[Pending], weighted: bool) -> None:
        """Send this island's change for a merge, unless the merge was already decided without it."""
        with self._changed:
            if merge < self._attendance.merge or self._offered is not None:
                return
            self._offered = merge, collectives
            self._timer = threading.Timer(self._grace_s, self._expire, (merge,))
            self._timer.daemon = True
            self._timer.start()
        self._notify(Notification(merge, self._rank, weighted=weighted))

    def decisions(self, merge: int) -> Decisions:
        """Return the leaders' decisions, beginning with merge number ``merge``.

        Raises:
            Invalid: see `Attendance.receive`.
        """
        with self._changed:
            self._raise_error()
            decided = self._attendance.merge - merge
            return Decisions(decided, bool(self._attendance.sent))

    def wait(self, merge: int) -> DecidedMerge:
        """Wait until a merge is decided, and return it. Its collectives may still be running.

        Raises:
            CollectiveFailed: the world has ended.
            Invalid: see `Attendance.receive`.
        """
        with self._changed:
            while merge not in self._merges:
                self._raise_error()
                if self._engine.failed:
                    raise CollectiveFailed(
                        "the world has ended: exchange again in the next world", aborted=True
                    )
                self._changed.wait(_CHECK_S)
            found = self._merges.pop(merge)
            if found.collectives is None:
                self._start(merge, found)
            for number, each in sorted(self._merges.items()):
                if each.collectives is None and number - merge <= MOST_HELD:
                    self._start(number, each)
            return found

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # ---- callbacks in the threads of the engine and the timer ------------------------------------

    def _receive(self, request: Request) -> None:
        if not request.name.startswith(f"{NOTIFY}.{NAME}."):
            return
        with self._changed:
            try:
                notification = msgspec.json.decode(request.payload, type=Notification)
                number = self._attendance.merge
                present = self._attendance.receive(notification)
                if present is not None:
                    self._decided(number, present)
                elif notification.expired and self._attendance.waits:
                    self._log_wait()
            except CollectiveFailed:
                pass  # The script's thread raises this error.
            except (Invalid, msgspec.MsgspecError) as error:
                self._error = error if isinstance(error, Invalid) else Invalid(str(error))
            self._changed.notify_all()

    def _decided(self, number: int, present: tuple[int, ...]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        made = self._merges[number] = DecidedMerge(present)
        if len(self._merges) <= MOST_HELD:
            self._start(number, made)

    def _start(self, number: int, merge: DecidedMerge) -> None:
        if self._rank in merge.present:
            assert self._offered is not None and self._offered[0] == number
            merge.collectives = self._offered[1]
        else:
            merge.collectives = self._zeros(number, self.members)
        if self._offered is not None and self._offered[0] <= number:
            self._offered = None
        for each in merge.collectives:
            self._engine.submit(each, soon=False)

    def _expire(self, merge: int) -> None:
        with contextlib.suppress(CollectiveFailed):
            self._notify(Notification(merge, self._rank, expired=True))

    def _notify(self, notification: Notification) -> None:
        what = "expired" if notification.expired else "sent"
        name = f"{NOTIFY}.{NAME}.{notification.merge}.{what}.{self._rank}"
        payload = msgspec.json.encode(notification).decode()
        pending = Pending(NOTIFY, name, self.members, (), torch.device("cpu"), payload=payload)
        self._engine.submit(pending, soon=False)

    def _log_wait(self) -> None:
        if self._rank != self._leaders[0]:
            return
        sent = len(self._attendance.sent)
        print(
            f"elastic: diloco: merge {self._attendance.merge} waits for a quorum: {sent} of {len(self._leaders)}"
            f" islands have sent their changes within {self._grace_s:g} s, {self._attendance.needed} are needed",
            file=sys.stderr,
            flush=True,
        )
