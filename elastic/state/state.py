"""State of a training function: values that are committed, restored, and sent to workers that lack them.

`State` is the interface that scripts may subclass, `ObjectState` holds Python values. `torch_state` adds models and
optimizers. This module works without ``init()`` and without a driver, as in a world of size 1. This module never
communicates with the driver.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elastic import context
from elastic.api.broadcasting import broadcast_object
from elastic.errors import Invalid
from elastic.failpoints import failpoint
from elastic.monitoring import step_count, timeline
from elastic.negotiation import submission
from elastic.protocol.messages import Commit, KeptCommit, ShardsHeld
from elastic.runtime import lifecycle
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.state.commit_pace import CommitPace
from elastic.state.handler_registry import refuse_handled
from elastic.state.handlers import state_transfer
from elastic.state.handlers.held_commit import HeldCommit
from elastic.state.handlers.python_values import copied
from elastic.state.handlers.state_transfer import GroupOn

log = logging.getLogger("elastic.state")

Broadcast = Callable[..., Any]  # takes an object and returns rank 0's object
# minimum similarity of a misspelled option: copys is recognized as copies, but copy is not
CLOSE = 0.7


class State:
    """Base class of all states.

    A subclass implements ``save``, ``restore`` and ``sync``, and may override ``reset`` to handle a change of the
    world.

    ``bcast_object`` broadcasts an object from rank 0 and ``get_rank`` returns the rank. By default, the runtime
    provides both.
    """

    _whole = True
    _in_save = False

    def __init__(
        self, bcast_object: Broadcast | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object: Broadcast = bcast_object or broadcast_object
        self._rank: Callable[[], int] = get_rank or _rank
        self._host_messages: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._last_updated_timestamp: Any = 0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._pace = CommitPace()

    # ---- interface for scripts -------------------------------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions that are called after every change of the world, in the order of registration.

        Args:
            callbacks: functions without arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def _steps_taken(self) -> int | None:
        return None

    def report_step(self) -> None:
        """Record this state's step for reports to the driver. The state must be equal to the newest commit."""
        step_count.at(getattr(self, "step", None), self._steps_taken())

    def commit(self) -> None:
        """Save the current state for recovery from failures, then check for a change of the world.

        Raises:
            Invalid: a value cannot be copied.
            WorldChanging, PeerLost: the world changes, or a worker was lost. ``elastic.run`` handles both.
        """
        rt = lifecycle.active()
        if rt is None:
            self._save_whole()
            self._rebalance()
            self.check_host_updates()
            return
        if rt.broken and not rt.alone and self._keeps_steps():
            self._keep_own_step(rt)
            return
        rt.commits.may_commit()
        copies = self._pace.of_world(rt)
        if copies is not None and not copies.due(time.monotonic()):
            self._skip_commit()
            self.check_host_updates()
            return
        before = rt.account.begin("committing", time.monotonic())
        try:
            rt.settle()
            if copies is not None:
                copies.begin(time.monotonic())
            self._save_whole()
            rt.commits.committed()
            rt.commits.keep_older(self)
            if copies is not None:
                copies.end(rt, time.monotonic())
            self._rebalance()
            step_count.committed(getattr(self, "step", None), self._steps_taken())
            rt.commits.make_durable(self)
            self.report_commit()
        except BaseException:
            rt.account.begin(before, time.monotonic())
            raise
        rt.account.committed(time.monotonic(), before)
        self.check_host_updates()

    def _skip_commit(self) -> None:
        """Count a call of `commit` for which no rank copies the state."""

    def commit_rest(self) -> None:
        """Commit the last steps at the end of training if ``--commit-budget`` has skipped their copies.

        Raises:
            PeerLost: a rank was lost.
        """
        rt = lifecycle.active()
        if rt is not None and self._pace.skipped(rt):
            self._save_whole()
            rt.commits.committed()
            self.report_commit()

    def _keeps_steps(self) -> bool:
        return False

    def _keep_own_step(self, rt: WorkerRuntime) -> None:
        """Commit a step that this worker completed although another worker was lost, then raise PeerLost."""
        self._save_whole()
        rt.commits.committed()
        rt.commits.check()
        rt.session.raise_if_broken()

    def _save_whole(self) -> None:
        failpoint("commit")
        with timeline.during("state", "commit"):
            if _is_ours(type(self).save):
                self.save()  # save() itself marks when the previous commit becomes incomplete
            else:
                with self._saving():
                    self.save()

    def _rebalance(self) -> None:
        """Assign shards to ranks by their measured speeds, for the steps after a commit."""

    def check_host_updates(self) -> None:
        """Check for a change of the world without saving the state.

        Raises:
            WorldChanging, PeerLost: the world changes, or a worker was lost. ``elastic.run`` handles both.
            Invalid: called in the loop over a step's shards.
        """
        if why := context.refusal():
            raise Invalid(f"check_host_updates() was called {why}")
        while not self._host_messages.empty():
            timestamp, _ = self._host_messages.get()
            self._last_updated_timestamp = max(self._last_updated_timestamp, timestamp)
        rt = lifecycle.active()
        if rt is not None:
            rt.settle()
            rt.commits.check()

    def save(self) -> None:
        """Save a copy of the current state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state from the copy that `save` made."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state to all ranks, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Handle a change of the world. This method is called before the callbacks of `register_reset_callbacks`."""

    # ---- interface for the run loop --------------------------------------------------------------

    def on_reset(self) -> None:
        """Handle a change of the world: discard earlier notifications, call `reset`, then call the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        if self._reset_callbacks:
            with submission.among(_callers()):
                for callback in self._reset_callbacks:
                    callback()

    def calls_back(self) -> bool:
        """Return whether reset callbacks are registered. The callbacks may have changed committed values."""
        return bool(self._reset_callbacks)

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Record a change of the hosts for the next `check_host_updates`. Thread-safe."""
        self._host_messages.put((timestamp, update_res))

    def is_sharded(self) -> bool:
        """Return whether each rank holds a part of the state, so that commit and restore are collective."""
        return False

    def commits_together(self) -> bool:
        """Return whether `save` is a collective, of all ranks or of the ranks of an island."""
        return False

    def held_shards(self) -> ShardsHeld | None:
        """Return the shards that this rank holds, as a report for the driver, or None if the state is not sharded."""
        return None

    def capture_shards(self) -> None:
        """Take the first snapshot of a sharded state at the start of training, in the world of ``init()``."""

    def keep_older(self, commit: Commit) -> None:
        """Keep a second copy of the newest commit if one is due. See `elastic.exact.kept_commits`."""

    def kept_commits(self) -> list[KeptCommit]:
        """Return the older commits that still have copies, oldest first."""
        return []

    def go_back(self, commit: Commit, *, restores: bool) -> None:
        """Drop copies of commits that are newer than ``commit``.

        Args:
            commit: commit to return to.
            restores: whether to restore ``commit`` as the newest commit.
        """

    def finish_commit(self) -> None:
        """Wait until the newest commit can be restored even if this worker is lost. Collective if the state is sharded.

        Raises:
            PeerLost: a rank was lost.
        """

    def stop_group(self) -> str:
        """Return the name of the workers with which this worker stops for planned changes, or "" for all members.

        The name is the same in all worlds. See `CommitLog.stop_with`.
        """
        return ""

    def world_metadata(self) -> dict[str, str]:
        """Return metadata with which `reconcile` compares the ranks. See `WorkerRuntime.start_exchange`."""
        return {}

    def first_broadcast(self) -> tuple[bytes, bytes] | None:
        """Return what `transfer` broadcasts first with ``keeps`` on the root, and the reply of other ranks.

        None if this is not worth knowing in advance, because all workers that have a commit have the newest one, or
        because it is too large for the message about the world.
        """
        return None

    def begin_reconcile(self) -> None:
        """Start exchanges of `reconcile` that can run while workers wait for each other. Does not wait.

        Called in a new world before the state is sent to some workers, unless the script's own code runs before that.
        """

    def reconcile(self) -> None:
        """Complete transfers that the previous world has left unfinished.

        Collective; called before each call of the function under ``elastic.run``.

        Raises:
            PeerLost: a rank was lost.
        """

    def bring_shards(self, reset: Callable[[], None], met: Any) -> int:
        """Restore a commit of a sharded state in a new world: divide it among all ranks, and commit it again.

        Args:
            reset: called after this worker's own values are restored from the commit.
            met: the shards that the ranks hold. See `elastic.state.fully_sharded.sharded_commits.WorldInventory`.

        Returns:
            The number of bytes received from other ranks.

        Raises:
            PeerLost: a rank was lost.
            ShardLost: no commit is complete.
            StateMismatch: the parts or their tensors differ between ranks.
        """
        raise NotImplementedError

    def report_commit(self) -> None:
        """Report the digest of the newest commit to the driver if the driver compares digests (ELASTIC_DIGESTS=1)."""
        rt = lifecycle.active()
        if rt is not None and rt.env.digest_commits:
            asked = rt.env.digest_tensors
            tensors, gradients = self.digest_tensors() if asked else {}, self._gradients()
            for epoch, samples in self._trained() or [(0, [])]:
                rt.commits.report_digest(
                    self.digest(),
                    self.digest_buffers(),
                    samples,
                    epoch,
                    self._step(),
                    tensors,
                    gradients,
                )
                tensors, gradients = {}, {}

    def layout(self) -> str:
        """Return the layout of the state as lines, which must be equal on all workers.

        If there are no lines, the workers' layouts are not compared.
        """
        return ""

    def _options(self) -> list[str]:
        return []

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
        """Send the state of rank ``root`` of the group to the other ranks, without saving it.

        Args:
            group: CPU group of the ranks that take part.
            root: rank in the group that sends.
            expected_equal: whether the receivers hold the same commit. If so, a warning names parameters that differ.
            group_on: function that creates a group of the same ranks on a GPU.
            keeps: whether to skip tensors that all receivers already hold.
            before_decoding: called on each rank before a receiver decodes the values.

        Returns:
            The number of bytes copied.
        """
        return 0

    def digest(self) -> int:
        """Return a 63-bit digest of the committed parameters, or 0 without parameters."""
        return 0

    def handled(self) -> list[object]:
        """Return the models, optimizers and similar objects that have handlers."""
        return []

    def digest_buffers(self) -> int:
        """Return a 63-bit digest of the committed buffers, or 0 without buffers."""
        return 0

    def digest_tensors(self) -> dict[str, int]:
        """Return a digest of each committed tensor, by name. Parameters, buffers and optimizer entries are included."""
        return {}

    def _step(self) -> int:
        return -1

    def _gradients(self) -> dict[str, int]:
        """Return digests of the last step's gradients by shard, if the job requests them."""
        return {}

    def _trained(self) -> list[tuple[int, list[int]]]:
        """Return the IDs of the samples that this rank has trained on since the last call, by epoch."""
        return []

    def valid(self) -> bool:
        """Whether the last save is complete. A save that raised an exception remains incomplete until the next save."""
        return self._whole

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Mark the commit as incomplete until the outermost save has succeeded."""
        outermost = not self._in_save
        self._in_save, self._whole = True, False
        try:
            yield
        finally:
            if outermost:
                self._in_save = False
        if outermost:
            self._whole = True


class ObjectState(State):
    """State of Python values as attributes, as in ``ObjectState(epoch=0, batch=0)``. Values are deep-copied.

    The keywords define the state. Attributes set later are not part of it.

    Raises:
        Invalid: a value is a model, an optimizer or another value that only a `TorchState` handles.
    """

    if TYPE_CHECKING:  # for type checkers: the keywords define the attributes

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(
        self,
        bcast_object: Broadcast | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        refuse_method_names(kwargs)
        refuse_misspelled(kwargs, {"bcast_object": callable, "get_rank": callable})
        for name, value in kwargs.items():
            refuse_handled(name, value)
        self._saved_state: dict[str, Any] = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = self._copied(kwargs)

    def save(self) -> None:
        self._saved_state = self._copied(self._values())
        if not self._in_save:
            self._whole = True

    def restore(self) -> None:
        if not self.valid():
            log.warning(
                "restore() kept the current values, because the last save() did not complete"
            )
            return
        self._restore_values()

    def sync(self) -> None:
        """Copy the current values of rank 0 to all ranks, and commit them."""
        if custom_broadcast(self):
            self._take_over(self._bcast_object(self._values()))
        else:
            broadcast_state(self)
        self.save()
        rt = lifecycle.active()
        if rt is not None:
            rt.commits.committed()

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
        """Send the values of rank ``root`` of the group to the other ranks, without saving them.

        Arguments and result are those of `State.transfer`.

        Raises:
            StateMismatch: a receiver cannot read the values. Raised on this receiver.
            Invalid: the root cannot pickle the values. Raised on the root.
        """
        moved, values = state_transfer.transfer(
            group, root, {}, self._values(), self.layout(), before_decoding=before_decoding
        )
        if group.rank != root:
            self._take_over(values)
        return moved

    def _hold(self) -> HeldCommit:
        return HeldCommit(self.layout(), self._saved_state, {}, None)

    def _parts(self) -> Mapping[str, Any]:
        """Return the parts of the state that contain tensors, by name."""
        return {}

    def _take_random(self, saved: dict[str, Any]) -> None:
        """Restore the random generators from ``saved`` if they are part of this state."""

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}

    def _copied(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: copied(value, f"state.{name}", self._referred()) for name, value in values.items()
        }

    def _referred(self) -> list[object]:
        return []

    def _set_attrs(self) -> None:
        """Set the attributes to the saved values.

        Subclasses written for Horovod call this in ``restore`` and ``sync``.
        """
        self._restore_values()

    def _restore_values(self) -> None:
        for name, value in self._copied(self._saved_state).items():
            setattr(self, name, value)

    def _take_over(self, values: dict[str, Any]) -> None:
        # Take the names from rank 0, but keep the committed values until the next save.
        self._saved_state = {name: self._saved_state.get(name, v) for name, v in values.items()}
        for name, value in values.items():
            setattr(self, name, value)


def hold(state: ObjectState) -> HeldCommit:
    """Keep the newest commit unchanged until it is released.

    Raises:
        Invalid: the state contains values that cannot be written to a checkpoint.
        DeviceLost: the accelerator failed.
    """
    return state._hold()


def options_of(state: State) -> list[str]:
    """Return the state's options as lines. They must be equal on all workers, but may differ from a checkpoint's."""
    return state._options()


def prepare_hold(state: ObjectState) -> None:
    """Allocate the memory that the first commit after a `hold` needs. Thread-safe."""
    for part in state._parts().values():
        part.snapshot.prepare()


def parts_of(state: ObjectState) -> Mapping[str, Any]:
    """Return the parts of the state that contain tensors, by name."""
    return state._parts()


def names_of(state: ObjectState) -> list[str]:
    """Return the names of the Python values."""
    return list(state._values())


def take_values(state: ObjectState, values: dict[str, Any]) -> None:
    """Set the current values of the state without saving them."""
    state._take_over(values)


def take_random(state: ObjectState, saved: dict[str, Any]) -> None:
    """Restore the random generators, if the state contains them, from a commit of another process of the same rank."""
    state._take_random(saved)


def broadcast_state(state: State) -> None:
    """Send rank 0's state to the whole world.

    Raises:
        PeerLost: a worker was lost during the transfer.
        StateMismatch: the structure of a rank's state differs from that of rank 0.
    """
    rt = lifecycle.active()
    if rt is None:
        return
    import torch

    group = rt.group("state", torch.device("cpu"))
    if group.size > 1:
        with rt.guard("copy of the state"):
            state.transfer(group, root=0, group_on=functools.partial(rt.group, "state"))


def refuse_method_names(names: Iterable[str]) -> None:
    """Raise Invalid if a value's name would hide a method, such as ``commit``."""
    for name in names:
        if callable(getattr(ObjectState, name, None)) or name.startswith("_"):
            raise Invalid(
                f"the name {name!r} is reserved: use another name for the value of the state"
            )


