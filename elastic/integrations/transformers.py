"""Elastic training with Hugging Face's Trainer: use `ElasticTrainer` in place of ``Trainer``. See docs/transformers.md.

The Trainer's own loop is used. Within an epoch, it resumes from the last commit with the number of batches that remain
in the current world.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    SchedulerType,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from elastic.data import DataLoader
from elastic.errors import Invalid
from elastic.integrations import accelerate, learning_rate_schedules, tested_versions
from elastic.run_loop import run
from elastic.sharding import unsupported_sharding
from elastic.state.handlers.part import Carried
from elastic.state.torch_state import TorchState

Epoch = dict[str, Any]  # arguments of Trainer._run_epoch
_OWN_PACE = (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.INVERSE_SQRT)


class ElasticTrainerMixin:
    """Mixin that makes a subclass of Trainer elastic: ``class MyTrainer(ElasticTrainerMixin, Seq2SeqTrainer)``.

    The state is committed after every ``commit_every``-th optimizer step, including its logs, evaluation and
    checkpoints, and after each epoch.

    Raises:
        Invalid: an argument is not supported in a changing world. Raised before training starts.
    """

    commit_every = 1

    if TYPE_CHECKING:
        args: TrainingArguments
        state: TrainerState
        control: TrainerControl
        accelerator: Any
        model: Any
        model_wrapped: Any
        optimizer: Any
        lr_scheduler: Any
        _created_lr_scheduler: bool
        callback_handler: Any
        train_dataset: Any

        def is_local_process_zero(self) -> bool: ...

        def is_world_process_zero(self) -> bool: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        tested_versions.check("transformers")
        super().__init__(*args, **kwargs)
        self._kept: TorchState | None = None
        self._steps = _Steps()
        _refuse(self)
        self.callback_handler.add_callback(_Fraction(self._steps))

    def get_train_dataloader(self) -> Any:
        prepared = super().get_train_dataloader()  # type: ignore[misc]
        if not accelerate.is_dealable(prepared):
            raise Invalid(
                f"the train dataloader is a {type(prepared).__name__}, but an elastic Trainer needs a loader"
                " that accelerator.prepare() returned, without dispatch_batches"
            )
        accelerate.deal(prepared)
        return prepared

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the Trainer's schedule and adapt it to the number of steps in the current world."""
        given = self.lr_scheduler is not None
        create = super().create_scheduler  # type: ignore[misc]
        made = create(num_training_steps, optimizer)
        trainers_own = getattr(create, "__func__", None) is Trainer.create_scheduler
        if trainers_own and not given and isinstance(made, LambdaLR) and _has_an_end(self.args):
            factor = learning_rate_schedules.ScaledSchedule(
                functools.partial(_factor, self.args), num_training_steps
            )
            made.lr_lambdas = [factor for _ in made.lr_lambdas]
        return made

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *rest: Any, **named: Any
    ) -> tuple[int, int]:
        """Return the number of complete epochs in a checkpoint, and the number of batches of the next epoch to skip.

        The Trainer computes both from the number of steps and the steps per epoch, which depend on the size of the
        world. Therefore, this method uses the number of epochs in the checkpoint. With ``max_steps``, the Trainer
        derives the number of epochs from the current world, and its own result is correct.
        """
        init = super()._init_training_state  # type: ignore[misc]
        found: tuple[int, int] = init(max_steps, num_update_steps_per_epoch, *rest, **named)
        epoch_known = self.state.global_step and self.state.epoch and has_length(self.train_dataset)
        if not epoch_known or self.args.max_steps > 0:
            return found
        made = self.state.epoch * num_update_steps_per_epoch
        # A difference of up to one step is due to how the Trainer counts an epoch with gradient accumulation.
        if abs(made - self.state.global_step) <= 1:
            return found
        steps = round(made)
        whole, left = divmod(steps, num_update_steps_per_epoch)
        skipped = 0 if self.args.ignore_data_skip else left
        return whole, skipped * self.args.gradient_accumulation_steps

    def _run_epoch(self, **epoch: Any) -> None:
        """Train all epochs when the Trainer calls this method for the first epoch. Later calls do nothing."""
        loader = accelerate.deal(epoch["train_dataloader"])
        self._steps.begin(epoch["epoch"])
        if epoch["resume_from_checkpoint"] is not None:
            self._resume(epoch, loader)
        self._kept = _state_of(self, loader)
        try:
            _train(self._kept, self, epoch, loader)
        finally:
            self._kept = None
        self.control.should_training_stop = True

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        steps = self._steps
        if self._kept is None or not steps.take():
            return
        # The commit after the last step is made once the epoch has ended.
        over = self.control.should_epoch_stop or self.control.should_training_stop
        if steps.done < steps.all and not over:
            steps.count += 1
            if steps.count % self.commit_every == 0:
                self._kept.commit()

    def _resume(self, epoch: Epoch, loader: DataLoader) -> None:
        """Resume from a checkpoint of the Trainer.

        The checkpoint is assumed to have been written in a world of the current size.
        """
        batches = 0 if self.args.ignore_data_skip else epoch["steps_trained_in_current_epoch"]
        consumed = batches * self.args.world_size * self.args.train_batch_size
        self._steps.done = batches // self.args.gradient_accumulation_steps
        loader.load_state_dict(
            {"epoch": epoch["epoch"], "consumed": consumed, "length": None, "by_steps": False}
        )
        self._load_rng_state(epoch["resume_from_checkpoint"])  # type: ignore[attr-defined]
        factor, schedule = self._factor()
        if factor is not None and self.state.epoch and self.args.max_steps <= 0:
            factor.resume(schedule.last_epoch, self.state.epoch / self.args.num_train_epochs)

    def go_on(self, first: Epoch, loader: DataLoader) -> None:
        """Train in the current world, from the position of the state to the end."""
        epochs = self._epochs(first)
        steps = self._steps
        accelerate.follow(self.accelerator)
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()
        while steps.epoch < epochs:
            if steps.epoch != first["epoch"] and steps.done == 0 and not steps.begun:
                begin = self.callback_handler.on_epoch_begin
                self.control = begin(self.args, self.state, self.control)
            steps.begun = True
            loader.set_epoch(steps.epoch)
            self._one_epoch(first, loader)
            steps.epoch, steps.done, steps.begun = steps.epoch + 1, 0, False
            over = self.control.should_training_stop
            if over:
                steps.epoch = epochs
            assert self._kept is not None
            self._kept.commit()

    def _one_epoch(self, first: Epoch, loader: DataLoader) -> None:
        steps, each = self._steps, self.args.gradient_accumulation_steps
        arguments = {**first, "epoch": steps.epoch, "resume_from_checkpoint": None}
        try:
            left = loader.remaining
        except TypeError:  # A stream has no length, and ends after max_steps.
            left = first["steps_in_epoch"] - steps.done * each
        steps.all = steps.done + math.ceil(left / each)
        if self.args.max_steps <= 0:
            after = math.ceil(len(loader) / each) * (self.args.num_train_epochs - steps.epoch - 1)
            self.state.max_steps = (
                self.state.global_step + steps.all - steps.done + math.ceil(after)
            )
            self._follow_steps()
        if left:
            arguments |= {
                "steps_in_epoch": left,
                "num_update_steps_per_epoch": math.ceil(left / each),
            }
            super()._run_epoch(**arguments)  # type: ignore[misc]

    def _follow_steps(self) -> None:
        """Adapt the schedule to the new `state.max_steps`, or warn that it cannot be adapted."""
        factor, schedule = self._factor()
        if factor is not None:
            factor.follow(schedule.last_epoch, self.state.max_steps - self.state.global_step)
            return
        if not learning_rate_schedules.counts_steps(schedule) or self._created_lr_scheduler:
            return  # A schedule of this kind does not depend on the number of steps.
        changed = self._steps.changed
        if changed.see(self.state.max_steps) and self.state.is_world_process_zero:
            assert changed.first is not None
            learning_rate_schedules.warn(
                schedule,
                changed.first,
                self.state.max_steps,
                "steps",
                "Leave the schedule to the Trainer (lr_scheduler_type), which adapts it, or pass max_steps",
            )

    def _factor(self) -> tuple[learning_rate_schedules.ScaledSchedule | None, Any]:
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        (first, *_) = getattr(schedule, "lr_lambdas", None) or [None]
        return (
            first if isinstance(first, learning_rate_schedules.ScaledSchedule) else None
        ), schedule

    def _epochs(self, first: Epoch) -> int:
        if self.args.max_steps > 0:
            return 1 << 62  # No limit is needed, because DefaultFlowCallback stops at max_steps.
        return math.ceil(self.args.num_train_epochs)


