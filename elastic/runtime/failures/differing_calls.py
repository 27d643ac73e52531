"""Exchange in which the ranks of a group compare calls that may differ between them. See `calls`."""

from __future__ import annotations

import msgspec

from elastic.errors import CollectiveFailed, Differing
from elastic.protocol.calls import Called
from elastic.rendezvous.store import Store

# timeout of the exchange in seconds; short, because all ranks are already in a collective
EXCHANGE_S = 2.0


def of_all(store: Store | None, group: Differing, mine: Called) -> list[Called]:
    """Return the calls of all ranks of the group, by rank.

    If the other ranks do not answer within the timeout, only this rank's call is returned.
    """
    if store is None or not group.key:
        return [mine]
    try:
        answers = store.exchange(
            f"{group.key}/calls", group.rank, group.size, msgspec.msgpack.encode(mine), EXCHANGE_S
        )
        return [msgspec.msgpack.decode(each, type=Called) for each in answers]
    except (CollectiveFailed, msgspec.MsgspecError):
        return [mine]