def refuse_misspelled(
    values: Mapping[str, Any], options: Mapping[str, Callable[[object], bool]]
) -> None:
    """Raise Invalid if a value looks like a misspelled option: a close name, and a value of the option's type.

    Args:
        values: values of a state, by name.
        options: by name of the option, a function that returns whether a value is valid for it.
    """
    for name, value in values.items():
        for option, fits in options.items():
            if _resembles(name.lower(), option) and fits(value):
                raise Invalid(
                    f"{name}={value!r} would become a value of the state, but resembles the option {option}:"
                    f" write {option}={value!r}, or use another name for the value"
                )


def _resembles(name: str, option: str) -> bool:
    if sorted(name.rstrip("s")) == sorted(option.rstrip("s")):
        return True
    return len(option) > 5 and difflib.SequenceMatcher(None, name, option).ratio() >= CLOSE


def custom_broadcast(state: State) -> bool:
    """Return whether the script has passed its own ``bcast_object`` to the state."""
    return state._bcast_object is not broadcast_object


def has_custom_sync(state: State) -> bool:
    """Return whether the script's own code synchronizes the state, so that all workers must call ``sync`` together."""
    ours = _is_ours(type(state).sync)
    foreign: Callable[[], dict[str, Any]] = getattr(state, "_foreign_handlers", dict)
    return not ours or custom_broadcast(state) or bool(foreign())


def runs_script_in_reset(state: State) -> bool:
    """Return whether the script's own code runs when the state is reset or synchronized in a new world."""
    reset = all(map(_is_ours, (type(state).reset, type(state).on_reset)))
    return state.calls_back() or has_custom_sync(state) or not reset


def overridden(state: State) -> list[str]:
    """Return the names of the methods ``save`` and ``restore`` that a script's subclass overrides."""
    methods = {name: getattr(type(state), name) for name in ("save", "restore")}
    return [name for name, each in methods.items() if not each.__module__.startswith("elastic.")]


def _is_ours(method: Callable[..., Any]) -> bool:
    return getattr(method, "__module__", "").startswith("elastic.state.")


def _rank() -> int:
    found = lifecycle.position()
    return 0 if found is None else found[0].rank


def _callers() -> tuple[int, ...] | None:
    rt = lifecycle.active()
    world = None if rt is None else rt.world
    if world is None or world.holders == world.place.size:
        return None
    rank, holders = world.place.rank, max(1, world.holders)
    return tuple(range(holders)) if rank < holders else (rank,)
