"""Selection of the islands that take part in a merge: all of them, or a quorum after a grace period.

Pure: no I/O, no clock.

Each leader notifies all leaders when its island has sent its change, and again when the subsequent grace period is
over. All leaders receive the same notifications in the same order (see `elastic.negotiation.coordinator`), so all make
the same decision without a further message.

    notifications, quorum 2 of 3 islands:   sent by a   sent by c   expired   sent by b
    decision:                                                       a and c   (ignored: it takes part in the next merge)
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elastic.errors import Invalid


class Notification(msgspec.Struct, frozen=True, array_like=True):
    """Message from one leader to all leaders about the current merge."""

    merge: int  # number of the merge, counted from the start of the job
    leader: int  # rank of the sender
    # True if the grace period is over, False if the island has sent its change
    expired: bool = False
    weighted: bool = False  # whether the script of the sender reports tokens


def needed(quorum: int | None, islands: int) -> int:
    """Return the number of islands that a merge needs.

    This is ``quorum``, but at most all islands. Default: half of the islands, rounded up.
    """
    return min((islands + 1) // 2 if quorum is None else quorum, islands)


def absence(merge: int, absent: Sequence[str], before: Sequence[str], grace_s: float) -> str:
    """Return the log line for a merge, or "" if its absent islands are those of the previous merge."""
    if set(absent) == set(before):
        return ""
    if not absent:
        return f"merge {merge} contains the changes of all islands again"
    names = ", ".join(sorted(absent))
    return (
        f"merge {merge} does not contain the changes of islands {names}, which were not sent within {grace_s:g} s: they"
        " are part of a later merge"
    )


class Attendance:
    """Record of the islands that have sent their change for the current merge.

    Args:
        leaders: ranks of the leaders.
        quorum: number of islands that suffice after the grace period. See `needed`.
        merge: number of the first merge.

    Attributes:
        merge: number of the current merge.
        sent: leaders of the islands that have sent their change for it, and whether their scripts report tokens.
        expired: whether the grace period of the current merge is over.
    """

    def __init__(self, leaders: Sequence[int], quorum: int | None, merge: int) -> None:
        self._leaders = tuple(leaders)
        self.needed = needed(quorum, len(leaders))
        self.merge = merge
        self.sent: dict[int, bool] = {}
        self.expired = False

    @property
    def waits(self) -> bool:
        """Whether the grace period is over, but the quorum is not reached."""
        return self.expired and len(self.sent) < self.needed

    def receive(self, notification: Notification) -> tuple[int, ...] | None:
        """Record a notification.

        If it decides the merge, return the participating leaders in ascending order, else None.

        After a decision, the next merge is the current one.

        Raises:
            Invalid: the scripts of only some of the islands report tokens.
        """
        if notification.merge != self.merge:
            return None  # The merge was already decided without this island.
        if notification.expired:
            self.expired = True
        else:
            self.sent[notification.leader] = notification.weighted
        wanted = self.needed if self.expired else len(self._leaders)
        if len(self.sent) < wanted:
            return None
        if len({*self.sent.values()}) > 1:
            raise Invalid(
                "only some workers report tokens, so islands can't be weighted: pass tokens= to step() on all workers,"
                " or on none"
            )
        decided = tuple(sorted(self.sent))
        self.merge += 1
        self.sent, self.expired = {}, False
        return decided
