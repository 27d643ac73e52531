"""Verification of randomly selected shards: another rank repeats them, and a vote identifies wrong gradients.

`verification_rules` makes the decisions. This module computes shards a second time, compares digests and reports faulty
ranks. A second pass has no side effects: its gradients are only digested, and buffers and random generators are
restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, NoReturn

import torch

from elastic.collectives import raise_together
from elastic.data.seeds import seed_of
from elastic.errors import CollectiveFailed, GradientsDiffer, Invalid
from elastic.exact import faulty_state, random_generators, verification_rules
from elastic.exact.shard_step import ShardStep, StepListener
from elastic.exact.verification_rules import NOT_FINITE, TOO_LARGE, Computed, ShardCheck, VoteResult
from elastic.protocol import messages
from elastic.runtime import lifecycle

WAIT = "verification of shards"
# purpose string of the group that `Shards.mean` and the exchanges of speeds and digests use
PURPOSE = "means over shards"


class FirstStep(NamedTuple):
    """Report of a rank in the first step of a world.

    Attributes:
        arithmetic: digest of the rank's arithmetic.
        passed: whether the rank has computed a shard twice with equal bits, in this step or earlier.
        shard: the shard that the rank has computed twice in this step, or -1.
        digests: digests of the two computations, or 0.
    """

    arithmetic: int
    passed: int
    shard: int = -1
    first_digest: int = 0
    second_digest: int = 0

    @property
    def differs(self) -> bool:
        """Return whether the rank's two computations of a shard differ."""
        return self.first_digest != self.second_digest


class Conspicuous(NamedTuple):
    """Report of each rank in each step about gradients that are infinite, NaN or unusually large.

    Attributes:
        shard: the first shard with such a gradient that is not already selected for a check, or -1.
        judged: NOT_FINITE or TOO_LARGE.
        usual: exponent of the largest gradient of the previous step. See `verification_rules.limit`.
        largest: exponent of this rank's largest gradient in this step.
    """

    shard: int
    judged: int
    usual: int
    largest: int


