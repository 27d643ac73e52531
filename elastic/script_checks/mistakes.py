"""Detection of mistakes in a training script, from observations of its steps. Pure: no I/O, no clock.

These mistakes raise no error while all workers run, but make the training wrong after a failure, or even from the
start. docs/script-checks.md describes each kind.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

STEPS = 20  # number of optimizer steps after which a script is checked
PAGE = "script-checks"
# remedies for gradients that are not reduced
REDUCE = (
    "wrap the optimizer in hvd.DistributedOptimizer, the tape in hvd.DistributedGradientTape, or the model in"
    " DistributedDataParallel"
)
REDUCE_IGNORED = (
    "reduce the gradients of the model's ignored_params with allreduce() before each step, or omit ignored_params from"
    " fully_shard()"
)


class Kind(enum.Enum):
    """Kind of mistake. Each value is an anchor in docs/script-checks.md."""

    NO_COMMIT = "no-commit"
    COMMIT_ON_SOME_RANKS = "commit-on-some-ranks"
    LOOP_RESTARTS = "loop-restarts"
    NEVER_REDUCED = "gradients-never-reduced"
    ONLY_LOSS_REDUCED = "only-the-loss-reduced"
    MODEL_NOT_IN_STATE = "model-not-in-state"
    OPTIMIZER_NOT_IN_STATE = "optimizer-not-in-state"
    SCHEDULER_NOT_IN_STATE = "scheduler-not-in-state"
    SCALER_NOT_IN_STATE = "scaler-not-in-state"
    AVERAGE_NOT_IN_STATE = "weight-average-not-in-state"
    LOADER_NOT_IN_STATE = "loader-not-in-state"
    LOADER_WITHOUT_POSITION = "loader-without-position"
    RANK_KEPT = "rank-kept"


class CommitCall(enum.Enum):
    """Place of a commit() call in a script, with its condition."""

    # in the loop that calls step(), without a condition that can change in the loop
    EACH_STEP = enum.auto()
    SOME_STEPS = enum.auto()  # elsewhere, or under a condition that may become true later
    SOME_RANKS = enum.auto()  # under a condition on the rank


@dataclass(frozen=True)
class RestartingLoop:
    """Loop such as ``for epoch in range(10)`` that restarts from the beginning after a change of the world."""

    head: str
    function: str


@dataclass(frozen=True)
class UsedPart:
    """Object that the training uses: name of its class, and whether it is in the state."""

    name: str
    in_state: bool


@dataclass(frozen=True)
class Trained:
    """Optimizer that has taken steps.

    ``uncovered`` contains those of its ``parameters`` that do not belong to a model in the state.
    """

    name: str
    in_state: bool
    parameters: int
    uncovered: int
    example: str = ""  # name or shape of one of the uncovered parameters
    # number of elements of the smallest parameter with more than one element and a dense gradient, or 0 if unknown
    smallest: int = 0
    # code that passes the model or optimizer to a state, for the message; empty means the code for torch
    member: str = ""
    # remedy for gradients that are not reduced, for the message
    remedy: str = REDUCE


@dataclass(frozen=True)
class UsedLoader:
    """Data loader that provides the batches of the steps.

    Args:
        keeps_position: whether the loader's class can resume in the middle of an epoch.
    """

    name: str
    in_state: bool
    keeps_position: bool
    sampler: str = ""
    # attributes of the sampler that have the rank or size of a particular world as their value
    kept: str = ""
    remedy: str = "read hvd.rank() and hvd.size() in __iter__, or use elastic.data.DataLoader"


@dataclass(frozen=True)
class ScriptObservation:
    """Observations in one process of the last ``steps`` steps of its optimizers."""

    steps: int
    world_size: int
    commits: int
    calls: tuple[CommitCall, ...]  # commit() calls in the script's source
    recovered: bool  # whether a worker has been lost since training began
    collectives: int  # number of collectives, and of other calls that may have changed tensors
    # number of elements of the largest tensor in any collective between two steps; None if unknown
    largest_moved: int | None
    # loop around commit() whose counter is not in the state, or None
    restarts: RestartingLoop | None
    # whether the state is of a class of this package, which saves exactly its members
    keeps_members: bool
    optimizers: tuple[Trained, ...] = ()
    schedulers: tuple[UsedPart, ...] = ()
    scalers: tuple[UsedPart, ...] = ()
    averages: tuple[UsedPart, ...] = ()
    loaders: tuple[UsedLoader, ...] = ()


@dataclass(frozen=True)
class Mistake:
    """Mistake in a script. ``facts`` are the values to insert into its message."""

    kind: Kind
    facts: tuple[tuple[str, Any], ...] = ()

    @property
    def sentence(self) -> str:
        """Return a sentence with the mistake, its consequence and the remedy."""
        return f"{_SENTENCES[self.kind].format(**dict(self.facts))} (elasticrun docs {PAGE}#{self.kind.value})"


def found(seen: ScriptObservation) -> list[Mistake]:
    """Return the mistakes in an observation, at most one of each kind."""
    made = [*_commits(seen), *_reductions(seen), *_loaders(seen)]
    if seen.restarts is not None:
        made.append(
            _mistake(Kind.LOOP_RESTARTS, loop=seen.restarts.head, function=seen.restarts.function)
        )
    if seen.keeps_members:
        made += _members(seen)
    return made


def unreported(made: Iterable[Mistake], reported: Collection[Kind]) -> list[Mistake]:
    """Return the mistakes whose cause has not been reported yet, under the same or another kind."""
    causes = {_CAUSES.get(kind, kind) for kind in reported}
    return [each for each in made if _CAUSES.get(each.kind, each.kind) not in causes]


def _commits(seen: ScriptObservation) -> Iterable[Mistake]:
    if seen.calls and {*seen.calls} == {CommitCall.SOME_RANKS}:
        yield _mistake(Kind.COMMIT_ON_SOME_RANKS)
        return
    # A script may commit once per epoch, after the observed steps, so report missing commits only after a loss.
    due = seen.recovered or not seen.calls or CommitCall.EACH_STEP in seen.calls
    if seen.commits == 0 and due:
        yield _mistake(Kind.NO_COMMIT, steps=seen.steps)


def _reductions(seen: ScriptObservation) -> Iterable[Mistake]:
    if not seen.optimizers or seen.world_size == 1:
        return
    first = seen.optimizers[0]
    facts = {
        "steps": seen.steps,
        "workers": seen.world_size,
        "optimizer": first.name,
        "remedy": first.remedy,
    }
    # A single collective, or collectives without tensors, may come from a loader that negotiates its position.
    if seen.collectives < 2 or seen.largest_moved == 0:
        yield _mistake(Kind.NEVER_REDUCED, **facts)
        return
    # A tensor that contains the gradient of the smallest parameter, alone or with others, is at least as large as that
    # gradient.
    known = [each.smallest for each in seen.optimizers if each.smallest]
    if known and seen.largest_moved is not None and seen.largest_moved < min(known):
        yield _mistake(Kind.ONLY_LOSS_REDUCED, **facts, largest=seen.largest_moved)


def _loaders(seen: ScriptObservation) -> Iterable[Mistake]:
    for loader in seen.loaders:
        if loader.kept:
            yield _mistake(
                Kind.RANK_KEPT, sampler=loader.sampler, kept=loader.kept, remedy=loader.remedy
            )
            return
        if not loader.keeps_position:
            sampler = f" over a {loader.sampler}" if loader.sampler else ""
            yield _mistake(Kind.LOADER_WITHOUT_POSITION, loader=loader.name, sampler=sampler)
            return
        if not loader.in_state:
            yield _mistake(Kind.LOADER_NOT_IN_STATE, loader=loader.sampler or loader.name)
            return


def _members(seen: ScriptObservation) -> Iterable[Mistake]:
    for each in seen.optimizers:
        if each.uncovered:
            which = "no parameter" if each.uncovered == each.parameters else "not every parameter"
            example = f", such as {each.example}" if each.example else ""
            yield _mistake(
                Kind.MODEL_NOT_IN_STATE,
                which=which,
                example=example,
                optimizer=each.name,
                member=each.member or "TorchState(model=model, ...)",
            )
            break
    for each in seen.optimizers:
        if not each.in_state:
            member = each.member or "TorchState(optimizer=optimizer, ...)"
            yield _mistake(Kind.OPTIMIZER_NOT_IN_STATE, name=each.name, member=member)
            break
    parts = (
        (Kind.SCHEDULER_NOT_IN_STATE, seen.schedulers),
        (Kind.SCALER_NOT_IN_STATE, seen.scalers),
        (Kind.AVERAGE_NOT_IN_STATE, seen.averages),
    )
    for kind, members in parts:
        outside = [part.name for part in members if not part.in_state]
        if outside:
            yield _mistake(kind, name=outside[0])


def _mistake(kind: Kind, **facts: Any) -> Mistake:
    return Mistake(kind, tuple(facts.items()))


# Kinds with the same cause: with a plain optimizer, different kinds of mistake are observed in the first steps and in
# those after a failure.
_CAUSES = {Kind.ONLY_LOSS_REDUCED: Kind.NEVER_REDUCED}

_SENTENCES = {
    Kind.NO_COMMIT: (
        "no state.commit() in {steps} steps: a failure loses all training since elastic.run started; call"
        " state.commit() after each step"
    ),
    Kind.COMMIT_ON_SOME_RANKS: (
        "state.commit() is called under a condition on the rank: if those ranks are lost, their commit is lost, too,"
        " and no worker can join; call commit() on every rank"
    ),
    Kind.LOOP_RESTARTS: (
        "`{loop}` in {function}() starts again whenever a worker is lost or joins, since elastic.run calls the function"
        " again: the job trains longer than intended; count in the state: `while state.epoch < epochs`, with"
        " TorchState(epoch=0, ...) and state.epoch += 1 before the commit"
    ),
    Kind.NEVER_REDUCED: (
        "no collective ran in {steps} steps of {optimizer} on {workers} workers: each worker trains a separate model;"
        " {remedy}"
    ),
    Kind.ONLY_LOSS_REDUCED: (
        "no collective carried gradients in {steps} steps of {optimizer} on {workers} workers (the largest tensor had"
        " {largest} elements): each worker trains a separate model; {remedy}"
    ),
    Kind.MODEL_NOT_IN_STATE: (
        "the state holds {which} that {optimizer} trains{example}: a failure does not restore them, and workers that"
        " join do not receive them; pass the model: {member}"
    ),
    Kind.OPTIMIZER_NOT_IN_STATE: (
        "{name} is not in the state: a failure does not restore its momentum and step counts, and workers that join"
        " start without them; pass it: {member}"
    ),
    Kind.SCHEDULER_NOT_IN_STATE: (
        "{name} is not in the state: after a failure its step count is ahead of the model, and workers that join"
        " start at 0; pass the scheduler: TorchState(scheduler=scheduler, ...)"
    ),
    Kind.SCALER_NOT_IN_STATE: (
        "{name} is not in the state: workers that join start with another loss scale; pass the scaler:"
        " TorchState(scaler=scaler, ...)"
    ),
    Kind.AVERAGE_NOT_IN_STATE: (
        "{name}, an average of the weights, is not in the state: a failure does not restore it, and workers that"
        " join start with a new one; pass the average: TorchState(average=average, ...)"
    ),
    Kind.LOADER_NOT_IN_STATE: (
        "{loader} is not in the state: after a failure samples are trained on again or skipped; pass the loader:"
        " TorchState(loader=loader, ...)"
    ),
    Kind.LOADER_WITHOUT_POSITION: (
        "the steps take their batches from torch's {loader}{sampler}, which starts its epoch again after a failure;"
        " wrap it, loader = elastic.data.from_torch(loader), and pass it to the state: TorchState(loader=loader, ...)"
    ),
    Kind.RANK_KEPT: (
        "{sampler} keeps {kept} of the world in which it was created: when workers are lost or join, some samples are"
        " trained on twice and others never; {remedy}"
    ),
}
