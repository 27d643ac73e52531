"""Loops of ``Trainer.fit`` under ``elastic.run``, which resume after an interruption by a change of the world.

A commit is made between two batches: after a batch with an optimizer step, including its validation, and after all
operations at the end of an epoch. A committed loop is therefore either in the middle of an epoch or between two epochs.
"""

from __future__ import annotations

import math
import signal
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.loops.utilities import _select_data_fetcher
from lightning.pytorch.trainer.states import RunningStage

from elastic.data import DataLoader
from elastic.errors import Invalid
from elastic.integrations import learning_rate_schedules
from elastic.integrations.lightning import trainer_progress
from elastic.run_loop import run
from elastic.state.torch_state import TorchState

# Private classes of Lightning are used, because no public class can resume in the middle of an epoch.
Trained: Any = _FitLoop
Stepped: Any = _TrainingEpochLoop


class FollowingStrategy(Protocol):
    """Interface of a strategy that the training loops need."""

    commit_every: int  # number of optimizer steps between two commits

    def follow(self) -> None:
        """Update this worker's rank and the world size to those of the current world."""

    def dealing(self) -> AbstractContextManager[None]:
        """Return a context for setting up train dataloaders, in which samples are assigned by the job's position."""


class ElasticEpochLoop(Stepped):
    """Loop over the batches of one epoch that can resume in the middle of the epoch."""

    @property
    def fit(self) -> ElasticFitLoop:
        found: ElasticFitLoop = self.trainer.fit_loop
        return found

    @property
    def logged(self) -> dict[str, Any]:
        """Return the metrics that this rank has logged in this epoch, by name."""
        found: dict[str, Any] = self._results
        return found

    def reset(self) -> None:
        if not self.fit.within_epoch:
            super().reset()

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        """Continue the loader at the job's position, which may have changed since the last iteration."""
        self.fit.deal()
        iter(data_fetcher)
        super_start = super().on_run_start
        resuming, self.trainer.fit_loop._resuming_from_checkpoint = self.fit.is_resuming, True
        try:
            super_start(data_fetcher)  # with the flag set, the call does not restart the iteration
        finally:
            self.trainer.fit_loop._resuming_from_checkpoint = resuming
        if data_fetcher.length is not None:
            data_fetcher.length = int(self.fit.max_batches)
            data_fetcher.done = data_fetcher.fetched >= data_fetcher.length

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        super().on_advance_end(data_fetcher)
        # The commit after the last batch is made once the epoch has ended, so that no worker joins in between.
        if not self._should_accumulate() and not self._num_ready_batches_reached():
            self.fit.stepped()


