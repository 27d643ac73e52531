"""Random selection of the shards that two ranks compute, and the vote if their results differ.

Pure: no I/O, no clock.

All ranks compute the schedule without communication, from the seed of the shards, the generation and the step. In a
step with checks, one shard of each rank is computed again by another rank, so that no rank waits for a rank with more
shards to verify. Steps with checks are evenly spaced. For each such step, the checked shard of each rank and the rank
that checks it are selected pseudorandomly. Over many steps, every worker therefore checks every shard of every other
worker.

A shard with an infinite, NaN or unusually large gradient is checked in any step, before the gradients are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from elastic.data.seeds import seed_of

Held = Sequence[Sequence[int]]  # the shards that each rank computes
NOT_FINITE = -1  # replaces the digest of gradients that contain an infinity or NaN
TOO_LARGE = -2  # replaces the digest of gradients that exceed the limit of the step
MARGIN = 10  # binary orders of magnitude by which a gradient may exceed the largest one of the previous step
NONE = -(1 << 31)  # replaces the binary exponent of 0.0 and of infinity
# Number of steps with checks that are repeated after a return to an older commit. Each such step compares two of a
# rank's computations with another rank's, so a rank that computes one result in four wrong is detected within these
# steps with a probability of 99 %.
COVERED = 8


class ShardCheck(NamedTuple):
    """Check of one shard: two ranks compute its gradients, which are compared."""

    shard: int
    owner: int
    second: int  # the rank that computes the shard a second time


class Computed(NamedTuple):
    """Computation of a shard by one rank, with the digest of the gradients."""

    rank: int
    digest: int


class VoteResult(NamedTuple):
    """Result of a vote about the gradients of a shard.

    Attributes:
        culprits: ranks whose gradients were wrong at least once. Empty if they are unknown.
        right: digest of the correct gradients, or None if unknown.
    """

    culprits: tuple[int, ...]
    right: int | None


def unit(held: Held, share: float) -> int:
    """Return the number of shards that are checked in the same step.

    The result is the number of ranks with shards if fewer shards than that are checked per step on average, and 1
    otherwise.

    Args:
        held: shards of each rank.
        share: fraction of the shards of a step that are checked on average.
    """
    owners = sum(map(bool, held))
    return owners if share * sum(map(len, held)) < owners else 1


def steps_between(held: Held, share: float) -> float:
    """Return the mean number of steps from one step with checks to the next.

    The result is at least 1.0, and infinity without checks.
    """
    rate = share * sum(map(len, held)) / unit(held, share) if len(held) > 1 else 0.0
    return max(1.0, 1.0 / rate) if rate else math.inf


def window(held: Held, share: float) -> int:
    """Return the number of steps, up to the detection of a faulty rank, whose gradients are unreliable.

    0 means that all gradients were compared.
    """
    between = steps_between(held, share)
    return 0 if share >= 1.0 or math.isinf(between) else math.ceil(COVERED * between)


def exponent(largest: float) -> int:
    """Return the exponent of the next power of two above a number. Return NONE for 0.0 and infinity."""
    return math.frexp(largest)[1] if 0.0 < largest < math.inf else NONE


def limit(usual: int) -> float:
    """Return the largest gradient that does not trigger a check.

    Args:
        usual: exponent of the largest gradient in the previous step.
    """
    return math.inf if usual == NONE or usual + MARGIN > 1023 else 2.0 ** (usual + MARGIN)


def judged(digest: int, largest: float, limit: float) -> int:
    """Return the number that represents the gradients of a pass in comparisons.

    This is their digest if they are finite and within the limit, otherwise NOT_FINITE or TOO_LARGE.
    """
    return NOT_FINITE if math.isinf(largest) else TOO_LARGE if largest > limit else digest


def rechecks(
    found: Sequence[tuple[int, int]], ranks: int, seed: int, generation: int, step: int
) -> tuple[ShardCheck, ...]:
    """Return the checks of shards with suspicious gradients: infinite, NaN or unusually large.

    Args:
        found: for each such shard, the rank that has computed it and the number of the shard.
        ranks: number of ranks.
        seed: seed of the shards.
        generation: generation of the world.
        step: number of the step.
    """
    shift = 1 + seed_of("second rank", seed, generation, step) % (ranks - 1)
    return tuple(ShardCheck(shard, rank, (rank + shift) % ranks) for rank, shard in found)


def checks(
    held: Held, share: float, seed: int, generation: int, step: int
) -> tuple[ShardCheck, ...]:
    """Return the checks of a step, in the order in which each rank computes its own.

    Over many steps, the number of checks is ``share`` of the number of shards.

    Args:
        held: the shards of each rank.
        share: the share of the shards that is computed twice, from 0 to 1.
        seed: seed of the shards.
        generation: generation of the world.
        step: the number of the step.
    """
    count, ranks = sum(map(len, held)), len(held)
    if ranks < 2 or not share:
        return ()
    together = unit(held, share)
    rate, phase = share * count / together, seed_of("checks begin", seed, generation) / 2.0**64
    due = math.floor(rate * (step + 1) + phase) - math.floor(rate * step + phase)
    if not due:
        return ()
    where = seed, generation, step
    start = seed_of("first checked rank", *where) % ranks
    shift = 1 + seed_of("second rank", *where) % (ranks - 1)
    drawn = [
        (place, (rank - start) % ranks, rank, shard)
        for rank, own in enumerate(held)
        for place, shard in enumerate(
            sorted(own, key=lambda shard: seed_of("checked shard", *where, shard))
        )
    ]
    load = [0] * ranks
    found = []
    for _, _, owner, shard in sorted(drawn)[: due * together]:
        others = [(owner + shift + more) % ranks for more in range(ranks)]
        second = min((each for each in others if each != owner), key=load.__getitem__)
        load[second] += 1
        found.append(ShardCheck(shard, owner, second))
    return tuple(found)


def verdict(found: Sequence[Computed], ranks: int) -> VoteResult | None:
    """Return the result of a vote, or None if more computations are needed. See `voters`.

    The digest that most ranks computed is correct if at least two ranks computed it and no other digest has as many
    votes. In a world of two ranks, each rank computes the shard twice. A rank with two different results is wrong.
    """
    by_digest: dict[int, set[int]] = {}
    by_rank: dict[int, set[int]] = {}
    for rank, digest in found:
        by_digest.setdefault(digest, set()).add(rank)
        by_rank.setdefault(rank, set()).add(digest)
    if len(by_digest) == 1 and len(by_rank) > 1:
        return VoteResult((), found[0].digest)
    if voters(found, ranks):
        return None
    most = max(map(len, by_digest.values()))
    right = [digest for digest, by in by_digest.items() if len(by) == most > 1]
    changing = [rank for rank, own in by_rank.items() if len(own) > 1]
    if not right and ranks == 2 and len(changing) == 1:
        right = [*by_rank[1 - changing[0]]]
    if len(right) != 1:
        return VoteResult((), None)
    return VoteResult(tuple(sorted(r for r, own in by_rank.items() if own != {right[0]})), right[0])


def voters(found: Sequence[Computed], ranks: int) -> tuple[int, ...]:
    """Return the ranks that compute the shard next, to decide between different digests.

    These are all ranks that have not computed the shard yet: they would otherwise only wait for the result. The result
    is empty if all ranks have computed the shard.
    """
    asked = {rank for rank, _ in found}
    if ranks == 2:
        return (0, 1) if len(found) == 2 else ()
    return tuple(rank for rank in range(ranks) if rank not in asked)
