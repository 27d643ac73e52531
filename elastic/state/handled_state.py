"""State whose values may have handlers, such as models, optimizers and samplers.

A value with a handler is a part (see `part`). All parts are committed, restored and sent together. `TorchState` and the
Keras states define which values they accept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from elastic.collectives.dtensor import is_dtensor
from elastic.diloco.diloco import DiLoCo
from elastic.errors import Invalid, NotPicklable
from elastic.exact.kept_commits import KeptCommits
from elastic.exact.shards import Shards
from elastic.failpoints import failpoint
from elastic.protocol.messages import COPY, Commit, KeptCommit, ShardsHeld
from elastic.runtime import lifecycle
from elastic.sharding import fsdp2, unsupported_sharding
from elastic.state import replaced_optimizers, shard_checks
from elastic.state.fully_sharded.island_shards import IslandShards, ShardedDiLoCoHandler
from elastic.state.fully_sharded.shard_buffers import ShardBuffers
from elastic.state.fully_sharded.sharded_commits import ShardedCommits, WorldInventory
from elastic.state.fully_sharded.sharded_handlers import (
    FullyShardedHandler,
    ShardedOptimizerHandler,
)
from elastic.state.fully_sharded.zero_handlers import DividedOptimizerHandler, ZeroOptimizerHandler
from elastic.state.handler_registry import handler_for, refuse_hidden
from elastic.state.handlers import state_transfer
from elastic.state.handlers.diloco_state import DiLoCoStateHandler
from elastic.state.handlers.framework_variables import VariablesPart
from elastic.state.handlers.held_commit import CommitCopy, HeldCommit, HeldPart
from elastic.state.handlers.loader_state import LoaderStateHandler
from elastic.state.handlers.model_state import ModelStateHandler
from elastic.state.handlers.optimizer_state import OptimizerStateHandler
from elastic.state.handlers.part import Part, SamplerStateHandler, StateHandler
from elastic.state.handlers.random_state import RandomState
from elastic.state.handlers.state_transfer import GroupOn
from elastic.state.snapshots import digest
from elastic.state.snapshots.snapshot import Snapshot
from elastic.state.state import (
    ObjectState,
    State,
    log,
    overridden,
    refuse_method_names,
    refuse_misspelled,
)

Handler = TypeVar("Handler", bound=StateHandler)
# maximum size of `HandledState.first_broadcast` in bytes, before it is compressed
EARLY_LIMIT = 1024 * 1024
_SHARDED = (
    FullyShardedHandler | ShardedOptimizerHandler | ZeroOptimizerHandler | ShardedDiLoCoHandler
)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _OfThisProcess:
    """Base class of objects that belong to one process. Pickling or copying one raises NotPicklable, a TypeError."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotPicklable(
            f"a {type(self).__name__} can't be pickled or copied, because it holds buffers of this process. It"
            " may be an attribute of the pickled object or a variable of its function. Exclude the state with"
            " __getstate__, or create it in the worker. To save the contents, save model.state_dict(), or pass"
            " --checkpoint-dir to elasticrun"
        )


