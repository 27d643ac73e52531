"""Keras callbacks for all backends.

The callbacks broadcast weights at the start, average metrics over all ranks, scale learning rates with the world, and
keep the position in an epoch for elastic training.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from elastic.api import arrays, broadcasting
from elastic.api import ops as collectives
from elastic.api.keras_version import keras
from elastic.errors import Invalid
from elastic.keras import backends, steps_to_epoch_end
from elastic.negotiation.process_sets import ProcessSet, global_process_set
from elastic.runtime import basics
from elastic.state.state import ObjectState


def broadcast_variables(
    variables: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite Keras variables with those of rank ``root_rank``.

    Args:
        variables: Keras variables, in the same order and with the same shapes and dtypes on every rank.
        root_rank: rank in the world, also if ``process_set`` is given.
        process_set: see `elastic.api.ops`.

    Raises:
        ValueError: ``root_rank`` is not a rank of the process set.
        PeerLost: a rank was lost.
    """
    variables = list(variables)
    made = broadcasting.broadcast_copies(map(arrays.value_of, variables), root_rank, process_set)
    for variable, tensor in zip(variables, made, strict=True):
        variable.assign(arrays.to_numpy(tensor))


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Callback that broadcasts rank ``root_rank``'s model and optimizer to all ranks.

    The model is broadcast before the first batch if its weights exist by then. Model and optimizer are broadcast after
    the first batch, when all variables exist.

    Args:
        root_rank: world rank of the sender.
        device: ignored.
        local_variables: one or several variables of the model that are not broadcast.

    Raises:
        Invalid: (a ValueError) ``local_variables`` contains an object that is not a variable.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local: list[Any] = []
        given = [] if local_variables is None else local_variables
        for each in [given] if _is_variable(given) else given:
            self.register_local_var(each)

    def register_local_var(self, var: Any) -> None:
        """Exclude ``var`` from the broadcast. Raises Invalid if it is not a variable."""
        if not _is_variable(var):
            raise Invalid(
                f"local_variables contains a {type(var).__name__}, which is not a variable: pass variables of"
                " the model, such as layer.trainable_variables"
            )
        self._local.append(var)

    def _shared(self) -> list[Any]:
        local = {id(each) for var in self._local for each in (var, backends.held(var))}
        return [
            each for each in self.model.variables if not {id(each), id(backends.held(each))} & local
        ]

    def on_train_begin(self, logs: Any = None) -> None:
        self.broadcast_done = False
        if self.model.built:
            broadcast_variables(self._shared(), self.root_rank)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        model = self.model
        broadcast_variables(self._shared(), self.root_rank)
        if getattr(model, "optimizer", None) is not None:
            broadcast_variables(model.optimizer.variables, self.root_rank)
        self.broadcast_done = True


def _is_variable(value: Any) -> bool:
    return callable(getattr(value, "assign", None))