class ElasticTrainer(ElasticTrainerMixin, Trainer):
    """``transformers.Trainer`` that continues training when workers fail or join."""


class _Steps:
    """Position of the Trainer's loop, as part of the state."""

    def __init__(self) -> None:
        self.epoch = 0
        self.done = 0  # number of optimizer steps completed in this epoch
        # number of optimizer steps in this epoch: completed steps plus steps left in the current world
        self.all = 0
        self.begun = False
        self.count = 0
        self.changed = learning_rate_schedules.ScheduleLengthChange()
        self._fresh = False

    def begin(self, epoch: int) -> None:
        self.epoch, self.done, self.begun, self.count = epoch, 0, True, 0

    def stepped(self) -> None:
        self.done += 1
        self._fresh = True

    def take(self) -> bool:
        """Return whether an optimizer has stepped since the last call."""
        fresh, self._fresh = self._fresh, False
        return fresh


class _Fraction(TrainerCallback):
    """Callback that counts steps and sets the completed fraction of the epoch, even if the world has changed in it."""

    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._steps.stepped()
        if self._steps.all:
            state.epoch = self._steps.epoch + self._steps.done / self._steps.all


def _has_an_end(args: TrainingArguments) -> bool:
    """Return whether the schedule that the arguments select depends on the number of steps."""
    return SchedulerType(args.lr_scheduler_type) not in _OWN_PACE or 0 < args.warmup_steps < 1


