"""Main loop of ``@elastic.run``: form a world, synchronize the state, train, and repeat when the world changes.

Interruptions are raised in user code only in the training thread, and only in a collective, an optimizer's ``step()``
or ``synchronize()``, ``commit()`` and ``check_host_updates()``. If the script raises an exception, this process exits,
and the driver decides whether the other workers continue. In a worker that is leaving the job, `runtime.departure`
handles the exception. A script can raise either of Horovod's two exceptions to start a recovery. TensorMismatch is a
subclass of one of them but ends the worker, because the same code would submit the same tensors again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, ParamSpec, TypeVar

import msgspec
import torch

from elastic import failpoints
from elastic.api.broadcasting import allgather_object
from elastic.checkpoints import training_checkpoints
from elastic.collectives import raise_together
from elastic.data.loader import loaders
from elastic.errors import (
    CollectiveFailed,
    DeviceLost,
    ElasticError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    Interrupted,
    Invalid,
    LeaveRequested,
    PeerLost,
    ScriptMistakes,
    ShardLost,
    StateMismatch,
    TensorMismatch,
    Unsupported,
    WorldChanging,
    summary_of,
)
from elastic.monitoring import step_count, timeline
from elastic.negotiation import process_sets
from elastic.optimizer.gradients import reduction_description
from elastic.protocol.calls import distinct
from elastic.protocol.messages import COPY, MEMBERS_WITH_SOURCE, STATE, World
from elastic.protocol.uncaught.sending import LostDriver, send_report
from elastic.rendezvous import distributed_samplers
from elastic.runtime import host_updates, lifecycle
from elastic.runtime.errors_while_leaving import Departure
from elastic.runtime.failures import hardware_errors
from elastic.runtime.guarded_groups import as_text, reply_to
from elastic.runtime.session import Session
from elastic.runtime.worker_runtime import WorkerRuntime
from elastic.script_checks.observer import ScriptObserver, observing
from elastic.state import bit_flips, join_preparation
from elastic.state.handlers import state_transfer
from elastic.state.snapshots import preallocated_memory
from elastic.state.state import State, has_custom_sync, options_of, runs_script_in_reset
from elastic.torch_backend import following_group, sharding_guard

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")
AGAIN = (
    "only the first elastic.run call of a job is elastic: from here on a lost or frozen worker fails the job, no"
    " worker joins, and --checkpoint-dir writes nothing; put all training into one function under elastic.run, or"
    " start a job for each"
)


def run(func: Callable[Parameters, Value]) -> Callable[Parameters, Value]:
    """Decorator for training functions that continue when the world changes.

    The function is called again after every change of the world, with the state of the last commit (after a failure) or
    with the current state (after a planned change).

    ``sys.exit`` in the function removes this worker from the job. The other workers continue immediately.

    After the function has returned on all workers, the script may call another such function or another ``fit()`` of a
    trainer. That second training is not elastic, and a log line reports this.

    Args:
        func: training function. Its first argument is a `State`.

    Returns:
        The decorated function. It returns the result of the last call of ``func``.

    Raises:
        StateMismatch: this worker's state does not match that of the other workers.
        Exception: any exception of the function, unchanged.

    Example::

        @elastic.run
        def train(state):
            while state.step < 1000:
                train_step(model, optimizer)
                state.step += 1
                state.commit()

        train(elastic.TorchState(model=model, optimizer=optimizer, step=0))
    """

    if not callable(func):
        raise Invalid(f"elastic.run got a {type(func).__name__}: decorate a function")

    @functools.wraps(func)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Value:
        state = args[0] if args else kwargs.get("state")
        train = functools.partial(func, *args, **kwargs)
        if not isinstance(state, State):
            raise Invalid(
                "the first argument of a function under elastic.run must be a State, not a"
                f" {type(state).__name__}: pass TorchState(model=..., optimizer=...)"
            )
        rt = lifecycle.current(trains=True)
        if rt.training.over:
            return _train_again(rt, train, state)
        rt.training.enter()
        departure = Departure(rt.session)
        if failpoints.in_use():
            bit_flips.offer(state)
        try:
            with (
                host_updates.registered(state),
                training_checkpoints.commits(rt, state),
                step_count.counting(),
                observing(rt, state, func) as observer,
            ):
                return _train(rt, train, state, departure, observer)
        except LeaveRequested as end:
            if rt.session.must_report:
                print(f"elastic: {end}", file=sys.stderr)
                send_report(LostDriver(), os.environ)
            sys.exit(0 if rt.session.asked_to_leave else 1)
        except SystemExit as end:
            if not rt.training.quits(end.code):
                rt.training.raised(summary_of(end), traceback.format_exc())
            raise
        except ScriptMistakes as mistakes:
            if rt.place.rank == 0:
                print(f"elastic: error: {mistakes}", file=sys.stderr, flush=True)
            rt.training.refused(str(mistakes))
            sys.exit(2)
        except DeviceLost as lost:
            _end_now(rt, lost)
        except ShardLost as lost:
            # Every worker raises the same error. The driver ends the job and reports this message.
            rt.training.lost_shards(str(lost))
            sys.exit(1)
        except Interrupted:
            raise
        except BaseException as error:  # includes KeyboardInterrupt and the script's own subclasses
            if isinstance(error, StateMismatch) and not rt.training.in_user_code:
                # The driver has rejected this worker, or its state does not match rank 0's. Report the exit now: other
                # workers may be waiting for this worker in a transfer, and its process takes seconds to exit.
                rt.training.turned_away()
                raise
            # Format the traceback before the process ends: the driver quotes it if the job fails.
            summary, trace = summary_of(error), traceback.format_exc()
            calls = distinct(error.calls) if isinstance(error, TensorMismatch) else ()
            rt.training.raised(summary, trace, hardware_errors.at_fault(error), calls)
            raise
        finally:
            departure.watch_children()  # must be called after the error was reported
            rt.training.leave()

    return wrapper


def _end_now(rt: WorkerRuntime, lost: DeviceLost) -> NoReturn:
    """Exit the process immediately: a normal exit would wait for the lost device."""
    trace = traceback.format_exc()
    rt.training.raised(summary_of(lost), trace, True)
    print(trace, end="", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def _train(
    rt: WorkerRuntime,
    train: Callable[[], Value],
    state: State,
    departure: Departure,
    observer: ScriptObserver | None,
) -> Value:
    if rt.elastic:
        sharding_guard.begin(state.handled())
        state.capture_shards()
    # Optimizers outside the state that exist before training, which every worker must have created. Later ones may come
    # and go.
    others = reduction_description.outside_state(state.handled())
    departure.waits = rt.elastic or rt.commits.durable is not None
    first = True
    while True:
        try:
            return _train_in_worlds(rt, train, state, others, departure, observer, first=first)
        except CollectiveFailed as failed:
            if failed.differs is not None or not departure.excuses_loss():
                raise
            rt.training.gave_up(summary_of(failed))
        except (ElasticError, HorovodInternalError):
            raise
        except Exception as error:
            if not departure.excuses_error():
                raise
            rt.training.gave_up(summary_of(error))
        _return_to_commit(rt, state)
        first = False


def _train_in_worlds(
    rt: WorkerRuntime,
    train: Callable[[], Value],
    state: State,
    others: str,
    departure: Departure,
    observer: ScriptObserver | None,
    *,
    first: bool,
) -> Value:
    while True:
        try:
            _enter_world(rt, state, others, first=first)
            first = False
            departure.watch_children()
            rt.training.begins()
            step_count.of_batches({each.batch_size for each in [*loaders] if each.in_state})
            if observer is not None:
                observer.begin()
            state.reconcile()
            value = unwrapped(rt.session, train)
            rt.settle()
            state.commit_rest()
            state.finish_commit()
            training_checkpoints.finish(rt, state)
            training_checkpoints.returned(rt)
            rt.training.returned()
            return value
        except WorldChanging:
            departure.ignore_children()
            rt.training.interrupted(planned=True)
            # The state is unchanged since commit() or check_host_updates(), so it can be saved without losing a step.
            try:
                rt.commits.keep(state)
            except PeerLost:  # a rank was lost while all ranks saved a sharded state
                _return_to_commit(rt, state)
        except (TensorMismatch, Unsupported, CollectiveFailed):
            # Here, CollectiveFailed means that a world of fixed size has lost a worker, and no other world follows.
            raise
        except (PeerLost, HorovodInternalError, HostsUpdatedInterrupt) as error:
            departure.ignore_children()
            kept = isinstance(error, HostsUpdatedInterrupt) and rt.commits.keep_own(state)
            if not isinstance(error, PeerLost):
                # The driver does not know of an exception that user code has raised. Report it as a failure.
                rt.training.gave_up(summary_of(error))
            if rt.alone and rt.broken:
                raise  # no further world is possible: its size is fixed, and there is no driver
            _return_to_commit(rt, state, alone=kept)
            if observer is not None:
                observer.recovered()
        if rt.alone and rt.place.size == 1:
            state.on_reset()


def _return_to_commit(rt: WorkerRuntime, state: State, *, alone: bool = False) -> None:
    """Return to the last commit after the world has ended.

    Args:
        alone: whether this worker has saved its current state and returns to that, instead of to the last commit of all
            workers.
    """
    rt.training.interrupted()
    rt.training.drain()
    if alone:
        rt.commits.committed_alone()
    rt.commits.step_back(state)


def _train_again(rt: WorkerRuntime, train: Callable[[], Value], state: State) -> Value:
    """Run a second or later training function, in the job's last world. The members of this world are fixed."""
    if rt.elastic and rt.place.rank == 0:
        print(f"elastic: {AGAIN}", file=sys.stderr, flush=True)
    assert rt.world is not None
    try:
        with rt.training.again():
            _same_layout(rt, allgather_object(state.layout(), name="elastic.layout"))
            state.reset()
            if state.is_sharded():
                state.save()
                return unwrapped(rt.session, train)
            _bring(rt, state, msgspec.structs.replace(rt.world, holders=0))
            return unwrapped(rt.session, train)
    except PeerLost as lost:
        raise CollectiveFailed(f"{lost}; {AGAIN}").with_traceback(lost.__traceback__) from None


