"""Horovod's estimator for torch models, ``TorchEstimator``, and its trained model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from pyspark import keyword_only

from elastic.errors import Invalid
from elastic.spark.torch_training import TorchTraining
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel, save
from horovod.spark.common.params import Given, declare

MORE: Given = {
    "input_shapes": ("InputShapes", None),
    "loss_constructors": ("LossConstructors", None),
    "train_minibatch_fn": ("TrainMinibatchFn", None),
}


class TorchEstimator(HorovodEstimator):
    """Estimator that trains a torch model on the rows of a DataFrame, with ``num_proc`` elastic workers.

    Args:
        num_proc: number of workers. Default: spark.default.parallelism.
        model: torch module. Its ``forward`` takes the feature columns, in order.
        backend: backend that runs the training. Default: ``num_proc`` workers that continue when some of them are lost.
        store: store for the rows and checkpoints during the training.
        optimizer: optimizer for the model's parameters. The learning rate is multiplied by the number of workers.
        loss: function or module, or a list with one for each label.
        loss_constructors: functions that return the losses. They take ``model`` and ``optimizer`` as keyword arguments.
        metrics: functions of the output and the label, or lists with one function for each label.
        loss_weights: weights of the losses. Default: equal weights with the sum 1.
        sample_weight_col: column that contains the weights of the rows. Requires a loss with ``reduction="none"``.
        gradient_compression: gradient compression, such as ``hvd.Compression.fp16``.
        feature_cols, label_cols: columns of numbers, vectors or arrays of a fixed length.
        input_shapes, label_shapes: shape of each column, with -1 for the number of rows.
        validation: fraction of the rows to use for validation, or a column that is true for these rows.
        batch_size, val_batch_size: number of rows per worker and step. Lost workers do not change which rows belong to
            a step.
        epochs, train_steps_per_epoch, validation_steps_per_epoch: number of epochs, and of steps in each of them.
        shuffle, random_seed: whether to shuffle the rows, and the seed for their order and for torch.
        run_id: name of the run in the store. If the run has a checkpoint, the training continues from it.
        train_minibatch_fn: function that replaces the default training step; see Horovod.
        use_gpu: whether to train on the GPUs that Spark has assigned.

    These parameters have no effect, because rows are read by row groups: ``shuffle_buffer_size`` (0 disables
    ``shuffle``), ``train_reader_num_workers``, ``val_reader_num_workers``, ``reader_pool_type``,
    ``inmemory_cache_all``, ``mp_start_method``. ``callbacks`` and ``transformation_fn`` are rejected.
    """

    framework = "pytorch"

    @keyword_only
    def __init__(
        self,
        num_proc: int | None = None,
        model: torch.nn.Module | None = None,
        backend: Any = None,
        store: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Any = None,
        loss_constructors: Any = None,
        metrics: Any = None,
        loss_weights: Sequence[float] | None = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        feature_cols: Sequence[str] | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        validation: Any = None,
        label_cols: Sequence[str] | None = None,
        callbacks: Any = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int = 1,
        random_seed: int | None = None,
        shuffle_buffer_size: int | None = None,
        shuffle: bool = True,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_minibatch_fn: Any = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Any = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str = "thread",
        label_shapes: Any = None,
        inmemory_cache_all: bool = False,
        use_gpu: bool = True,
        mp_start_method: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(**dict.fromkeys(MORE))
        self.setParams(**self._input_kwargs)

    def _check_params(self) -> None:
        super()._check_params()
        model, optimizer = self.getModel(), self.getOptimizer()
        if not isinstance(model, torch.nn.Module):
            raise Invalid(f"model is a {type(model).__name__}: pass a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Invalid(
                f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer"
            )
        own = {id(parameter) for parameter in model.parameters()}
        if any(id(each) not in own for group in optimizer.param_groups for each in group["params"]):
            raise Invalid(
                "the optimizer has parameters that are not the model's: create it from model.parameters()"
            )
        if bool(self.getLoss()) == bool(self.getLossConstructors()):
            raise Invalid(
                "loss and loss_constructors are both set, or both missing: pass exactly one of them"
            )
        if self.getCallbacks():
            raise Invalid(
                "callbacks are not supported by TorchEstimator: omit them, and use train_minibatch_fn"
            )
        self._shared()  # called to check the numbers of losses and metrics

    def _shared(self) -> dict[str, Any]:
        """Return those arguments of the training that depend on the number of labels.

        Raises:
            Invalid: the length of a list is not the number of labels.
        """
        labels = len(self.getLabelCols())
        given: dict[str, list[Any]] = {
            "losses": _listed(self.getLoss()),
            "constructors": _listed(self.getLossConstructors()),
            "loss_weights": self.getLossWeights() or [1 / labels] * labels,
        }
        for name, values in given.items():
            if values and len(values) != labels:
                raise Invalid(
                    f"{len(values)} {name} are given for {labels} labels: pass one for each"
                )
        groups = [
            each if isinstance(each, list | tuple) else [each] * labels
            for each in self.getMetrics() or ()
        ]
        if any(len(group) != labels for group in groups):
            raise Invalid(
                f"metrics contains a list whose length is not {labels}: pass one function for each label"
            )
        for name, shapes, columns in (
            ("input_shapes", self.getInputShapes(), self.getFeatureCols()),
            ("label_shapes", self.getLabelShapes(), self.getLabelCols()),
        ):
            if shapes is not None and len(shapes) != len(columns):
                raise Invalid(
                    f"{name} has {len(shapes)} shapes for {len(columns)} columns: pass one for each"
                )
        return {**given, "metrics": groups}

    def _train(self, backend: Any, data: Any, metadata: Any, run_id: str) -> Any:
        model, optimizer = copy.deepcopy((self.getModel(), self.getOptimizer()))
        url, store = self._checkpoint(run_id), self.getStore()
        if store.exists(url):
            _load(store.read(url), model, optimizer)
            if self.getVerbose():
                print(f"the training continues from the checkpoint {url}")
        training = TorchTraining(
            model=model,
            optimizer=optimizer,
            train=data[0],
            validation=data[1],
            features=len(self.getFeatureCols()),
            labels=len(self.getLabelCols()),
            weighted=bool(self.getSampleWeightCol()),
            input_shapes=self.getInputShapes(),
            label_shapes=self.getLabelShapes(),
            minibatch=self.getTrainMinibatchFn(),
            compression=self.getGradientCompression(),
            processes=backend.num_processes(),
            batch_size=self.getBatchSize() or 32,
            val_batch_size=self.getValBatchSize() or self.getBatchSize() or 32,
            epochs=self.getEpochs() or 1,
            steps=self.getTrainStepsPerEpoch(),
            val_steps=self.getValidationStepsPerEpoch(),
            shuffle=bool(self.getShuffle()) and self.getShufflingBufferSize() != 0,
            seed=self.getRandomSeed(),
            use_gpu=bool(self.getUseGpu()),
            verbose=int(self.getVerbose() or 0),
            save=partial(save, url, store.storage_options or {}),
            **self._shared(),
        )
        history = backend.run(training)[0]
        _load(self._taken(run_id), model, optimizer)
        model.eval()
        return TorchModel(
            history=history,
            model=model,
            optimizer=optimizer,
            feature_columns=self.getFeatureCols(),
            input_shapes=self.getInputShapes(),
            label_columns=self.getLabelCols(),
            run_id=run_id,
            _metadata=metadata,
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
        )


class TorchModel(HorovodModel):
    """Trained torch model, which adds a column with predictions for each label to a DataFrame."""

    @keyword_only
    def __init__(
        self,
        history: Any = None,
        model: torch.nn.Module | None = None,
        feature_columns: Sequence[str] | None = None,
        input_shapes: Any = None,
        label_columns: Sequence[str] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        run_id: str | None = None,
        _metadata: Any = None,
        loss: Any = None,
        loss_constructors: Any = None,
    ) -> None:
        super().__init__()
        if label_columns:
            self.setOutputCols([f"{name}__output" for name in label_columns])
        self._setDefault(
            optimizer=None, loss=None, loss_constructors=None, input_shapes=None, _metadata=None
        )
        self.setParams(**self._input_kwargs)

    def _transform(self, df: Any) -> Any:
        return self._predicted(df, partial(_predict, self.getModel(), self.getInputShapes()))


declare(TorchEstimator, MORE)
declare(
    TorchModel,
    {
        "optimizer": ("Optimizer", None),
        "input_shapes": ("InputShapes", None),
        "loss": ("Loss", None),
        "loss_constructors": ("LossConstructors", None),
    },
)


def _listed(given: Any) -> list[Callable[..., Any]]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _load(content: bytes, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])


def _predict(model: torch.nn.Module, shapes: Any, columns: list[Any]) -> list[Any]:
    inputs = []
    for number, column in enumerate(columns):
        given = torch.as_tensor(column, dtype=torch.float32, device="cpu")
        if shapes is not None:
            given = given.reshape(tuple(shapes[number]))
        inputs.append(given.unsqueeze(1) if given.dim() == 1 else given)
    model.eval()
    with torch.no_grad():
        outputs = model(*inputs)
    return [each.numpy() for each in (outputs if isinstance(outputs, tuple | list) else [outputs])]


__all__ = ["TorchEstimator", "TorchModel"]
