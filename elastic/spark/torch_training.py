"""Elastic training of a torch model on Parquet data, in the workers that an estimator starts.

A step consumes the same rows in a world of any size: ``batch_size`` rows for each process that was requested. The state
contains the sums of losses and metrics, so that the history counts each row once.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.errors import Invalid
from elastic.spark.parquet import ParquetData

PRINTED = 100  # interval between log lines, in steps
Tensors = list[torch.Tensor]
Shapes = Sequence[Sequence[int]] | None


@dataclass(frozen=True, kw_only=True)
class TorchTraining:
    """Training function for every worker, which returns the training history. Rank 0 saves the checkpoint.

    Args:
        features, labels: numbers of input columns and of label columns. An additional column contains sample weights.
        losses: loss function for each label, or function that constructs it.
        metrics: groups of metric functions, one group for each label.
        save: function that rank 0 calls after each epoch with the content of a checkpoint.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer  # optimizer of the model's parameters
    train: ParquetData
    validation: ParquetData | None
    features: int
    labels: int
    weighted: bool
    losses: Sequence[Callable[..., Any]]
    constructors: Sequence[Callable[..., Any]]
    loss_weights: Sequence[float]
    metrics: Sequence[Sequence[Callable[..., Any]]]
    input_shapes: Shapes
    label_shapes: Shapes
    minibatch: Callable[..., Any] | None
    compression: Any
    processes: int
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None
    val_steps: int | None
    shuffle: bool
    seed: int | None
    use_gpu: bool
    verbose: int
    save: Callable[[bytes], None]

    def __call__(self) -> list[dict[str, Any]]:
        import elastic

        elastic.init()
        return _Run(self, elastic).to_its_end()


