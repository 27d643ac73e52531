"""Horovod's estimator for Keras models, ``KerasEstimator``, and its trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pyspark import keyword_only

from elastic.errors import Invalid
from elastic.spark import keras_training
from elastic.spark.keras_training import KerasTraining
from horovod.spark.common.estimator import HorovodEstimator, HorovodModel, save
from horovod.spark.common.params import Given, declare
from horovod.unavailable import need_keras

need_keras("horovod.spark.keras")

MORE: Given = {
    "custom_objects": ("CustomObjects", None),
    "checkpoint_callback": ("CheckpointCallback", None),
    "backend_env": ("BackendEnv", None),
}


class KerasEstimator(HorovodEstimator):
    """Estimator that trains a Keras model on the rows of a DataFrame, with ``num_proc`` elastic workers.

    Args:
        num_proc: number of workers. Default: spark.default.parallelism.
        model: built Keras model. Its inputs are the feature columns, in order.
        backend: backend that runs the training. Default: ``num_proc`` workers that continue when some of them are lost.
        store: store for the rows and checkpoints during the training.
        custom_objects: classes and functions of the model, by name.
        optimizer: optimizer. Default: that of the compiled model. The learning rate is multiplied by the number of
            workers.
        loss, loss_weights, metrics: arguments of ``model.compile``.
        sample_weight_col: column that contains the weights of the rows.
        gradient_compression: gradient compression, such as ``hvd.Compression.fp16``.
        feature_cols, label_cols: columns of numbers, vectors or arrays of a fixed length.
        label_shapes: shape of each label, with -1 for the number of rows.
        validation: fraction of the rows to use for validation, or a column that is true for these rows.
        callbacks: callbacks for ``model.fit`` on every worker.
        batch_size, val_batch_size: number of rows per worker and step. Lost workers do not change which rows belong to
            a step.
        epochs, train_steps_per_epoch, validation_steps_per_epoch: number of epochs, and of steps in each of them.
        shuffle, random_seed: whether to shuffle the rows, and the seed for their order and for Keras.
        run_id: name of the run in the store. If the run has a checkpoint, the training continues from it.
        backend_env: variables that are added to the workers' environment.

    These have no effect: ``shuffle_buffer_size`` (0 disables ``shuffle``), ``train_reader_num_workers``,
    ``val_reader_num_workers``, ``reader_pool_type``, ``inmemory_cache_all``, ``mp_start_method``, ``use_gpu``.
    ``checkpoint_callback`` and ``transformation_fn`` are rejected.
    """

    framework = "keras"

    @keyword_only
    def __init__(
        self,
        num_proc: int | None = None,
        model: Any = None,
        backend: Any = None,
        store: Any = None,
        custom_objects: Mapping[str, Any] | None = None,
        optimizer: Any = None,
        loss: Any = None,
        loss_weights: Sequence[float] | None = None,
        sample_weight_col: str | None = None,
        gradient_compression: Any = None,
        metrics: Any = None,
        feature_cols: Sequence[str] | None = None,
        label_cols: Sequence[str] | None = None,
        validation: Any = None,
        callbacks: Any = None,
        batch_size: int | None = None,
        val_batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | None = None,
        random_seed: int | None = None,
        shuffle_buffer_size: int | None = None,
        shuffle: bool = True,
        partitions_per_process: int | None = None,
        run_id: str | None = None,
        train_steps_per_epoch: int | None = None,
        validation_steps_per_epoch: int | None = None,
        transformation_fn: Any = None,
        train_reader_num_workers: int | None = None,
        val_reader_num_workers: int | None = None,
        reader_pool_type: str = "thread",
        label_shapes: Any = None,
        checkpoint_callback: Any = None,
        inmemory_cache_all: bool = False,
        backend_env: Mapping[str, str] | None = None,
        use_gpu: bool = True,
        mp_start_method: str | None = None,
    ) -> None:
        super().__init__()
        self._setDefault(custom_objects={}, checkpoint_callback=None, backend_env={})
        self.setParams(**self._input_kwargs)

    def _check_params(self) -> None:
        super()._check_params()
        import keras

        model = self.getModel()
        if not isinstance(model, keras.Model):
            raise Invalid(f"model is a {type(model).__name__}: pass a keras.Model")
        if not model.built:
            raise Invalid("the model is not built: add a keras.Input, or call the model once")
        if self.getOptimizer() is None and getattr(model, "optimizer", None) is None:
            raise Invalid("optimizer is missing: pass a Keras optimizer, or compile the model")
        if self.getLoss() is None:
            raise Invalid("loss is missing: pass a loss, or compile the model")
        if self.getCheckpointCallback() is not None:
            raise Invalid(
                "checkpoint_callback is not supported, because the model of the last epoch is kept: omit it"
            )
        for name, given, columns in (
            ("inputs", model.inputs, self.getFeatureCols()),
            ("outputs", model.outputs, self.getLabelCols()),
        ):
            if len(given) != len(columns):
                raise Invalid(
                    f"the model has {len(given)} {name} for {len(columns)} columns: pass one for each"
                )

    def _train(self, backend: Any, data: Any, metadata: Any, run_id: str) -> Any:
        import keras

        store, url = self.getStore(), self._checkpoint(run_id)
        custom = self.getCustomObjects() or {}
        if store.exists(url):
            content = store.read(url)
            if self.getVerbose():
                print(f"the training continues from the checkpoint {url}")
        else:
            model = keras_training.load(keras_training.content(self.getModel()), custom)
            given = self.getOptimizer() or self.getModel().optimizer
            optimizer = keras.optimizers.deserialize(
                keras.optimizers.serialize(keras.optimizers.get(given))
            )
            # placeholder; the workers compile the model with the actual loss
            model.compile(optimizer=optimizer, loss="mse")
            optimizer.build(model.trainable_variables)
            content = keras_training.content(model)
        training = KerasTraining(
            model=content,
            custom_objects=custom,
            train=data[0],
            validation=data[1],
            features=len(self.getFeatureCols()),
            labels=len(self.getLabelCols()),
            weighted=bool(self.getSampleWeightCol()),
            loss=self.getLoss(),
            loss_weights=self.getLossWeights(),
            metrics=self.getMetrics() or None,
            callbacks=self.getCallbacks() or [],
            compression=self.getGradientCompression(),
            processes=backend.num_processes(),
            batch_size=self.getBatchSize() or 32,
            val_batch_size=self.getValBatchSize() or self.getBatchSize() or 32,
            epochs=self.getEpochs() or 1,
            steps=self.getTrainStepsPerEpoch(),
            val_steps=self.getValidationStepsPerEpoch(),
            shuffle=bool(self.getShuffle()) and self.getShufflingBufferSize() != 0,
            seed=self.getRandomSeed(),
            input_shapes=_shapes(self.getModel()),
            label_shapes=self.getLabelShapes(),
            verbose=int(self.getVerbose() or 0),
            save=partial(save, url, store.storage_options or {}),
        )
        environ = {"KERAS_BACKEND": keras.backend.backend(), **(self.getBackendEnv() or {})}
        history = backend.run(training, env=environ)[0]
        return KerasModel(
            history=history,
            model=keras_training.load(self._taken(run_id), custom),
            feature_columns=self.getFeatureCols(),
            label_columns=self.getLabelCols(),
            custom_objects=custom,
            run_id=run_id,
            _metadata=metadata,
            _floatx=keras.config.floatx(),
        )


class KerasModel(HorovodModel):
    """Trained Keras model, which adds a column with predictions for each label to a DataFrame."""

    @keyword_only
    def __init__(
        self,
        history: Any = None,
        model: Any = None,
        feature_columns: Sequence[str] | None = None,
        label_columns: Sequence[str] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        _metadata: Any = None,
        _floatx: str | None = None,
    ) -> None:
        super().__init__()
        if label_columns:
            self.setOutputCols([f"{name}__output" for name in label_columns])
        self._setDefault(custom_objects={}, _metadata=None, _floatx=None)
        self.setParams(**self._input_kwargs)

    def _transform(self, df: Any) -> Any:
        model = self.getModel()
        content = keras_training.content(model)
        return self._predicted(
            df, partial(_predict, content, self.getCustomObjects() or {}, _shapes(model))
        )


declare(KerasEstimator, MORE)
declare(KerasModel, {"custom_objects": ("CustomObjects", None), "_floatx": ("Floatx", None)})


def _shapes(model: Any) -> list[list[int]]:
    return [
        [-1, *(-1 if each is None else int(each) for each in i.shape[1:])] for i in model.inputs
    ]


# cache of this process's model, by the identity of the serialized model
_models: dict[int, Any] = {}


def _predict(
    content: bytes, custom: Mapping[str, Any], shapes: Sequence[Sequence[int]], columns: list[Any]
) -> list[Any]:
    if id(content) not in _models:
        _models.clear()
        _models[id(content)] = keras_training.load(content, custom)
    inputs = [each.reshape(tuple(shape)) for each, shape in zip(columns, shapes, strict=True)]
    found = _models[id(content)].predict_on_batch(inputs[0] if len(inputs) == 1 else inputs)
    return [*found] if isinstance(found, list | tuple) else [found]


__all__ = ["KerasEstimator", "KerasModel"]
