"""Observation of a training function's first steps, and reports of the mistakes found.

After the check, the step hook stays installed until the training ends, and only returns. It can't be removed earlier:
torch iterates over its hooks while they run, so a hook must not remove one.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils import data as torch_data

from elastic.data.loader import DataLoader, loaders
from elastic.data.sampler import ElasticSampler
from elastic.errors import ScriptMistakes
from elastic.monitoring import data_waits, moved_tensors
from elastic.optimizer.zero1_optimizer import whole_parameters
from elastic.rendezvous import distributed_samplers
from elastic.runtime.live_objects import live_objects
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.script_checks import mistakes, source_analysis, step_sources
from elastic.script_checks.mistakes import (
    STEPS,
    Kind,
    Mistake,
    ScriptObservation,
    Trained,
    UsedLoader,
    UsedPart,
)
from elastic.sharding import fsdp2
from elastic.state.handled_state import HandledState
from elastic.state.handlers.data_parallel import as_written
from elastic.state.state import ObjectState, State, has_custom_sync

# number of steps with batches from a loader after which it counts as the training loader
TAKES_STEPS = STEPS // 2
# attributes of a sampler that contain a rank or a size
PLACES = ("rank", "num_replicas", "world_size")
DEPTH = 3  # maximum number of nested wrappers around a member of the state
OURS = ("elastic", "horovod")


class ScriptObserver:
    """Observer of one training. All methods must be called from the training thread."""

    def __init__(self, rt: WorkerRuntime, state: State, function: Callable[..., Any]) -> None:
        self._rt = rt
        self._state = state
        self._function = function
        self._reported: set[Kind] = set()
        self._recovered = False
        self._handle: Any = None
        self._observes = False
        self._steps: Counter[int] = Counter()  # number of steps of each optimizer, by its ID
        self._stepping: dict[int, torch.optim.Optimizer] = {}
        # number of steps with batches from each data set, by its ID
        self._loaders: Counter[int] = Counter()
        self._sources: dict[int, tuple[Any, Any]] = {}
        self._latest: tuple[Any, Any] | None = None  # data set and sampler of the latest batch
        self._positions: dict[int, tuple[weakref.ref[DataLoader], Any, int]] = {}
        self._before: list[weakref.ref[Any]] = []
        self._windows = 0
        self._commits: int | None = None  # number of commits before the training began
        self._collectives = 0
        self._sources_of_steps = [make() for make in step_sources.makers]

    # ---- interface for elastic.run -----------------------------------------------------------------------------------

    def meet(self) -> None:
        """Find all relevant objects that exist before training, in a single scan of the heap.

        The scan takes 80 ms with torch, and more with the half million objects of TensorFlow. It runs before the worker
        waits for a world: later, the other ranks would wait for this worker in their next collective.
        """
        members = LRScheduler, torch.amp.GradScaler, AveragedModel
        kinds = [each for source in self._sources_of_steps for each in source.classes()]
        found = live_objects(*members, *kinds)
        self._before = [weakref.ref(each) for each in found if isinstance(each, members)]
        for source in self._sources_of_steps:
            source.meet(found)
        if self._before:
            del found
            gc.collect()  # free objects that the script has dropped

    def begin(self) -> None:
        """Start observing. This method is called before the training function is called, in each world."""
        # A ZeroRedundancyOptimizer has a different inner optimizer in each world, so forget the observed ones.
        self._stepping.clear()
        if self._observes or self._windows > self._recovered:
            return
        self._windows += 1
        self._observes = True
        if self._commits is None:
            self._commits = self._rt.commits.made
        self._steps.clear()
        self._loaders.clear()
        self._collectives = self._rt.activity
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._stepped)
        data_waits.listen(self._gave_batch)
        for source in self._sources_of_steps:
            source.observe(self._counts, (self._rt.place.rank, self._rt.place.size))

    def recovered(self) -> None:
        """Check again after the first failed world, because some mistakes are visible only then."""
        if not self._recovered:
            self._recovered = True
            checked = not self._observes
            self._forget()
            if checked:
                self._report(replace(self._seen(STEPS), loaders=()))

    def end(self) -> None:
        """Stop observing. This method is called when the training ends."""
        self._forget()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _forget(self) -> None:
        self._observes = False
        data_waits.listen(None)
        moved_tensors.stop()
        for source in self._sources_of_steps:
            source.forget()
        self._latest = None
        self._stepping.clear()
        self._loaders.clear()
        self._sources.clear()
        self._positions.clear()

    # ---- hooks in each step ------------------------------------------------------------------------------------------

    def _gave_batch(self, iterator: Any) -> None:
        if iterator is None:
            self._latest = None
            return
        dataset, by = (getattr(iterator, name, None) for name in ("_dataset", "_index_sampler"))
        self._latest = dataset, by

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._observes or torch.compiler.is_compiling():
            return
        self._stepping[id(optimizer)] = optimizer
        if self._latest is not None:
            key = id(self._latest[0])
            self._loaders[key] += 1
            self._sources[key] = self._latest
            self._latest = None
        self._counts(optimizer)

    def _counts(self, optimizer: object) -> None:
        if not self._steps:
            # Collectives before the first step do not reduce gradients.
            moved_tensors.observe()
        self._steps[id(optimizer)] += 1
        steps = self._steps[id(optimizer)]
        if steps == STEPS - TAKES_STEPS:
            self._positions = {
                id(each): (weakref.ref(each), each.position, 0)
                for each in [*loaders]
                if not each.in_state
            }
        for key, (ref, before, advanced) in self._positions.items():
            loader = ref()
            if loader is not None and loader.position != before:
                self._positions[key] = (ref, loader.position, advanced + 1)
        if steps == STEPS:
            try:
                self._report(self._seen(STEPS))
            finally:
                self._forget()

    # ---- observations ------------------------------------------------------------------------------------------------

    def _seen(self, steps: int) -> ScriptObservation:
        members = [v for n, v in vars(self._state).items() if not n.startswith("_")]
        inside = {id(each) for each in _with_inner([*self._state.handled(), *members])}
        shared = {
            id(each.param_groups)
            for each in _with_inner(self._state.handled())
            if isinstance(each, torch.optim.Optimizer)
        }
        covered = {
            id(parameter)
            for each in self._state.handled()
            if isinstance(as_written(each), torch.nn.Module)
            for parameter in fsdp2.parameters(as_written(each))
        }

        # parameters of models with fully_shard, which reduces the gradients of all except ignored_params
        of_sharded = {
            id(parameter)
            for each in self._state.handled()
            if isinstance(model := as_written(each), torch.nn.Module)
            and fsdp2.sharded_states(model)
            for parameter in fsdp2.parameters(model)
        }

        def trained(optimizer: torch.optim.Optimizer) -> Trained:
            parameters = whole_parameters(optimizer)
            missing = [each for each in parameters if id(each) not in covered]
            example = f"one of shape {list(missing[0].shape)}" if missing else ""
            held = id(optimizer) in inside or id(optimizer.param_groups) in shared
            smallest = _smallest(parameters)
            sharded = any(id(each) in of_sharded for each in parameters)
            return Trained(
                _name(optimizer),
                held,
                len(parameters),
                len(missing),
                example,
                smallest,
                remedy=mistakes.REDUCE_IGNORED if sharded else mistakes.REDUCE,
            )

        made_before = [each for ref in self._before if (each := ref()) is not None]
        optimizers = {id(each.param_groups): each for each in self._stepping.values()}

        def parts(kind: type, used: Callable[[Any], bool]) -> tuple[UsedPart, ...]:
            found = [each for each in made_before if isinstance(each, kind) and used(each)]
            return tuple(UsedPart(_name(each), id(each) in inside) for each in found)

        return ScriptObservation(
            steps=steps,
            world_size=self._rt.place.size,
            commits=self._rt.commits.made - (self._commits or 0),
            calls=tuple(source_analysis.commits(self._function)),
            restarts=source_analysis.restarting_loop(self._function),
            recovered=self._recovered,
            collectives=self._rt.activity - self._collectives,
            keeps_members=_keeps_members(self._state),
            largest_moved=moved_tensors.largest,
            optimizers=(
                *(trained(each) for each in optimizers.values()),
                *(each for of in self._sources_of_steps for each in of.optimizers(self._state)),
            ),
            schedulers=parts(
                LRScheduler, lambda each: id(each.optimizer.param_groups) in optimizers
            ),
            scalers=parts(
                torch.amp.GradScaler,
                lambda each: each.is_enabled() and getattr(each, "_scale", None) is not None,
            ),
            averages=parts(AveragedModel, lambda each: int(each.n_averaged) > 0),
            loaders=(
                *self._torch_loaders(inside),
                *self._our_loaders(),
                *(each for of in self._sources_of_steps for each in of.loaders(self._state)),
            ),
        )

    def _torch_loaders(self, inside: set[int]) -> Iterator[UsedLoader]:
        for key, steps in self._loaders.items():
            if steps < TAKES_STEPS or self._own_position():
                continue
            dataset, by = self._sources[key]
            sampler = getattr(by, "sampler", by)
            stream = isinstance(dataset, torch_data.IterableDataset)
            if id(dataset) in inside and hasattr(dataset, "state_dict"):
                continue  # The data set itself keeps its position in the state.
            if isinstance(sampler, ElasticSampler):
                yield UsedLoader("DataLoader", id(sampler) in inside, True, _name(sampler))
            elif any(_is_ours(each) for each in (dataset, by, sampler)):
                continue  # elastic.data.DataLoader uses these classes internally.
            elif kept := [] if stream or _follows(sampler) else _kept(sampler):
                yield UsedLoader("DataLoader", False, True, _name(sampler), ", ".join(kept))
            elif stream or _follows(sampler):
                yield UsedLoader("DataLoader", False, False, "" if stream else _name(sampler))

    def _our_loaders(self) -> Iterator[UsedLoader]:
        for ref, _, advanced in self._positions.values():
            loader = ref()
            if loader is not None and advanced >= TAKES_STEPS:
                yield UsedLoader(_name(loader), loader.in_state, True)

    def _own_position(self) -> bool:
        """Return whether the state contains a count of batches, from which the script can restore its position."""
        return any(
            "batch" in name and isinstance(value, int) for name, value in vars(self._state).items()
        )

    # ---- report ------------------------------------------------------------------------------------------------------

    def _report(self, seen: ScriptObservation) -> None:
        """Print new mistakes on rank 0, and report them to the driver. With --strict, raise ScriptMistakes instead."""
        new = mistakes.unreported(mistakes.found(seen), self._reported)
        self._reported |= {each.kind for each in new}
        if new and self._rt.env.strict:
            raise ScriptMistakes("; ".join(each.sentence for each in new))
        if self._rt.place.rank == 0:
            for each in new:
                print(f"elastic: warning: {each.sentence}", file=sys.stderr, flush=True)
                self._rt.report_mistake(each.kind.value, each.sentence)


@contextmanager
def observing(
    rt: WorkerRuntime, state: State, function: Callable[..., Any]
) -> Iterator[ScriptObserver | None]:
    """Context manager that observes one training. It yields the observer, or None if the checks are disabled.

    The checks are disabled in static jobs, in training functions of this package, and with ``ELASTIC_CHECKS=off``.
    """
    ours = function.__module__.partition(".")[0] in OURS
    if not rt.env.checks or not rt.elastic or ours:
        yield None
        return
    observer = ScriptObserver(rt, state, function)
    observer.meet()
    try:
        yield observer
    finally:
        observer.end()


def _keeps_members(state: State) -> bool:
    """Return whether commits contain exactly the state's members, and no member is an unknown kind of tensor."""
    if not isinstance(state, ObjectState) or has_custom_sync(state):
        return False
    kind = type(state)
    if kind.save not in (ObjectState.save, HandledState.save):
        return False
    values = [v for name, v in vars(state).items() if not name.startswith("_")]
    inner = [v for each in values if isinstance(each, dict) for v in each.values()]
    return not any(_is_tensor(each) for each in (*values, *inner))