class Verifier:
    """Verifier that computes a fraction of the shards of a run a second time.

    Args:
        share: share of the shards that are computed twice.
        seed: seed of the shards.
        listeners: function that returns the listeners of the shards, in their order.
        arithmetic: function that returns a digest of this process's arithmetic.
    """

    def __init__(
        self,
        share: float,
        seed: int,
        listeners: Callable[[], list[StepListener]],
        arithmetic: Callable[[], int],
    ) -> None:
        self.share = share
        # shards of this rank whose gradients are digested in this step
        self.checked: frozenset[int] = frozenset()
        self.shard: int | None = None  # the shard of the second pass in progress, or None
        # number of shards that this rank computed for verification in the last step
        self.passes_made = 0
        self._seed = seed
        self._listeners = listeners
        self._arithmetic = arithmetic
        self._step: ShardStep | None = None
        self._checks: tuple[ShardCheck, ...] = ()
        # generation in which the arithmetic of the ranks was compared
        self._generation: int | None = None
        self._begins = False  # whether this is the first step of a world
        # whether this process computed a shard twice with bitwise identical results
        self._deterministic = False
        # for each rank, the last step in which its gradients were compared and found correct
        self._agreed: dict[int, int] = {}
        self._usual = (
            verification_rules.NONE
        )  # binary exponent of the largest gradient of the last step
        # limit on the gradients of each shard that is checked because of suspicious gradients
        self._limits: dict[int, float] = {}

    def step_begins(self, step: ShardStep, generation: int) -> None:
        """Select the checks of a step."""
        self._step, self.shard, self.passes_made = step, None, 0
        self._limits = {}
        self._begins = len(step.held) > 1 and generation != self._generation
        if self._begins:
            self._agreed = {}
        self._checks = verification_rules.checks(
            step.held, self.share, self._seed, generation, step.number
        )
        own = {each.shard for each in self._checks if each.owner == step.rank}
        if self._begins and not self._deterministic and step.merges:
            own.add(step.merges[0].shard)
        self.checked = frozenset(own)

    def step_abandoned(self) -> None:
        """Discard a second pass in progress."""
        self.shard, self.passes_made = None, 0

    def passes(self, generation: int) -> Iterator[int]:
        """Yield the shards that this rank computes for verification, after its own shards.

        All ranks must call this method.

        In each step, the ranks exchange which of their shards has an infinite, NaN or much larger gradient than usual.
        Another rank computes that shard again immediately. If both results are equal, the model is the cause, and the
        step is taken.

        Raises:
            PeerLost: a rank was lost, or its gradients were wrong.
            GradientsDiffer: gradients differ, and no vote identifies the faulty rank.
            Invalid: the model is not deterministic, or the arithmetic of the ranks differs.
        """
        step = self._step
        assert step is not None
        if len(step.held) < 2:
            return
        first = (yield from self._first_step(step)) if self._begins else None
        digests = {shard: self._digest_of(shard) for shard in self.checked}
        for check in self._checks:
            if check.second == step.rank:
                digests[check.shard] = yield from self._compute(check.shard)
        found = self._exchange(
            [
                *(first or ()),
                *(digests.get(check.shard, 0) for check in self._checks),
                *self._conspicuous(step),
            ]
        )
        rows = [row[len(first or ()) :] for row in found]
        odd = [Conspicuous(*row[-len(Conspicuous._fields) :]) for row in found]
        votes = {
            check: [Computed(rank, rows[rank][place]) for rank in (check.owner, check.second)]
            for place, check in enumerate(self._checks)
        }
        if first is not None:
            votes |= self._compare_ranks([FirstStep(*row[: len(first)]) for row in found])
            self._generation, self._begins = generation, False
        if any(each.shard >= 0 for each in odd):
            votes |= yield from self._recheck(odd, step, generation)
        yield from self._vote(votes, step)
        self._conclude(votes, step)
        self._usual = max(each.largest for each in odd)

    # ---- second passes ---------------------------------------------------------------------------------------------

    def _first_step(self, step: ShardStep) -> Generator[int, None, FirstStep]:
        """Compute this rank's first shard a second time, to check that the model is deterministic.

        This method does nothing if this process has already passed the check.
        """
        if self._deterministic or not step.merges:
            return FirstStep(self._arithmetic(), int(self._deterministic))
        shard = step.merges[0].shard
        before, after = self._digest_of(shard), (yield from self._compute(shard))
        self._deterministic = before == after
        return FirstStep(self._arithmetic(), int(before == after), shard, before, after)

    def _recheck(
        self, odd: Sequence[Conspicuous], step: ShardStep, generation: int
    ) -> Generator[int, None, dict[ShardCheck, list[Computed]]]:
        """Compute shards with conspicuous gradients a second time, each on another rank.

        All ranks must call this method.

        Yields:
            The shards that this rank computes again.

        Returns:
            For each checked shard, the results of its owner and of the second rank.
        """
        found = [(rank, each.shard) for rank, each in enumerate(odd) if each.shard >= 0]
        again = verification_rules.rechecks(
            found, len(step.held), self._seed, generation, step.number
        )
        self._limits = {each.shard: verification_rules.limit(each.usual) for each in odd}
        row = [0] * len(again)
        for place, check in enumerate(again):
            if check.second == step.rank:
                row[place] = yield from self._compute(check.shard)
        rows = self._exchange(row)
        return {
            check: [
                Computed(check.owner, odd[check.owner].judged),
                Computed(check.second, rows[check.second][place]),
            ]
            for place, check in enumerate(again)
        }

    def _conspicuous(self, step: ShardStep) -> Conspicuous:
        largest = {each.shard: self._largest_of(each.shard) for each in step.merges}
        limit = verification_rules.limit(self._usual)
        judged = {
            shard: found
            for shard, value in largest.items()
            if (found := verification_rules.judged(0, value, limit)) and shard not in self.checked
        }
        shard, found = next(iter(judged.items()), (-1, 0))
        most = verification_rules.exponent(max(largest.values(), default=0.0))
        return Conspicuous(shard, found, self._usual, most)

    def _largest_of(self, shard: int) -> float:
        return max((each.largest(shard) for each in self._listeners()), default=0.0)

    def _compute(self, shard: int) -> Generator[int, None, int]:
        step = self._step
        assert step is not None
        listeners = self._listeners()
        for each in listeners:
            each.second_pass_begins(shard)
        random_generators.set_seed(seed_of("step", self._seed, step.number, shard))
        self.shard = shard
        self.passes_made += 1
        yield shard
        self.shard = None
        results = [each.second_pass_ends(shard) for each in listeners]
        limit = self._limits.get(shard, math.inf)
        largest = max((each.largest for each in results), default=0.0)
        return verification_rules.judged(
            _combined([each.digest for each in results]), largest, limit
        )

    def _digest_of(self, shard: int) -> int:
        digest = _combined([each.digest_of(shard) for each in self._listeners()])
        return verification_rules.judged(digest, self._largest_of(shard), math.inf)

    # ---- the vote --------------------------------------------------------------------------------------------------

    def _vote(
        self, votes: dict[ShardCheck, list[Computed]], step: ShardStep
    ) -> Generator[int, None, None]:
        ranks = len(step.held)
        while open_votes := [
            check for check, own in votes.items() if verification_rules.verdict(own, ranks) is None
        ]:
            asked = {check: verification_rules.voters(votes[check], ranks) for check in open_votes}
            row = [0] * len(open_votes)
            for place, check in enumerate(open_votes):
                if step.rank in asked[check]:
                    row[place] = yield from self._compute(check.shard)
            found = self._exchange(row)
            for place, check in enumerate(open_votes):
                votes[check] += [Computed(rank, found[rank][place]) for rank in asked[check]]

    def _conclude(self, votes: dict[ShardCheck, list[Computed]], step: ShardStep) -> None:
        culprits: dict[int, messages.Miscomputed] = {}
        undecided: ShardCheck | None = None
        for check, computed in votes.items():
            verdict = verification_rules.verdict(computed, len(step.held))
            assert verdict is not None
            if verdict.right is None:
                undecided = undecided or check
            for rank in verdict.culprits:
                culprits.setdefault(rank, self._evidence(rank, check, computed, verdict))
        for check in votes:
            for rank in {check.owner, check.second} - culprits.keys():
                self._agreed[rank] = step.number
        if culprits:
            self._leave([culprits[rank] for rank in sorted(culprits)])
        if undecided is not None:
            self._give_up(undecided, votes[undecided])

    def _evidence(
        self, rank: int, check: ShardCheck, computed: Sequence[Computed], verdict: VoteResult
    ) -> messages.Miscomputed:
        assert self._step is not None and verdict.right is not None
        wrong = next(
            each.digest for each in computed if each.rank == rank and each.digest != verdict.right
        )
        return messages.Miscomputed(
            generation=lifecycle.current().generation,
            step=self._step.number,
            shard=check.shard,
            rank=rank,
            digest=_shown(wrong),
            right=_shown(verdict.right),
            witnesses=sorted({each.rank for each in computed if each.digest == verdict.right}),
            agreed=self._agreed.get(rank, -1),
            complete=self.share >= 1.0,
        )

    def _leave(self, evidence: Sequence[messages.Miscomputed]) -> NoReturn:
        """End the world. The step is repeated from the last commit, without the faulty ranks."""
        runtime = lifecycle.current()
        first = evidence[0]
        text = (
            f"rank {first.rank} computed wrong gradients of shard {first.shard} in step {first.step}:"
            f" {first.digest} instead of {first.right}"
        )
        # Save the states before the reports, because the driver kills the culprits as soon as it receives these.
        if runtime.env.keep_faulty:
            self._keep(evidence, runtime.env.keep_faulty)
        for each in evidence:
            runtime.report_miscomputed(each)
        # All ranks must receive the result before any rank leaves the group.
        self._raise_together(CollectiveFailed(text))

    def _keep(self, evidence: Sequence[messages.Miscomputed], folder: str) -> None:
        """Save the state of each faulty rank and of one rank with correct gradients.

        Collective: no rank leaves before all have saved.
        """
        assert self._step is not None
        for each in evidence:
            if self._step.rank in (each.rank, each.witnesses[0]):
                parts = [listener.state_of(each.shard) for listener in self._listeners()]
                faulty_state.save(folder, each, self._step.rank, self._seed, parts)
        self._exchange([0])

    def _give_up(self, check: ShardCheck, computed: Sequence[Computed]) -> NoReturn:
        assert self._step is not None
        error = GradientsDiffer(
            self._step.number, check.shard, [(each.rank, _shown(each.digest)) for each in computed]
        )
        self._raise_together(error)

    def _compare_ranks(self, found: Sequence[FirstStep]) -> dict[ShardCheck, list[Computed]]:
        """Return the computations of ranks whose two results for a shard differ.

        Raises Invalid on all ranks if their gradients cannot be equal although no rank is faulty.
        """
        error = None
        odd = [rank for rank, each in enumerate(found) if each.arithmetic != found[0].arithmetic]
        changing = [(rank, each) for rank, each in enumerate(found) if each.differs]
        if odd:
            error = Invalid(
                f"verify compares the bits of gradients, but rank {odd[0]} and rank 0 have different numbers of"
                " threads, CPU instructions or library versions: make them the same, or omit verify"
            )
        elif changing and not any(each.passed for each in found):
            error = Invalid(
                f"rank {changing[0][0]} computed shard {changing[0][1].shard} twice, and its gradients differ, so"
                " verify can't compare them: call torch.use_deterministic_algorithms(True), store values that a forward"
                " pass changes in buffers, choose the samples of a shard only by its number and the step, or omit"
                " verify"
            )
        if error is not None:
            self._raise_together(error)
        return {
            ShardCheck(each.shard, rank, rank): [
                Computed(rank, each.first_digest),
                Computed(rank, each.second_digest),
            ]
            for rank, each in changing
        }

    def _raise_together(self, error: Exception) -> NoReturn:
        runtime = lifecycle.current()
        with runtime.guard(WAIT):
            raise_together.raise_together(runtime.group(PURPOSE, torch.device("cpu")), error)
        raise AssertionError("unreachable")

    def _exchange(self, row: Sequence[int]) -> list[list[int]]:
        """Gather one row of integers from each rank.

        All ranks must call this method.

        Raises:
            PeerLost: a rank was lost.
        """
        runtime = lifecycle.current()
        own = torch.tensor(row, dtype=torch.int64, device="cpu")
        assert self._step is not None
        found = [torch.empty_like(own) for _ in self._step.held]
        with runtime.guard(WAIT):
            runtime.group(PURPOSE, own.device).allgather(found, own).wait()
        return [each.tolist() for each in found]


def _combined(digests: Sequence[int]) -> int:
    return seed_of("gradients of optimizers", *digests) >> 1 or 1


def _shown(digest: int) -> str:
    return {NOT_FINITE: "not finite", TOO_LARGE: "too large"}.get(digest) or f"{digest:016x}"
