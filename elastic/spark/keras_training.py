"""Elastic training of a Keras model on Parquet data, in the workers that an estimator starts.

A step consumes the same rows in a world of any size: ``batch_size`` rows for each process that was requested. The state
contains the position: the epoch, and the number of batches consumed in the epoch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastic.data.sample_partition import SamplePartition
from elastic.spark.parquet import ParquetData


@dataclass(frozen=True, kw_only=True)
class KerasTraining:
    """Training function for every worker, which returns the training history. Rank 0 saves the model.

    Args:
        model: content of a ``.keras`` file, including the optimizer.
        features, labels: numbers of input columns and of label columns. An additional column contains sample weights.
        input_shapes: shapes of the model's inputs, with -1 for the batch dimension.
        save: function that rank 0 calls after each epoch with the content of a ``.keras`` file.
    """

    model: bytes
    custom_objects: Mapping[str, Any]
    train: ParquetData
    validation: ParquetData | None
    features: int
    labels: int
    weighted: bool
    loss: Any
    loss_weights: Sequence[float] | None
    metrics: Any
    callbacks: Sequence[Any]
    compression: Any
    processes: int
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None
    val_steps: int | None
    shuffle: bool
    seed: int | None
    input_shapes: Sequence[Sequence[int]]
    label_shapes: Sequence[Sequence[int]] | None
    verbose: int
    save: Callable[[bytes], None]

    def __call__(self) -> dict[str, list[float]]:
        import keras

        import horovod.keras as hvd

        hvd.init()
        if self.seed is not None:
            keras.utils.set_random_seed(self.seed)
        model = load(self.model, self.custom_objects)
        optimizer = model.optimizer
        optimizer.learning_rate = float(optimizer.learning_rate) * self.processes
        given = {} if self.compression is None else {"compression": self.compression}
        model.compile(
            optimizer=hvd.DistributedOptimizer(optimizer, **given),
            loss=self.loss,
            loss_weights=self.loss_weights,
            metrics=self.metrics,
        )
        state = hvd.elastic.KerasState(model, batch=0, epoch=0, history={})
        return self._trained(model, state, keras, hvd)

    def _trained(self, model: Any, state: Any, keras: Any, hvd: Any) -> dict[str, list[float]]:
        job = self

        class Keep(keras.callbacks.Callback):  # type: ignore[misc]
            """Keras callback that saves the history in the state, and the model in the estimator's store."""

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                found = {name: float(value) for name, value in (logs or {}).items()}
                state.history = {
                    name: [*state.history.get(name, []), value] for name, value in found.items()
                }
                if hvd.rank() == 0:
                    job.save(job.content(model))

        def train(state: Any) -> dict[str, list[float]]:
            if state.epoch < job.epochs:
                world = (hvd.rank(), hvd.size())
                held_out = None
                if job.validation is not None:
                    held_out = job._batches(
                        keras, job.validation, world, job.val_batch_size, job.val_steps
                    )
                model.fit(
                    job._batches(keras, job.train, world, job.batch_size, job.steps, state),
                    epochs=job.epochs - state.epoch,
                    validation_data=held_out,
                    shuffle=False,
                    verbose=2
                    if job.verbose and hvd.rank() == 0
                    else 0,  # print one line of progress per epoch
                    callbacks=[
                        *job.callbacks,
                        hvd.callbacks.MetricAverageCallback(),
                        hvd.elastic.UpdateBatchStateCallback(state),
                        hvd.elastic.UpdateEpochStateCallback(state),
                        Keep(),
                        hvd.elastic.CommitStateCallback(state),
                    ],
                )
            return dict(state.history)

        history: dict[str, list[float]] = hvd.elastic.run(train)(state)
        return history

    def content(self, model: Any) -> bytes:
        """Return the model as the content of a ``.keras`` file, with the learning rate for one process."""
        optimizer = model.optimizer
        scaled = float(optimizer.learning_rate)
        optimizer.learning_rate = scaled / self.processes
        try:
            return content(model)
        finally:
            optimizer.learning_rate = scaled

    def _batches(
        self,
        keras: Any,
        data: ParquetData,
        world: tuple[int, int],
        batch_size: int,
        steps: int | None,
        state: Any = None,
    ) -> Any:
        """Yield this rank's part of each batch.

        With a state, begin at the state's position, with the sample order of its epoch.
        """
        job, dataset = self, data.dataset()
        rank, size = world
        dealing = SamplePartition(size, batch_size * self.processes)
        all_steps = [*dealing.rest(0, len(dataset))][:steps]

        class Batches(keras.utils.PyDataset):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.on_epoch_begin()

            def on_epoch_begin(self) -> None:
                self.first = 0 if state is None else state.batch
                self.order = np.arange(len(dataset))
                if state is not None and job.shuffle:
                    self.order = dataset.epoch_order(job.seed or 0, state.epoch)

            def __len__(self) -> int:
                return len(all_steps)

            def __getitem__(self, index: int) -> Any:
                step = all_steps[(self.first + index) % len(all_steps)]
                mine = dealing.part(step, rank)
                rows = [dataset[int(self.order[at])] for at in (mine or step[:1])]
                # This rank has no rows in the batch, so give its placeholder the weight 0.
                weights = None if mine else np.zeros(1, np.float32)
                return job._arranged([np.stack(each) for each in zip(*rows, strict=True)], weights)

        return Batches()

    def _arranged(self, columns: list[Any], weights: Any) -> Any:
        """Return inputs and labels, and sample weights if there are any."""
        inputs = [
            column.reshape(tuple(shape)).astype(np.float32)
            for column, shape in zip(columns, self.input_shapes, strict=False)
        ]
        labels = columns[self.features : self.features + self.labels]
        if self.label_shapes is not None:
            labels = [
                each.reshape(tuple(shape))
                for each, shape in zip(labels, self.label_shapes, strict=True)
            ]
        if self.weighted:
            weights = columns[-1].astype(np.float32) * (1 if weights is None else weights)
        one_input = inputs[0] if len(inputs) == 1 else tuple(inputs)
        one_label = labels[0] if len(labels) == 1 else tuple(labels)
        return (one_input, one_label) if weights is None else (one_input, one_label, weights)


def content(model: Any) -> bytes:
    """Return a Keras model as the content of a ``.keras`` file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        return path.read_bytes()


def load(given: bytes, custom_objects: Mapping[str, Any]) -> Any:
    """Load the Keras model that `content` has returned."""
    import keras

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        path.write_bytes(given)
        return keras.models.load_model(path, custom_objects=dict(custom_objects))