class MetricAverageCallback(keras.callbacks.Callback):
    """Callback that averages the metrics of an epoch over all ranks, in place.

    Put it before callbacks that read metrics.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        names = sorted(
            name for name, value in (logs or {}).items() if isinstance(value, int | float)
        )
        if not names or logs is None:
            return
        own = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64, device="cpu")
        mean = collectives.allreduce(own, name="metrics", process_set=self.process_set)
        logs.update(zip(names, mean.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Callback that sets the learning rate to ``initial_lr`` times a multiplier, per epoch or per batch.

    Args:
        initial_lr: the learning rate to multiply.
        multiplier: a number, or a function of the epoch. With ``staircase=False``, the epoch is fractional.
        start_epoch: first epoch in which the schedule applies.
        end_epoch: epoch before which the schedule ends. None means never.
        staircase: whether to adjust the rate once per epoch instead of at every batch.
        momentum_correction: whether to scale the momentum of SGD with the learning rate for the batch in which the rate
            changes (Goyal et al. 2017, https://arxiv.org/abs/1706.02677).
        steps_per_epoch: number of steps per epoch of this rank; by default Keras's value.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is missing: pass the initial learning rate")
        self.initial_lr = float(initial_lr)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._steps_given = steps_per_epoch is not None
        self.current_epoch = 0
        self._momentum: float | None = None
        if callable(multiplier):
            self.staircase = staircase
            self.multiplier: Callable[[float], float] = multiplier
        else:
            constant = float(multiplier)
            self.staircase = True
            self.multiplier = lambda epoch: constant

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self._steps_given:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError("the number of steps per epoch is unknown: pass steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self._adjust(epoch)
            return
        assert self.steps_per_epoch is not None
        self._adjust(epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before = _learning_rate(optimizer)
        after = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        momentum = getattr(optimizer, "momentum", None)
        # The momentum cannot be changed for one batch if it is compiled into the step as a constant.
        eager = self.model.run_eagerly or backends.backend() == "torch"
        if self.momentum_correction and eager and isinstance(momentum, float) and before:
            self._momentum = momentum
            optimizer.momentum = momentum * after / before


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback that warms up the learning rate from ``initial_lr / size`` to ``initial_lr`` (Goyal et al. 2017).

    Args:
        initial_lr: the learning rate after the warm-up, usually a single worker's rate times ``hvd.size()``.
        warmup_epochs: duration of the warm-up, in epochs.
        momentum_correction, steps_per_epoch: see `LearningRateScheduleCallback`.
        verbose: 1 prints the final learning rate.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The factor is exactly 1 in the last batch.
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch
            size = basics.size()
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=math.ceil(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = _learning_rate(self.model.optimizer)
            print(f"\nepoch {epoch + 1}: the learning rate has warmed up to {rate:g}")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Variant of ``keras.callbacks.ModelCheckpoint`` that saves only the best model, or only its weights.

    Set ``filepath`` to change the file, best.keras or best.weights.h5 by default.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | None = None,
    ) -> None:
        super().__init__(
            filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )


# ---- elastic training --------------------------------------------------------------------------


class _Position(keras.callbacks.Callback):
    """Base class of callbacks that maintain a part of the position in a state.

    A commit at the end of the same batch or epoch includes this part, regardless of the order of the callbacks.
    """

    def __init__(self, state: ObjectState) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: Any = None) -> None:
        # Callbacks of an interrupted ``fit`` may still exist and are ignored.
        others = [each for each in _kept_with(self.state) if type(each) is not type(self)]
        _positions[self.state] = [weakref.ref(each) for each in (*others, self)]

    def batch_ended(self, batch: int) -> None:
        """Record the end of a batch. This method may be called twice."""

    def was_last_batch(self) -> bool:
        """Return whether the batch that has just ended is known to be the last one of its epoch."""
        return False

    def epoch_ended(self, epoch: int) -> None:
        """Record the end of an epoch. This method may be called twice."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batch_ended(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch_ended(epoch)


_positions: weakref.WeakKeyDictionary[ObjectState, list[weakref.ref[_Position]]]
_positions = weakref.WeakKeyDictionary()


def _kept_with(state: ObjectState) -> list[_Position]:
    return [each for ref in _positions.get(state, []) if (each := ref()) is not None]