class HandledState(_OfThisProcess, ObjectState):
    """State of values, some of which are handled by a `Part` or by a user-defined handler. See `handler_registry`."""

    def __init__(
        self, values: dict[str, Any], rng: Any = False, copies: Any = 1, least_shards: Any = None
    ) -> None:
        values = dict(values)
        if not isinstance(rng, bool):  # The script has passed a value named rng.
            values["rng"] = rng
        refuse_method_names(values)
        refuse_misspelled(values, {"rng": lambda value: isinstance(value, bool)})
        self._handlers: dict[str, StateHandler] = {}
        for name, value in values.items():
            handler = handler_for(name, value)
            if handler is not None:
                self._handlers[name] = handler
                object.__setattr__(self, name, value)
        for name, value in values.items():
            if name not in self._handlers:
                refuse_hidden(name, value, self._handlers.values())
        self._notify_shards()
        self._check_shards()
        self._refuse_own_values()
        self._random = RandomState() if rng is True else None
        # names of the models' parameters when the state was created, by the parameter's ID
        self._first_names: dict[int, str] = {}
        # number of saves started so far; lets a digest detect that a save has begun in the meantime
        self._begun = 0
        self._introduce()
        self._older: KeptCommits[CommitCopy] = KeptCommits()
        self._sharded = self._commits_of_shards(copies, least_shards)
        self._check_island_shards(copies, least_shards)
        if self._sharded is not None or self._island_shards():
            refuse_misspelled(values, {"copies": _is_number, "least_shards": _is_number})
        if self._sharded is None and not self._island_shards() and copies != 1:
            values["copies"] = copies
        if self._sharded is None and least_shards is not None:
            values["least_shards"] = least_shards
        super().__init__(**{name: v for name, v in values.items() if name not in self._handlers})
        if self._random is not None:
            self._random.save()
        if self._sharded is not None:
            self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        # Return early, because each commit sets several internal attributes.
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        handlers: dict[str, StateHandler] = self.__dict__.get("_handlers", {})
        if name in handlers or (
            name in self.__dict__.get("_saved_state", ()) and value is not None
        ):
            handler = handlers.get(name)
            if handler is None or handler.value is not value:
                self._handle(name, value)
        super().__setattr__(name, value)

    def _handle(self, name: str, value: Any) -> None:
        present = self._handlers.get(name)
        sharded = isinstance(value, DiLoCo) and value.sharded is not None
        if (
            sharded
            or isinstance(present, _SHARDED)
            or unsupported_sharding.of_value(value) is not None
        ):
            raise unsupported_sharding.refuse_late(name)
        handler = None
        if present is None or not isinstance(value, type(present.value)):
            handler = handler_for(name, value)
            if handler is None:
                refuse_hidden(name, value, self._handlers.values())
                if present is None:
                    return
        if handler is not None:
            self._handlers[name] = handler
            self._saved_state.pop(name, None)
        elif present is not None and isinstance(value, type(present.value)):
            present.set_value(value)
        else:
            del self._handlers[name]
            self._saved_state[name] = self._copied({name: value})[name]
        self._notify_shards()
        self._check_shards()
        self._refuse_own_values()
        self._introduce()

    def _check_shards(self) -> None:
        shards = self._shards()
        values = {name: each.value for name, each in self._handlers.items()}
        shard_checks.check_schedules(values)
        for name, handler in self._handlers.items():
            value = handler.value
            if isinstance(handler, OptimizerStateHandler):
                own = getattr(getattr(value, "gradients_made", None), "shards", None)
                own = next((each for each in shards if value in each.optimizers), own)
                if shards and own is None:
                    raise Invalid(
                        f"state.{name} does not use the state's Shards, so it would apply only the gradients of"
                        " this worker: wrap it with elastic.DistributedOptimizer(optimizer,"
                        " model.named_parameters(), shards=shards)"
                    )
                if own is not None:
                    shard_checks.check_trained(name, value, self._referred())
            elif isinstance(handler, LoaderStateHandler):
                own = value.shards
            else:
                continue
            if own is not None and all(own is not each for each in shards):
                raise Invalid(
                    f"state.{name} uses shards that are not part of the state, so commits would lack the number"
                    " of the step: add the shards, as in TorchState(..., shards=shards)"
                )
        shard_checks.check_optimizers(values)

    def _commits_of_shards(self, copies: Any, least: Any) -> ShardedCommits | None:
        """Create the object that makes sharded commits, or return None if neither a model nor an optimizer is sharded.

        Raises:
            NotElastic: the combination of models and optimizers is not supported.
            Invalid: an argument is invalid.
        """
        models = self._of_kind(FullyShardedHandler)
        divided = self._of_kind(DividedOptimizerHandler)
        partitioned: list[ZeroOptimizerHandler | DividedOptimizerHandler]
        partitioned = [*self._of_kind(ZeroOptimizerHandler), *divided]
        optimizers = [
            each for each in self._of_kind(ShardedOptimizerHandler) if each not in divided
        ]
        ours = {id(each) for model in models for each in fsdp2.parameters(model.model)}
        for each in optimizers:
            sharded = filter(is_dtensor, each.parameters())
            if not all(id(parameter) in ours for parameter in sharded):
                raise unsupported_sharding.refuse_optimizer(each.name)
        if not models and not partitioned:
            return None
        if models and partitioned:
            raise unsupported_sharding.refuse_together(models[0].name, partitioned[0].name)
        if own := overridden(self):
            raise Invalid(
                f"{type(self).__name__} overrides {' and '.join(own)}(), but"
                f" state.{[*models, *partitioned][0].name} is sharded, and a failure may restore a commit from"
                " before the last call of save(): store the values as attributes of the state"
            )
        values = {name: each.value for name, each in self._handlers.items()}
        self._first_names = shard_checks.names_of(values)
        self._check_parameters()
        if not isinstance(copies, int) or copies < 0:
            raise Invalid(
                f"copies is {copies!r}: pass the number of other ranks that keep a copy, at least 0"
            )
        if self._shards():
            raise Invalid(
                "elastic.Shards reduces gradients that fully_shard or DistributedDataParallel has already reduced:"
                " omit it from the state"
            )
        if foreign := self._foreign_handlers():
            name, handler = next(iter(foreign.items()))
            raise Invalid(
                f"state.{name} uses the handler {type(handler).__name__}, which synchronizes workers by itself,"
                f" but state.{[*models, *partitioned][0].name} is sharded, so all ranks must restore the same"
                " commit: derive the handler from Part"
            )
        shards = unsupported_sharding.least_shards(
            {each.name: each.model for each in models}, least
        )
        for stepped in (*optimizers, *partitioned):
            replaced_optimizers.observe(stepped.value)
        return ShardedCommits(lambda: [*models, *optimizers, *partitioned], copies, shards, least)

    def _check_island_shards(self, copies: Any, least: Any) -> None:
        """Check and configure the `DiLoCo` of a model that is sharded within islands.

        Raises:
            Invalid: the combination of values is not supported, or an argument is invalid.
        """
        found = self._of_kind(ShardedDiLoCoHandler)
        if not found:
            return
        handler = found[0]
        name = f"state.{handler.name} averages a model that is sharded within islands"
        if len(found) > 1:
            raise Invalid(
                f"{name}, and so does state.{found[1].name}: train both models in one DiLoCo, as in"
                " torch.nn.ModuleList([one, other])"
            )
        if self._sharded is not None:
            raise Invalid(
                f"{name}, but another model or optimizer of the state is sharded over all ranks: use one of both"
            )
        if least is not None:
            raise Invalid(f"{name}, of which an island holds one replica: omit least_shards=")
        if not _is_number(copies) or copies < 0:
            raise Invalid(
                f"copies is {copies!r}: pass the number of other ranks that keep a copy, at least 0"
            )
        if copies != 1:
            handler.keep_copies(copies)

    def _island_shards(self) -> list[IslandShards]:
        """Return the shards of the `DiLoCo` in this state whose model is sharded within islands. At most one."""
        return [each.shards for each in self._of_kind(ShardedDiLoCoHandler)]

    def _check_parameters(self) -> None:
        """Check that a sharded state's models still have the same parameters, and its optimizers train only these.

        Raises:
            NotElastic: the parameters of a fully sharded model have changed, or an optimizer in the state trains other
                parameters.
            Invalid: a sharded optimizer trains a parameter that does not belong to any model.
        """
        for model in self._of_kind(FullyShardedHandler):
            model.check_parameters()
        if self._of_kind(FullyShardedHandler):
            modules = [value for value in self._referred() if isinstance(value, torch.nn.Module)]
            known = {id(parameter) for module in modules for parameter in fsdp2.parameters(module)}
            for stepped in self._of_kind(OptimizerStateHandler):
                for group in stepped.value.param_groups:
                    for parameter in group["params"]:
                        if id(parameter) not in known:
                            raise unsupported_sharding.refuse_stale(stepped.name, parameter)
        for kind in (ZeroOptimizerHandler, DividedOptimizerHandler):
            for part in self._of_kind(kind):
                shard_checks.check_trained(
                    part.name, part.value, self._referred(), self._first_names
                )

    def _check_stepped(self) -> None:
        """Check that no optimizer outside the state has stepped parameters that a sharded optimizer trains.

        Raises:
            NotElastic: an optimizer outside the state has stepped such a parameter.
        """
        in_state = set(map(id, self._referred()))
        for part in (*self._of_kind(ShardedOptimizerHandler), *self._of_kind(ZeroOptimizerHandler)):
            replaced = replaced_optimizers.replacement_of(part.value, in_state)
            if replaced is not None:
                other, parameter = replaced
                which = shard_checks.named(other, parameter, self._first_names)
                raise unsupported_sharding.refuse_replaced(part.name, other, which)

    def _notify_shards(self) -> None:
        """Register models' buffers and gradient scalers with the state's `Shards`, to keep them equal on all ranks."""
        for shards in self._shards():
            for value in self._referred():
                if isinstance(value, torch.nn.Module | torch.amp.GradScaler):
                    shards.watch(value)

    def _introduce(self) -> None:
        stepped = bool(self._of_kind(OptimizerStateHandler))
        for loader in self._of_kind(LoaderStateHandler):
            loader.attach(self._trained_parameters, stepped=stepped)

    def _skip_commit(self) -> None:
        if self._sharded is not None:
            self._sharded.skip()

    def _keeps_steps(self) -> bool:
        return bool(self._of_kind(DiLoCoStateHandler))

    def _refuse_own_values(self) -> None:
        """Raise Invalid if a value also belongs to a DiLoCo in the state, because it would then be sent twice."""
        for handler in self._of_kind(DiLoCoStateHandler):
            value = handler.value
            held = (value.model, value.inner_optimizer, value.outer_optimizer)
            inner = {id(each) for each in value.inner}
            for name, other in self._handlers.items():
                if other is handler:
                    continue
                if isinstance(other, DiLoCoStateHandler) and inner & {*map(id, other.value.inner)}:
                    raise Invalid(
                        f"state.{handler.name} and state.{name} average the same parameters of one model: create one"
                        " DiLoCo for each model"
                    )
                if any(other.value is each for each in held):
                    raise Invalid(
                        f"state.{name} is already part of state.{handler.name}, and each worker has its own"
                        f" copy, which rank 0 must not overwrite: remove {name}= from the state"
                    )

    def _trained_parameters(self) -> list[torch.Tensor]:
        models = [each.value for each in self._of_kind(ModelStateHandler)]
        groups = [
            g for each in self._of_kind(OptimizerStateHandler) for g in each.value.param_groups
        ]
        found: list[torch.Tensor] = [each for model in models for each in model.parameters()]
        found += [each for group in groups for each in group["params"]]
        found += [each for local in self._of_kind(DiLoCoStateHandler) for each in local.value.inner]
        return list({id(each): each for each in found}.values())

    def _of_kind(self, kind: type[Handler]) -> list[Handler]:
        return [each for each in self._handlers.values() if isinstance(each, kind)]

    def _parts(self) -> dict[str, Part]:
        return {
            name: handler
            for name, handler in self._handlers.items()
            if isinstance(handler, Part) and type(handler).sync is Part.sync
        }

    def _trained(self) -> list[tuple[int, list[int]]]:
        for kind in (SamplerStateHandler, LoaderStateHandler):
            for handler in self._of_kind(kind):
                trained: list[tuple[int, list[int]]] = handler.value.take_trained()
                return trained
        return []

    def _foreign_handlers(self) -> dict[str, StateHandler]:
        parts = self._parts()
        return {name: each for name, each in self._handlers.items() if name not in parts}

    def _of_ours(self) -> list[Part]:
        return [handler for handler in self._handlers.values() if isinstance(handler, Part)]

    def _snapshots(self) -> list[Snapshot]:
        return [part.snapshot for part in self._of_ours()]

    def _referred(self) -> list[object]:
        return [handler.value for handler in self._handlers.values()]

    # ---- commits ---------------------------------------------------------------------------------

    def save(self) -> None:
        """Copy all values that may have changed since the last save.

        Raises:
            Invalid: a value cannot be copied.
            DeviceLost: the accelerator failed.
        """
        # First save the values that are likely to fail, while the last commit is still complete.
        handled = {name: each.value for name, each in self._handlers.items()}
        shard_checks.check_schedules(handled)
        shard_checks.check_optimizers(handled)
        for part in self._of_ours():
            part.check()
        values = self._copied(self._values())
        if self._sharded is not None:
            self._save_shards(self._sharded, values)
            return
        for island in self._island_shards():
            # If this collective fails, the other values still belong to the previous commit.
            island.commit()
        with self._saving():
            self._begun += 1
            for handler in self._handlers.values():
                handler.save()
                failpoint("snapshot")
            self._saved_state = values
            if self._random is not None:
                self._random.save()

    def _save_shards(self, sharded: ShardedCommits, values: dict[str, Any]) -> None:
        """Save the replicated values to two snapshot buffers alternately, like the shards.

        Two buffers are needed because all ranks may have to restore the previous commit.
        """
        self._check_parameters()
        self._check_stepped()

        def replicated(
            snapshots: dict[str, Snapshot],
        ) -> tuple[dict[str, Any], dict[str, Any] | None]:
            self._begun += 1
            for name, part in self._handlers.items():
                assert isinstance(part, Part)
                part.snapshot = snapshots.setdefault(name, Snapshot())
                part.save()
                failpoint("snapshot")
            if self._random is None:
                return values, None
            self._random.save()
            return values, self._random.saved

        sharded.commit(replicated)
        self._saved_state = values

    def _steps_taken(self) -> int | None:
        counts = (each.steps_taken() for each in self._of_kind(VariablesPart))
        return next((each for each in counts if each is not None), None)

    def _restore_replicated(self, bank: ShardBuffers) -> None:
        for name, part in self._handlers.items():
            assert isinstance(part, Part)
            part.snapshot = bank.snapshots[name]
            part.snapshot.complete()
            part.restore()
        self._saved_state, saved = bank.values
        self._restore_values()
        if self._random is not None:
            self._random.adopt(saved)

    def _restore_shards(self, sharded: ShardedCommits) -> None:
        """Discard the current forward and backward pass. Outside elastic jobs, also restore this rank's shard.

        In an elastic job, the ranks of the next world choose the commit to restore in `bring_shards`.
        """
        sharded.abandon_pass()
        rt = lifecycle.active()
        if rt is not None and not rt.alone:
            return
        sharded.seal()
        bank = sharded.base()
        if bank is not None:
            self._restore_replicated(bank)
            sharded.place_own(bank)

    def is_sharded(self) -> bool:
        return self._sharded is not None

    def commits_together(self) -> bool:
        return self._sharded is not None or bool(self._island_shards())

    def held_shards(self) -> ShardsHeld | None:
        return None if self._sharded is None else self._sharded.held()

    def capture_shards(self) -> None:
        for island in self._island_shards():
            island.capture()
        sharded = self._sharded
        if sharded is not None:
            sharded.forget()
            rt = lifecycle.active()
            if rt is None or not rt.provisional:
                self.save()

    def stop_group(self) -> str:
        for handler in self._of_kind(DiLoCoStateHandler):
            if handler.value.rounds.quorum:
                return handler.value.stop_group()
        return ""

    def world_metadata(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for handler in self._of_kind(DiLoCoStateHandler):
            found |= handler.value.metadata()
        return found

    def first_broadcast(self) -> tuple[bytes, bytes] | None:
        if self.commits_together() or not self._of_kind(DiLoCoStateHandler):
            return None
        try:
            found = state_transfer.first_broadcast(self._parts(), self._values(), self.layout())
        except Invalid:  # `transfer` raises this error if the values have to be sent.
            return None
        # Compressing large values would take longer than a message.
        return None if len(found[0]) > EARLY_LIMIT else found

    def begin_reconcile(self) -> None:
        for handler in self._of_kind(DiLoCoStateHandler):
            handler.value.begin_reconcile()

    def reconcile(self) -> None:
        found = self._of_kind(DiLoCoStateHandler)
        if any(handler.value.rounds.quorum for handler in found) and len(found) > 1:
            raise Invalid(
                f"{' and '.join(f'state.{handler.name}' for handler in found)} can't be merged with grace_s=, which"
                " is limited to one DiLoCo per state: train both models in one DiLoCo, or omit grace_s"
            )
        lacking = any(handler.value.lacks_merges for handler in found)
        for island in self._island_shards():
            island.recover()
        try:
            for handler in found:
                handler.value.reconcile()
        finally:
            for island in self._island_shards():
                island.reconciled()
        if lacking:
            self.save()  # The commit was saved with the merges of this worker.

    def finish_commit(self) -> None:
        for island in self._island_shards():
            island.finish()
        if self._sharded is None:
            return
        self._sharded.seal()
        if self._sharded.discarded:
            self._sharded.redo()
            self.save()
            self._sharded.seal()

    def bring_shards(self, reset: Callable[[], None], met: WorldInventory) -> int:
        rt, sharded = lifecycle.current(), self._sharded
        assert sharded is not None
        choice = sharded.choose(met)
        if choice.bank is not None:
            self._restore_replicated(choice.bank)
        reset()
        copied = 0
        rank, lacking = rt.place.rank, choice.lacking(rt.place.size)
        ranks = (choice.root, *lacking)
        if lacking and rank in ranks:
            group_on = functools.partial(rt.group, "state", ranks=ranks)
            with rt.guard(COPY):
                copied = self.transfer(group_on(torch.device("cpu")), 0, group_on=group_on)
            if rank in lacking:
                # Let samplers divide the remaining samples among the ranks of this world.
                self.reset()
        copied += sharded.follow(rt, choice)
        self.save()
        sharded.seal()
        return copied

    def restore(self) -> None:
        """Restore the last commit. If the last save is incomplete, only gradients are cleared.

        Raises:
            DeviceLost: the accelerator failed.
        """
        if self._sharded is not None:
            self._restore_shards(self._sharded)
            return
        if not self.valid():
            log.warning(
                "restore() kept the current values, because the last save() did not complete"
            )
            for part in self._of_ours():
                part.restore_nothing()
            return
        for snapshot in self._snapshots():
            snapshot.complete()
        for handler in self._handlers.values():
            handler.restore()
        self._restore_values()
        if self._random is not None:
            self._random.restore()

    def reset(self) -> None:
        """Adapt to a change of the world: samplers and loaders redistribute the remaining samples."""
        loaders = self._of_kind(LoaderStateHandler)
        if any([loader.deals_again() for loader in loaders]):
            # The samples of the interrupted step are distributed again, possibly to other ranks.
            for optimizer in self._of_kind(OptimizerStateHandler):
                optimizer.abandon_step()
        for part in self._of_ours():
            part.reset()

    def keep_older(self, commit: Commit) -> None:
        shards = next((each for each in self._shards() if each.verify), None)
        if shards is None or self._foreign_handlers() or not self.valid():
            return
        if (
            self._keeps_steps()
        ):  # The merges of DiLoCo can't be taken back on a part of the workers.
            return
        if self._older.due(shards.step, shards.window):
            for snapshot in self._snapshots():
                snapshot.complete()
            banks = {name: part.snapshot.bank.clone() for name, part in self._parts().items()}
            random = None if self._random is None else self._random.saved
            copy = CommitCopy(self._saved_state, banks, random)
            self._older.add(commit, shards.step, copy)

    def kept_commits(self) -> list[KeptCommit]:
        return self._older.held

    def go_back(self, commit: Commit, *, restores: bool) -> None:
        self._older.forget_after(commit)
        if not restores:
            return
        copy = self._older.copy_of(commit)
        assert copy is not None, f"there is no copy of commit {commit}"
        for name, part in self._parts().items():
            newest, part.snapshot = part.snapshot, Snapshot(copy.banks[name])
            part.restore()
            part.snapshot = newest
        self._saved_state = copy.values
        self._restore_values()
        if self._random is not None and copy.random is not None:
            self._random.adopt(copy.random)
        self.save()

    def _hold(self) -> HeldCommit:
        foreign = self._foreign_handlers()
        if foreign:
            name, handler = next(iter(foreign.items()))
            raise Invalid(
                f"state.{name} uses the handler {type(handler).__name__}, which can't be written to a"
                " checkpoint: derive the handler from Part, or train without --checkpoint-dir"
            )
        held = {name: HeldPart.of(part) for name, part in self._parts().items()}
        saved = None if self._random is None else self._random.saved
        made = HeldCommit(self.layout(), self._saved_state, held, saved)
        if self._sharded is not None:
            self._sharded.hold(made)
        return made

    def _take_random(self, saved: dict[str, Any]) -> None:
        if self._random is not None:
            self._random.adopt(saved)

    # ---- other workers ---------------------------------------------------------------------------

    def layout(self) -> str:
        """Return the layout, as lines such as ``model.0.weight float32 [10, 20]`` or ``optimizer SGD groups [4]``.

        The layout contains neither values nor optimizer entries.
        """
        return "\n".join(line for part in self._parts().values() for line in part.layout())

    def _options(self) -> list[str]:
        return [] if self._sharded is None else self._sharded.options()

    def handled(self) -> list[object]:
        found: list[object] = [part.value for part in self._parts().values()]
        for local in self._of_kind(DiLoCoStateHandler):
            value = local.value
            found += [value.model, torch.nn.ParameterList(value.outer), value.outer_optimizer]
            found += [] if value.inner_optimizer is None else [value.inner_optimizer]
        return found

    def sync(self) -> None:
        """Copy rank 0's current state to all ranks, and commit it.

        Raises:
            StateMismatch: the layouts of the states differ.
        """
        for handler in self._foreign_handlers().values():
            handler.sync()
        super().sync()
        for part in self._parts().values():
            # Other ranks have done this when they received the state, so rank 0 must do it as well.
            part.reset()

    def transfer(
        self,
        group: state_transfer.CopyGroup,
        root: int,
        *,
        expected_equal: bool = False,
        group_on: GroupOn | None = None,
        keeps: bool = False,
        before_decoding: Callable[[], object] | None = None,
    ) -> int:
        """Send the live state of rank ``root`` to the other ranks, which receive it in place.

        This method does not save the state.

        Args:
            group: CPU group of the ranks.
            root: rank that sends its state.
            expected_equal: whether the receiver holds the same commit. If so, parameters that differ are named in a
                warning.
            group_on: function that creates a group of the same ranks on a GPU.
            keeps: whether to skip tensors that all receivers already hold.
            before_decoding: called on each rank before a receiver decodes the values.

        Returns:
            The number of bytes copied.

        Raises:
            StateMismatch: the layout or a schedule of this receiver differs from the sender's. Raised after the whole
                state was received.
        """
        moved, values = state_transfer.transfer(
            group,
            root,
            self._parts(),
            self._values(),
            self.layout(),
            group_on,
            keeps=keeps,
            before_decoding=before_decoding,
        )
        if group.rank == root:
            return moved
        self._take_over(values)
        for part in self._parts().values():
            part.check_received()
        if expected_equal:
            names = [name for part in self._of_ours() for name in part.differing()]
            if names:
                log.warning(
                    "%d parameters differed from rank %d's at the same commit, and were replaced by rank %d's: %s",
                    len(names),
                    root,
                    root,
                    ", ".join(names),
                )
        return moved

    def digest(self) -> int:
        """Return a 63-bit digest of the committed parameters.

        The digest is 0 if there are no parameters, the last save is incomplete, or this worker lacks merges of DiLoCo
        that the commit contains on other workers. It is also 0 if a save began during the computation; call the method
        again in that case.
        """
        if any(handler.value.lacks_merges for handler in self._of_kind(DiLoCoStateHandler)):
            return 0
        return self._digest(
            (f"{name}.{key}", tensor)
            for name, part in self._parts().items()
            for key, tensor in part.digested().items()
        )

    def digest_buffers(self) -> int:
        """Return the digest of the committed persistent buffers. See `digest`."""
        return self._digest(
            (f"{name}.{key}", tensor)
            for name, part in self._parts().items()
            for key, tensor in part.digested_buffers().items()
        )

    def digest_tensors(self) -> dict[str, int]:
        """Return the digest of each committed tensor, by name.

        Examples of names are ``model.0.weight`` and ``optimizer.0.weight.exp_avg``. The result is empty if the
        last save is incomplete, or if a save began during the computation.
        """
        if not self.valid():
            return {}
        begun = self._begun
        for snapshot in self._snapshots():
            snapshot.complete()
        found = {
            f"{name}.{key}": digest.digest([(key, tensor)])
            for name, part in self._parts().items()
            for key, tensor in part.committed().items()
        }
        return found if begun == self._begun else {}

    def _step(self) -> int:
        shards = self._shards()
        return shards[0].step if shards else -1

    def _gradients(self) -> dict[str, int]:
        shards = self._shards()
        return shards[0].gradients if shards else {}

    def _rebalance(self) -> None:
        for shards in self._shards():
            shards.committed()

    def _shards(self) -> list[Shards]:
        return [value for value in self._referred() if isinstance(value, Shards)]

    def _digest(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        begun = self._begun
        if not self.valid():
            return 0
        for snapshot in self._snapshots():
            snapshot.complete()
        made = digest.digest(tensors)
        return made if begun == self._begun else 0


def shards_of(state: State) -> ShardedCommits | None:
    """Return the object that makes a state's sharded commits, or None if the state is not sharded."""
    return state._sharded if isinstance(state, HandledState) else None


def is_sharded_within_islands(state: State) -> bool:
    """Return whether a state contains a `DiLoCo` whose model is sharded within islands."""
    return isinstance(state, HandledState) and bool(state._island_shards())