def _same_layout(rt: WorkerRuntime, layouts: Sequence[str]) -> None:
    """Raise StateMismatch on every rank if the ranks' states have different layouts."""
    ours = layouts[rt.place.rank]
    for other, theirs in enumerate(layouts):
        if theirs != ours:
            error = StateMismatch(state_transfer.difference(theirs, ours, f"rank {other}"))
            raise_together.raise_together(rt.group(STATE, torch.device("cpu")), error)


def unwrapped(session: Session, user_code: Callable[[], Value]) -> Value:
    """Call user code. If it raises a RuntimeError caused by a lost peer, raise the corresponding interruption instead.

    torch converts exceptions in callbacks of its futures, such as a DDP communication hook that reduces twice, to
    RuntimeError.
    """
    try:
        return user_code()
    except RuntimeError:
        session.raise_if_ended()
        raise


def _enter_world(rt: WorkerRuntime, state: State, others: str, *, first: bool) -> None:
    """Wait for a world, and send the state to members that lack it.

    Args:
        rt: the runtime.
        state: the state.
        others: layout of the optimizers outside the state.
        first: whether this is the training's first world.

    Raises:
        PeerLost: a rank was lost.
    """
    if rt.alone:
        if first:
            training_checkpoints.resume(rt, state)
            state.sync()
        return
    text = "\n".join(filter(None, (state.layout(), *options_of(state), others)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
    if rt.session.recovery.newcomer:
        step_input = rt.session.recovery.step_input
        join_preparation.prepare(state, native=rt.env.native, step_input=step_input)
    joined = rt.provisional
    state.report_step()
    # before the world begins, because the driver may request a planned change of it at once
    rt.commits.stop_with(state.stop_group())
    # If the script's own code runs while this worker enters the world, the state is not known in advance.
    early = runs_script_in_reset(state)
    metadata, source = following_group.metadata(rt), dict[str, str]()
    if not early:
        metadata |= state.world_metadata()
        # The values of a larger world would be too large, and the ranks of one host exchange them faster.
        known = rt.place.several_hosts and rt.place.size <= MEMBERS_WITH_SOURCE
        broadcast = state.first_broadcast() if known and not rt.provisional else None
        if broadcast is not None:
            content, reply = broadcast
            source = {name: as_text(each) for name, each in process_sets.source().items()}
            source[STATE] = as_text(content)
            metadata[reply_to(STATE)] = as_text(reply)
    world = rt.worlds.next(
        digest, text, state.held_shards(), state.kept_commits(), metadata, source
    )
    training_checkpoints.entered(rt, world)
    following_group.follow(rt, first=first and not joined)
    rt.kept_variables.follow(rt.place, first=first)
    distributed_samplers.follow()
    reset = state.reset if first else state.on_reset
    if state.is_sharded():
        _log(process_sets.start_copy(rt, world.copying)())
        following_group.settle(rt)
        with timeline.during("state", COPY):
            copied, from_checkpoint, shards = training_checkpoints.bring_shards(rt, state, reset)
        preallocated_memory.leave()
        state.report_step()
        rt.commits.adopt(copied, from_checkpoint=from_checkpoint, shards=shards)
        if world.checkpoint:
            training_checkpoints.finish(rt, state)
        return
    if rt.commits.went_back(state) and rt.first_not_finite is not None:
        rt.first_not_finite.began()
    if world.holders > 0 and not early:
        state.begin_reconcile()
    copy_sets = functools.cache(process_sets.start_copy(rt, world.copying))
    if early:  # The script may use process sets and groups, and may change the state.
        _log(copy_sets())
        following_group.settle(rt)
    reset()
    if world.holders == 0:
        training_checkpoints.resume(rt, state)
    copied = _bring(rt, state, world, copy_sets)
    if not early:
        _log(copy_sets())
        following_group.settle(rt)
    lacking = world.lacking
    if not first and lacking and world.place.rank not in lacking and state.calls_back():
        state.save()  # From now on, the state that was sent is the newest commit of all ranks.
    preallocated_memory.leave()
    state.report_step()
    rt.commits.adopt(copied)
    rt.commits.keep_older(state)
    if copied and world.copying[0] == 0:
        # Copies of other senders are not compared with rank 0's state: without ELASTIC_DIGESTS, the parameters of ranks
        # may differ.
        rt.commits.report_digest(state.digest(), 0)
    if world.checkpoint:
        state.reconcile()
        training_checkpoints.finish(rt, state)


def _log(news: Iterable[str]) -> None:
    for line in news:
        print(f"elastic: {line}", file=sys.stderr)


def _bring(
    rt: WorkerRuntime,
    state: State,
    world: World,
    before_decoding: Callable[[], object] | None = None,
) -> int:
    if has_custom_sync(state):
        state.sync()
        return 0
    return _copy_state(rt, state, world, before_decoding)


def _copy_state(
    rt: WorkerRuntime,
    state: State,
    world: World,
    before_decoding: Callable[[], object] | None = None,
) -> int:
    """Copy the state to the ranks that lack the newest commit. Ranks that neither send nor receive return immediately.

    ``before_decoding`` is called before a received value is decoded: it may be a process set, which is then looked up.

    Returns the number of bytes copied.
    """
    ranks = world.copying
    if world.holders == 0:
        state.save()  # A first world starts from rank 0's current state, which becomes the commit.
    if not ranks:
        return 0
    group_on = functools.partial(rt.group, STATE, ranks=ranks)
    with rt.guard(COPY), timeline.during("state", COPY):
        group = rt.copy_group(STATE, ranks, replies=True)
        copied = state.transfer(
            group,
            root=0,
            group_on=group_on,
            keeps=world.holders > 0,
            before_decoding=before_decoding,
        )
    if world.place.rank != ranks[0]:
        state.save()
        state.reset()  # Make samplers divide the remaining samples among the ranks of this world.
    return copied