class CommitStateCallback(keras.callbacks.Callback):
    """Callback that commits the state every ``batches_per_commit`` batches and at the end of each epoch.

    After the last batch of an epoch it commits only at the end of the epoch, so that no worker resumes in an epoch
    without remaining batches.

    Raises:
        Invalid: ``batches_per_commit`` is less than 1.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        if not isinstance(batches_per_commit, int) or batches_per_commit < 1:
            raise Invalid(
                f"batches_per_commit is {batches_per_commit!r}: pass a number of 1 or more"
            )
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit
        others = getattr(_of_fit("callbacks"), "callbacks", ())
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in others):
            raise Invalid(
                "BackupAndRestore would replace the committed state with the state of an earlier epoch whenever"
                " fit() restarts: omit BackupAndRestore, and start the job with --checkpoint-dir"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining <= 0:
            self.batches_remaining = self.batches_per_commit
            kept = _kept_with(self.state)
            for each in kept:
                each.batch_ended(batch)
            steps = (self.params or {}).get("steps")
            if not (steps and batch + 1 >= steps) and not any(
                each.was_last_batch() for each in kept
            ):
                self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for each in _kept_with(self.state):
            each.epoch_ended(epoch)
        self.state.commit()


class _EndOfEpoch:
    """Value for ``model.stop_training`` that is truthy: it ends the current epoch, but not the training."""


class UpdateBatchStateCallback(_Position):
    """Callback that maintains ``state.batch``, the number of completed batches of this epoch.

    An interrupted epoch resumes with its remaining number of batches. Which batches these are depends on the data set.
    ``fit(dataset.skip(state.batch), ...)`` would skip the completed batches in every epoch.
    """

    def __init__(self, state: ObjectState) -> None:
        super().__init__(state)
        self.steps_per_epoch: int | None = None
        # number of batches of the current epoch that were completed in an earlier world
        self._begun_at = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # valid only for this call of fit(): the number of steps may differ in another world
        self.steps_per_epoch = (self.params or {}).get("steps") or self.steps_per_epoch
        self._begun_at = self.state.batch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._begun_at and self.steps_per_epoch:
            steps_to_epoch_end.limit(self.model, self.steps_per_epoch - self._begun_at - batch)

    def batch_ended(self, batch: int) -> None:
        self.state.batch = self._begun_at + batch + 1
        if self._begun_at and self.was_last_batch() and not self.model.stop_training:
            self.model.stop_training = _EndOfEpoch()

    def was_last_batch(self) -> bool:
        return bool(self.steps_per_epoch) and self.state.batch >= self.steps_per_epoch

    def epoch_ended(self, epoch: int) -> None:
        self.state.batch = 0
        if isinstance(self.model.stop_training, _EndOfEpoch):
            self.model.stop_training = False
            _end_epoch_of_data()


class UpdateEpochStateCallback(_Position):
    """Callback that maintains ``state.epoch``, the number of completed epochs, including epochs before this ``fit``."""

    def __init__(self, state: ObjectState) -> None:
        super().__init__(state)
        self.initial_epoch = state.epoch
        self._first: int | None = None  # first epoch of this fit: 0, or its initial_epoch

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self.initial_epoch = self.state.epoch
        self._first = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._first is None:
            self._first = epoch

    def epoch_ended(self, epoch: int) -> None:
        self.state.epoch = self.initial_epoch + epoch - (self._first or 0) + 1


def _end_epoch_of_data() -> None:
    """End the epoch of the data set after an epoch that was stopped.

    Keras 3 treats a stopped epoch as the last one and does not finish iterating its data: a ``PyDataset`` would refuse
    to begin the next epoch. The iterator is available only in the frame of the calling ``fit``.
    """
    iterator = _of_fit("epoch_iterator")
    if iterator is None:
        return
    adapter = iterator.data_adapter
    if getattr(adapter, "_within_epoch", False):
        adapter.on_epoch_end()
    if backends.backend() == "tensorflow":
        from elastic.tensorflow import leftover_variables

        leftover_variables.destroy(leftover_variables.iterator_of(iterator))
        iterator._epoch_iterator = iterator._current_iterator = None


def _of_fit(name: str) -> Any:
    """Return a local variable of the ``fit`` call that runs this callback, or None."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get(name) if frame.f_code.co_name == "fit" else None
        if found is not None:
            return found
        frame = frame.f_back
    return None


def _learning_rate(optimizer: Any) -> float:
    return float(arrays.value_of(optimizer.learning_rate))
