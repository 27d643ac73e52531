"""Actions with which a driver starts workers and publishes worlds, for tests of what reads events and actions."""

from __future__ import annotations

from elastic.driver.events import Member, PublishWorld, StartWorker
from elastic.driver.membership.scheduling.rank_order import places
from elastic.driver.reasons import Reason, as_sentence
from elastic.protocol.messages import Address, Commit, Worker

STORE = Address("h", 1)
WHY = as_sentence("because")


def starts(*workers: Worker, reason: Reason = WHY) -> list[StartWorker]:
    """Return the starts of workers, at the places that they have in a world of their own."""
    ranked = zip(workers, places(list(workers)), strict=True)
    return [StartWorker(worker, place, reason) for worker, place in ranked]


def published(
    generation: int,
    *workers: Worker,
    holders: int = 1,
    commit: Commit | None = None,
    store: Address = STORE,
    reason: Reason = WHY,
) -> PublishWorld:
    """Return a world of workers in rank order, the first ``holders`` of which hold the commit."""
    members = list(map(Member, workers, places(list(workers))))
    return PublishWorld(generation, members, store, holders, commit, reason)
