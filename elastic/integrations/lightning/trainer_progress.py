"""Parts of a Trainer in a commit: the contents of Lightning's checkpoints, and running means of the epoch."""

from __future__ import annotations

import csv
import os
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import Metric

from elastic.data import DataLoader
from elastic.sharding import unsupported_sharding
from elastic.state.handlers.part import Carried
from elastic.state.torch_state import TorchState

# Key in the fit loop's state that is omitted, because the loader is a separate part of the state.
_LOADERS = "combined_loader"


def state_of(trainer: Trainer, loader: DataLoader) -> TorchState:
    """Return the state of a trainer that is set up to fit. Its values are the trainer's own objects."""
    unsupported_sharding.check_trainer("Lightning", trainer.strategy.optimizers)
    values: dict[str, Any] = {"loader": loader}
    for number, optimizer in enumerate(trainer.strategy.optimizers):
        values[f"optimizer_{number}"] = optimizer
    for number, config in enumerate(trainer.lr_scheduler_configs):
        values[f"scheduler_{number}"] = Carried.of(config.scheduler)
    for number, callback in enumerate(getattr(trainer, "callbacks", ())):
        for name, value in vars(callback).items():
            if isinstance(value, torch.nn.Module) and value is not trainer.lightning_module:
                # A callback may hold tensors, such as averaged weights.
                values[f"callback_{number}{name}"] = value
    values["progress"] = TrainerProgress(trainer)
    values["means"] = EpochMeans(trainer)
    shards = getattr(trainer.strategy, "shards", None)
    if shards is not None:  # The states of the shards contain the random generators.
        values["shards"] = shards
    return TorchState(model=trainer.strategy.model, rng=shards is None, **values)


class TrainerProgress(Carried):
    """Loops, callbacks, precision, data module and loggers of a Trainer, which are equal on all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"].pop(_LOADERS, None)
        state = {
            "loops": loops,
            "should_stop": trainer.should_stop,
            "changed": trainer.fit_loop.changed.state_dict(),
            "callbacks": {
                each.state_key: found for each in trainer.callbacks if (found := each.state_dict())
            },
            "precision": trainer.precision_plugin.state_dict(),
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "versions": [getattr(each, "version", None) for each in trainer.loggers],
        }
        if trainer.datamodule is not None:
            state["datamodule"] = trainer.datamodule.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, fit = self._trainer, self._trainer.fit_loop
        fit.load_state_dict(state["loops"])
        epochs = fit.epoch_loop
        for loop in (
            fit,
            epochs,
            epochs.val_loop,
            epochs.automatic_optimization,
            epochs.manual_optimization,
        ):
            # Mark the loops as not restarting, because they continue at the same position.
            loop.on_iteration_done()
        fit.changed.load_state_dict(state["changed"])
        trainer.should_stop = state["should_stop"]
        for callback in trainer.callbacks:
            found = state["callbacks"].get(callback.state_key)
            if found:
                if isinstance(callback, Checkpoint) and "dirpath" in found:
                    # All workers use the folder of rank 0, because a new worker would choose a different one.
                    callback.dirpath = found["dirpath"]
                callback.load_state_dict(found)
        trainer.precision_plugin.load_state_dict(state["precision"])
        trainer._logger_connector._callback_metrics.clear()
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        for logger, version in zip(trainer.loggers, state["versions"], strict=False):
            if version is not None and hasattr(logger, "_version"):
                logger._version = version
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])


class EpochMeans(Carried):
    """Sums of this rank's metrics, which are rolled back with the state but never copied to other ranks."""

    own = True

    def __init__(self, trainer: Trainer) -> None:
        self._logged: dict[str, Any] = trainer.fit_loop.epoch_loop.logged
        module = trainer.lightning_module
        self._metrics = {
            name: each for name, each in module.named_modules() if isinstance(each, Metric)
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "logged": {key: _of(metric) for key, metric in self._logged.items()},
            "metrics": {key: _of(metric) for key, metric in self._metrics.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in self._logged.keys() - state["logged"].keys():
            del self._logged[key]
        for key, values in state["logged"].items():
            _set(self._logged[key], values)
        for key, values in state["metrics"].items():
            _set(self._metrics[key], values)


_BESIDE = ("_update_count", "_computed", "_forward_cache", "has_reset")


def _of(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, *(each for each in _BESIDE if hasattr(metric, each))]
    return {name: _copied(getattr(metric, name)) for name in names}


def _set(metric: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(metric, name, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def follow_loggers(trainer: Trainer) -> None:
    """Make the loggers of a worker that became rank 0 continue the files of the previous rank 0."""
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            _go_on_with_csv(logger)


def _go_on_with_csv(logger: CSVLogger) -> None:
    """Keep the existing lines of the CSV file, which a new logger would delete."""
    path = os.path.join(logger.log_dir, "metrics.csv")
    written = ""
    if os.path.exists(path):
        with open(path, newline="") as file:
            written = file.read()
    writer = logger.experiment
    if written:
        with open(path, "w", newline="") as file:
            file.write(written)
        writer.metrics_keys = next(csv.reader(written.splitlines()))