def _is_tensor(value: object) -> bool:
    numbers = (np.ndarray, np.generic)
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, numbers)


def _smallest(parameters: Sequence[torch.Tensor]) -> int:
    """Return the number of elements of the smallest parameter with more than one element and a dense gradient.

    Return 0 if it is unknown, as with DTensors.
    """
    whole = (torch.nn.Parameter, torch.Tensor)
    found = [
        each.numel()
        for each in parameters
        if each.grad is not None and not each.grad.is_sparse and each.numel() > 1
    ]
    return min(found) if found and all(type(each) in whole for each in parameters) else 0


def _with_inner(members: Iterable[Any]) -> list[Any]:
    found: dict[int, Any] = {}
    level = list(members)
    for _ in range(DEPTH):
        level = [each for each in level if id(each) not in found]
        found |= {id(each): each for each in level}
        level = [inner for each in level for inner in _held(each)]
    return list(found.values())


def _held(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.nn.Module):
        yield as_written(value)
        return
    if isinstance(value, torch_data.DataLoader):
        return  # An object without attributes cannot be in a state.
    for each in list(getattr(value, "__dict__", {}).values()):
        for inner in each if isinstance(each, list | tuple) else [each]:
            if hasattr(inner, "state_dict") or hasattr(inner, "__dict__"):
                yield inner


def _name(value: object) -> str:
    return type(value).__name__


def _is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in OURS


def _kept(sampler: object) -> list[str]:
    """Return a sampler's attributes that have the name and value of a rank or a size, such as ``rank=1``."""
    values = getattr(sampler, "__dict__", {})
    return [f"{n}={values[n]}" for n in PLACES if isinstance(values.get(n), int)]


def _follows(sampler: object) -> bool:
    """Return whether a sampler is updated when the world changes.

    All samplers of torch are updated. Other samplers are updated if they behave like torch's DistributedSampler.
    """
    own = type(sampler).__module__.startswith("torch.utils.data")
    return own or distributed_samplers.follows(sampler)


__all__ = ["Mistake", "ScriptObserver", "observing"]