class ElasticFitLoop(Trained):
    """Loop over epochs that can resume after an interruption. `in_place_of` creates it from the trainer's loop."""

    strategy: FollowingStrategy
    epoch_loop: ElasticEpochLoop
    loader: DataLoader
    state: TorchState | None
    within_epoch: bool
    _shown: bool
    _steps: int
    changed: learning_rate_schedules.ScheduleLengthChange

    @classmethod
    def in_place_of(cls, loop: Any, strategy: FollowingStrategy) -> ElasticFitLoop:
        """Create the loop with all attributes of ``loop``."""
        made = cls.__new__(cls)
        made.__dict__.update(loop.__dict__)
        epochs = ElasticEpochLoop.__new__(ElasticEpochLoop)
        epochs.__dict__.update(loop.epoch_loop.__dict__)
        made.epoch_loop = epochs
        made.strategy, made.state = strategy, None
        made.within_epoch, made._steps = False, 0
        made._shown = made.trainer.is_global_zero
        made.changed = learning_rate_schedules.ScheduleLengthChange()
        return made

    # ---- data ----------------------------------------------------------------------------------------------------

    def setup_data(self) -> None:
        """Set up data as Lightning does, but with a loader whose position is part of the job's state.

        Raises:
            Invalid: the trainer reloads its dataloaders, uses ``dataloader_iter``, or has several train dataloaders.
        """
        if self._combined_loader is not None:
            return
        trainer = self.trainer
        if trainer.reload_dataloaders_every_n_epochs:
            raise Invalid(
                'strategy="elastic" supports one train dataloader, whose position it keeps: omit'
                " reload_dataloaders_every_n_epochs, or change the dataset between epochs in on_train_epoch_start"
            )
        if isinstance(
            _select_data_fetcher(trainer, RunningStage.TRAINING), _DataLoaderIterDataFetcher
        ):
            raise Invalid(
                'training_step can\'t take a dataloader_iter with strategy="elastic", which must record the batches'
                " that were used: give training_step the arguments batch and batch_idx"
            )
        with self.strategy.dealing():
            super().setup_data()
        combined: Any = self._combined_loader
        if combined is None:
            return
        loaders = combined.flattened
        if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
            raise Invalid(
                f'strategy="elastic" keeps the position of one train dataloader, but got {len(loaders)}: combine'
                " their datasets in one dataloader"
            )
        (self.loader,) = loaders
        if self._data_fetcher.length is None:
            if self.loader.shards is not None:
                raise Invalid(
                    "Lightning requests the next batch early to detect the end of the data, but a stream can't"
                    " start a second step while a step's shards are in progress: use a dataset with a length"
                )
            # Lightning fetches one batch ahead to check whether another follows.
            self.loader.ahead = 1

    def deal(self) -> None:
        """Compute the number of batches in this epoch: completed batches plus batches left in the current world."""
        trainer, done = self.trainer, self.epoch_loop.batch_progress.current.ready
        try:
            whole, left = len(self.loader), self.loader.remaining
        except TypeError:
            return  # A stream has no known length.
        self._look_at_schedules(whole)
        limit = trainer.limit_train_batches
        if isinstance(limit, int):
            self.max_batches = min(limit, done + left)
        else:
            self.max_batches = done + max(0, math.floor(whole * limit) - (whole - left))
        interval = trainer.val_check_interval
        if trainer._val_check_time_interval is None and isinstance(interval, float):
            trainer.val_check_batch = max(1, int(self.max_batches * interval))

    def _look_at_schedules(self, batches: int) -> None:
        """Warn, once per job, if the number of batches in an epoch has changed and a schedule may depend on it."""
        trainer = self.trainer
        by_step = [
            each.scheduler
            for each in trainer.lr_scheduler_configs
            if each.interval == "step" and learning_rate_schedules.counts_steps(each.scheduler)
        ]
        if not by_step or trainer.max_steps != -1 or not self.changed.see(batches):
            return
        if trainer.is_global_zero:
            assert self.changed.first is not None
            learning_rate_schedules.warn(
                by_step[0],
                self.changed.first,
                batches,
                "batches of an epoch",
                'Step it once per epoch (interval="epoch"), or set max_steps of the Trainer and create the schedule'
                " for that number",
            )

    # ---- training ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self.on_run_start()
        self.within_epoch = self.restarted_mid_epoch
        self._leave_signals_alone()
        self.state = trainer_progress.state_of(self.trainer, self.loader)
        try:
            _train(self.state, self)
        finally:
            self.state = None

    def go_on(self) -> None:
        """Run the loops in the current world, from their position to the end of training."""
        self.strategy.follow()
        self._tidy()
        self._show()
        while not self.done:
            try:
                self.on_advance_start()
                self.advance()
                self.on_advance_end()
            except StopIteration:
                break
            finally:
                self.on_iteration_done()
            self.within_epoch = False
            assert self.state is not None
            self.state.commit()
        self._restarting = False
        self.on_run_end()

    def stepped(self) -> None:
        """Handle the end of a batch after which an optimizer has stepped."""
        self._steps += 1
        if self._steps % self.strategy.commit_every == 0:
            assert self.state is not None
            self.state.commit()

    def on_advance_start(self) -> None:
        progress = self.epoch_progress.current
        self.within_epoch = progress.started > progress.processed
        if not self.within_epoch:
            self.loader.set_epoch(progress.processed)
        super().on_advance_start()

    @property
    def restarted_mid_epoch(self) -> bool:
        return self.within_epoch or bool(super().restarted_mid_epoch)

    def _tidy(self) -> None:
        trainer, module = self.trainer, self.trainer.lightning_module
        if not trainer.training:
            self.epoch_loop.val_loop._module_mode.restore(module)
            trainer.training = True
        torch.set_grad_enabled(True)
        module._current_fx_name = None
        # The next validation divides its data among the ranks of the new world.
        self.epoch_loop.val_loop._combined_loader = None
        connector = trainer._logger_connector
        connector._first_loop_iter = None
        connector._current_fx = None

    def _show(self) -> None:
        trainer, was = self.trainer, self._shown
        self._shown = trainer.is_global_zero
        if was == self._shown:
            return
        trainer_progress.follow_loggers(trainer)
        for bar in (each for each in trainer.callbacks if isinstance(each, ProgressBar)):
            if trainer.is_global_zero:
                bar.enable()
                bar.on_train_start(trainer, trainer.lightning_module)
            else:
                bar.disable()

    def _leave_signals_alone(self) -> None:
        handlers = self.trainer._signal_connector._original_handlers
        if signal.SIGTERM in handlers:
            self.trainer._signal_connector._register_signal(
                signal.SIGTERM, handlers[signal.SIGTERM]
            )


@run
def _train(state: TorchState, loop: ElasticFitLoop) -> None:
    loop.go_on()