class _Run:
    """One worker's execution of a `TorchTraining`."""

    def __init__(self, job: TorchTraining, elastic: Any) -> None:
        self.job = job
        self.elastic = elastic
        self.device = self._device()
        self.seed = 0 if job.seed is None else job.seed
        torch.manual_seed(self.seed)
        job.model.to(self.device)
        # load_state_dict() moves the entries of the optimizer's state to the model's device.
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        # Scale the learning rate by the number of processes, like Horovod's estimators.
        for group in job.optimizer.param_groups:
            group["lr"] *= job.processes
        compression = job.compression or elastic.Compression.none
        self.optimizer = elastic.DistributedOptimizer(
            job.optimizer, named_parameters=job.model.named_parameters(), compression=compression
        )
        given = {"model": job.model, "optimizer": self.optimizer}
        self.losses = [each(**given) for each in job.constructors] or list(job.losses)
        self.loader = elastic.data.DataLoader(
            job.train.dataset(),
            global_batch_size=job.batch_size * job.processes,
            shuffle=job.shuffle,
            seed=self.seed,
        )

    def to_its_end(self) -> list[dict[str, Any]]:
        job, elastic = self.job, self.elastic
        width = 2 + len(job.metrics) * job.labels

        def train(state: Any) -> list[dict[str, Any]]:
            while state.epoch < job.epochs:
                self.loader.set_epoch(state.epoch)
                job.model.train()
                for batch in self._rest(state):
                    sums = self._step(batch)
                    state.sums = [a + b for a, b in zip(state.sums, sums, strict=True)]
                    state.step += 1
                    if job.verbose and elastic.rank() == 0 and state.step % PRINTED == 1:
                        print(f"epoch {state.epoch} step {state.step}: {self._means(state.sums)}")
                    state.commit()
                entry = {"epoch": state.epoch, "train": self._means(state.sums)}
                if job.validation is not None:
                    entry["validation"] = self._validated(job.validation)
                if elastic.rank() == 0:
                    job.save(self._checkpoint())
                    if job.verbose:
                        print(entry, flush=True)
                state.history = [*state.history, entry]
                state.epoch, state.step, state.sums = state.epoch + 1, 0, [0.0] * width
                state.commit()
            return list(state.history)

        state = elastic.TorchState(
            job.model,
            self.optimizer,
            loader=self.loader,
            epoch=0,
            step=0,
            sums=[0.0] * width,
            history=[],
        )
        history: list[dict[str, Any]] = elastic.run(train)(state)
        return history

    # ---- one step --------------------------------------------------------------------------------

    def _rest(self, state: Any) -> Iterable[Any]:
        """Return the remaining batches of the epoch, limited to the given number of steps."""
        for batch in self.loader:
            if self.job.steps is not None and state.step >= self.job.steps:
                return
            yield batch

    def _step(self, batch: Sequence[torch.Tensor]) -> list[float]:
        """Train on a batch. Return sums over the batches of all ranks: number of rows, losses, metrics."""
        job = self.job
        inputs, labels, weights = self._prepared(batch)
        share = self.loader.weight
        if job.minibatch is not None:

            def scaled(outputs: Any, labels: Any, weights: Any) -> Any:
                return self._loss(outputs, labels, weights) * share

            outputs, loss = job.minibatch(
                job.model, self.optimizer, self._transformed, scaled, inputs, labels, weights
            )
            outputs, labels = self._transformed(outputs, labels)
            loss = loss / share if share else loss
        else:
            self.optimizer.zero_grad()
            outputs, labels = self._transformed(job.model(*inputs), labels)
            loss = self._loss(outputs, labels, weights)
            (loss * share).backward()
            self.optimizer.step()
        return self._summed(outputs, labels, loss, len(labels[0]) if share else 0)

    def _prepared(
        self, batch: Sequence[torch.Tensor]
    ) -> tuple[Tensors, Tensors, torch.Tensor | None]:
        job = self.job
        columns = [column.to(self.device) for column in batch]
        inputs = [
            _shaped(each.float(), i, job.input_shapes)
            for i, each in enumerate(columns[: job.features])
        ]
        labels = columns[job.features : job.features + job.labels]
        if job.label_shapes is not None:
            labels = [_shaped(each, i, job.label_shapes) for i, each in enumerate(labels)]
        return inputs, labels, columns[-1].float() if job.weighted else None

    @staticmethod
    def _transformed(outputs: Any, labels: Tensors) -> tuple[Tensors, Tensors]:
        """Return the outputs as a list, and the transformed labels.

        A label is reshaped to its output's shape if both have the same number of elements.
        """
        outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        same = [
            label.reshape(output.shape).to(output.dtype)
            if output.shape.numel() == label.shape.numel()
            else label
            for label, output in zip(labels, outputs, strict=True)
        ]
        return outputs, same

    def _loss(self, outputs: Tensors, labels: Tensors, weights: torch.Tensor | None) -> Any:
        parts = zip(self.losses, outputs, labels, self.job.loss_weights, strict=True)
        return sum(
            share
            * (loss(output, label) if weights is None else _weighted(loss, output, label, weights))
            for loss, output, label, share in parts
        )

    # ---- history ---------------------------------------------------------------------------------

    def _summed(self, outputs: Tensors, labels: Tensors, loss: Any, rows: int) -> list[float]:
        """Return the sums of this step over all ranks: number of rows, losses, metrics."""
        values = [torch.ones((), dtype=torch.float32, device="cpu"), loss.detach()]
        with torch.no_grad():
            for group in self.job.metrics:
                values += [
                    torch.as_tensor(metric(output, label), dtype=torch.float64, device="cpu")
                    for metric, output, label in zip(group, outputs, labels, strict=True)
                ]
        if rows:
            own = torch.tensor(
                [rows * float(value) for value in values], dtype=torch.float64, device="cpu"
            )
        else:  # This rank had only a placeholder row, which must not be counted.
            own = torch.zeros(len(values), dtype=torch.float64, device="cpu")
        op = self.elastic.Sum
        return [float(each) for each in self.elastic.allreduce(own, op=op, name="history")]

    def _means(self, sums: Sequence[float]) -> dict[str, Any]:
        rows, loss, *metrics = sums
        count = max(1.0, rows)
        labels = self.job.labels
        groups = [metrics[at : at + labels] for at in range(0, len(metrics), labels)]
        return {"loss": loss / count, "all_metrics": [[m / count for m in each] for each in groups]}

    @torch.no_grad()
    def _validated(self, data: ParquetData) -> dict[str, Any]:
        job = self.job
        job.model.eval()
        loader = self.elastic.data.DataLoader(
            data.dataset(), global_batch_size=job.val_batch_size * job.processes
        )
        total = [0.0] * (2 + len(job.metrics) * job.labels)
        for number, batch in enumerate(loader):
            if job.val_steps is not None and number >= job.val_steps:
                break
            inputs, labels, weights = self._prepared(batch)
            outputs, labels = self._transformed(job.model(*inputs), labels)
            loss = self._loss(outputs, labels, weights)
            rows = len(labels[0]) if loader.weight else 0
            total = [
                a + b for a, b in zip(total, self._summed(outputs, labels, loss, rows), strict=True)
            ]
        return self._means(total)

    def _checkpoint(self) -> bytes:
        """Return the state of model and optimizer as bytes, with the learning rate for one process."""
        optimizer = self.optimizer.state_dict()
        groups = [
            {**group, "lr": group["lr"] / self.job.processes} for group in optimizer["param_groups"]
        ]
        content = {
            "model": self.job.model.state_dict(),
            "optimizer": {**optimizer, "param_groups": groups},
        }
        file = io.BytesIO()
        torch.save(content, file)
        return file.getvalue()

    def _device(self) -> torch.device:
        if not self.job.use_gpu or not torch.cuda.is_available():
            return torch.device("cpu")
        torch.cuda.set_device(self.elastic.local_rank() % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())


def _shaped(column: torch.Tensor, index: int, shapes: Shapes) -> torch.Tensor:
    if shapes is not None:
        return column.reshape(tuple(shapes[index]))
    return column.unsqueeze(1) if column.dim() == 1 else column


def _weighted(loss: Any, output: Any, label: Any, weights: torch.Tensor) -> Any:
    """Return the loss over a batch: the mean over all rows of the row's loss times its weight.

    Raises Invalid for a loss without reduction='none'.
    """
    if isinstance(loss, torch.nn.Module) and hasattr(loss, "reduction"):
        without = copy.copy(loss)
        vars(without)["reduction"] = "none"
        each = without(output, label)
    elif "reduction" in inspect.signature(loss).parameters:
        each = loss(output, label, reduction="none")
    else:
        raise Invalid(
            "sample_weight_col needs a loss with the argument reduction='none', as the losses of torch.nn.functional"
            " have: pass such a loss"
        )
    return (each.reshape(len(weights), -1).mean(1) * weights).mean()