def _factor(args: TrainingArguments, steps: int) -> learning_rate_schedules.Factor:
    made: Any = get_scheduler(
        args.lr_scheduler_type,
        optimizer=torch.optim.SGD([torch.zeros(1, dtype=torch.float32, device="cpu")], lr=1.0),
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    factor: learning_rate_schedules.Factor = made.lr_lambdas[0]
    return factor


@run
def _train(
    state: TorchState, trainer: ElasticTrainerMixin, first: Epoch, loader: DataLoader
) -> None:
    trainer.go_on(first, loader)


class _Progress(Carried):
    """TrainerState, control, callbacks with a state, and losses since the last log, as part of the state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer, steps = self._trainer, self._trainer._steps
        return {
            "trainer": {
                name: copy.deepcopy(value)
                for name, value in vars(trainer.state).items()
                if name
                not in ("stateful_callbacks", "is_local_process_zero", "is_world_process_zero")
            },
            "control": dict(vars(trainer.control)),
            "callbacks": [each.state() for each in self._exportable()],
            "steps": (steps.epoch, steps.done, steps.begun, steps.count),
            "changed": steps.changed.state_dict(),
            "flos": trainer.current_flos,
            "logged": (trainer._total_loss_scalar, trainer._globalstep_last_logged),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, steps = self._trainer, self._trainer._steps
        vars(trainer.state).update(copy.deepcopy(state["trainer"]))
        vars(trainer.control).update(state["control"])
        for callback, found in zip(self._exportable(), state["callbacks"], strict=True):
            vars(callback).update(found["attributes"])
        steps.epoch, steps.done, steps.begun, steps.count = state["steps"]
        steps.changed.load_state_dict(state["changed"])
        trainer.current_flos = state["flos"]
        trainer._total_loss_scalar, trainer._globalstep_last_logged = state["logged"]

    def _exportable(self) -> list[Any]:
        found = self._trainer.callback_handler.callbacks
        return [each for each in found if isinstance(each, ExportableState)]


class _Loss(Carried):
    """Loss of this rank's batches since the last log, as part of the state."""

    own = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self._trainer._tr_loss.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer._tr_loss = state["loss"].clone()


def _state_of(trainer: Any, loader: DataLoader) -> TorchState:
    unsupported_sharding.check_trainer(
        "transformers", [trainer.optimizer.optimizer], [trainer.model_wrapped]
    )
    values: dict[str, Any] = {
        "loader": loader,
        "optimizer": trainer.optimizer.optimizer,
        "scheduler": Carried.of(getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)),
        "progress": _Progress(trainer),
        "loss": _Loss(trainer),
    }
    if trainer.accelerator.scaler is not None:
        values["scaler"] = trainer.accelerator.scaler
    model = accelerate.averaging(trainer.model_wrapped)
    if model is None:
        raise Invalid(
            "the model is not in DistributedDataParallel, but an elastic Trainer needs a whole model on each rank: omit"
            " fsdp, deepspeed and other options that shard the model"
        )
    return TorchState(model=model, rng=True, **values)


def _refuse(trainer: Any) -> None:
    args = trainer.args
    accelerate.refuse(trainer.accelerator)
    if args.auto_find_batch_size:
        raise Invalid(
            "auto_find_batch_size would select a different batch size on each rank: set"
            " per_device_train_batch_size instead"
        )
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise Invalid(
            'train_sampling_strategy="batch_rebalance" divides samples among a fixed number of ranks: choose another'
            " strategy"
        )
    if torch.cuda.is_available() and args.n_gpu > 1:
        raise Invalid(
            "this process would use several GPUs through DataParallel: start one worker per GPU, as in"
            " elasticrun -np 2"
        )
