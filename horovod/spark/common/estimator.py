"""Base classes of the estimators and models of all frameworks: ``HorovodEstimator`` and ``HorovodModel``."""

from __future__ import annotations

import base64
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cloudpickle
import numpy as np
from fsspec.core import url_to_fs
from pyspark.ml import Estimator, Model
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from elastic.errors import Invalid
from elastic.spark import parquet
from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.params import EstimatorParams, ModelParams

# parameters that apply to a single run and must be set again after loading
UNSAVED = ("backend", "store")
PREDICTIONS = "__predictions"
SCALARS = ("tinyint", "smallint", "int", "bigint", "float", "double")


class HorovodEstimator(Estimator, EstimatorParams, MLWritable, MLReadable):
    """Base class of estimators. An estimator prepares the data, runs the training, and creates the model."""

    framework = ""

    def fit(self, df: Any, params: Any = None) -> Any:
        """Train on a DataFrame, and return the trained model, which is a Transformer.

        Raises:
            Invalid: (a ValueError) a parameter or a column is not supported. Raised before anything is started.
            JobFailed: the training failed.
        """
        return super().fit(df, params)

    def fit_on_parquet(self, params: Any = None) -> Any:
        """Train on the Parquet data that the store's folders already contain. Otherwise like `fit`."""
        if params:
            return self.copy(params).fit_on_parquet()
        self._check_params()
        store = self.getStore()
        validation = store.get_val_data_path() if self.getValidation() else None
        data = self._found(store.get_train_data_path(), validation)
        return self._trained(data, dict.fromkeys(data[0].columns, ""))

    def _fit(self, df: Any) -> Any:
        self._check_params()
        backend = self._backend()
        with self._prepared(df, backend.num_processes()) as (data, metadata):
            return self._trained(data, metadata, backend)

    def _trained(self, data: Any, metadata: Any, backend: Backend | None = None) -> Any:
        backend = backend or self._backend()
        run_id = self.getRunId() or f"{self.framework}_{int(time.time())}_{uuid.uuid4().hex[:6]}"
        return self._train(backend, data, metadata, run_id)

    def _train(self, backend: Backend, data: Any, metadata: Any, run_id: str) -> Any:
        raise NotImplementedError

    def _backend(self) -> Backend:
        given = self.getBackend()
        if given is not None and not isinstance(given, Backend):
            raise Invalid(f"backend is a {type(given).__name__}: pass a SparkBackend")
        return given or SparkBackend(self.getNumProc(), min_num_proc=1, verbose=self.getVerbose())

    # ---- data ------------------------------------------------------------------------------------

    def _columns(self) -> list[str]:
        weights = self.getSampleWeightCol()
        return [*self.getFeatureCols(), *self.getLabelCols(), *([weights] if weights else [])]

    def _found(self, train: str, validation: str | None) -> tuple[Any, Any]:
        options = self.getStore().storage_options or {}
        columns = self._columns()
        held_out = None if validation is None else parquet.found(validation, options, columns)
        return parquet.found(train, options, columns), held_out

    @contextlib.contextmanager
    def _prepared(self, df: Any, processes: int) -> Iterator[Any]:
        """Context manager that writes the rows to the store, and removes them after the training."""
        validation = self.getValidation()
        _need(df, [*self._columns(), *([validation] if isinstance(validation, str) else [])])
        store, token = self.getStore(), uuid.uuid4().hex[:12]
        paths = [store.get_train_data_path(token), store.get_val_data_path(token)]
        parts = self._split(df, validation)
        try:
            for part, path in zip(parts, paths, strict=False):
                selected = part.select(*[_numeric(part, name) for name in self._columns()])
                files = processes * (self.getPartitionsPerProcess() or 10)
                selected.repartition(files).write.mode("overwrite").parquet(path)
            data = self._found(paths[0], paths[1] if len(parts) > 1 else None)
            yield data, {name: _kind(df, name) for name in self._columns()}
        finally:
            for path in paths:
                if store.exists(path):
                    store.fs.rm(store.get_localized_path(path), recursive=True)

    def _split(self, df: Any, validation: Any) -> list[Any]:
        if not validation:
            return [df]
        if isinstance(validation, str):
            held_out = df[validation].cast("boolean")
            return [df.filter(~held_out), df.filter(held_out)]
        return list(df.randomSplit([1 - validation, validation], seed=self.getRandomSeed()))

    # ---- checkpoints -----------------------------------------------------------------------------

    def _checkpoint(self, run_id: str) -> str:
        """Return the URL of a run's checkpoint."""
        store = self.getStore()
        return f"{store.get_run_path(run_id)}/{store.get_checkpoint_filename()}"

    def _taken(self, run_id: str) -> bytes:
        """Load and return the checkpoint of a finished run, and remove it unless the store keeps runs."""
        store, url = self.getStore(), self._checkpoint(run_id)
        content: bytes = store.read(url)
        if not store.saving_runs():
            store.fs.rm(store.get_localized_path(store.get_run_path(run_id)), recursive=True)
        return content

    def write(self) -> MLWriter:
        return ParamsWriter(self)

    @classmethod
    def read(cls) -> MLReader:
        return ParamsReader(cls)


class HorovodModel(Model, ModelParams, MLWritable, MLReadable):
    """Base class of trained models. A model adds a column with predictions for each label to a DataFrame."""

    def transform(self, df: Any, params: Any = None) -> Any:
        """Return the DataFrame with columns of predictions added.

        The names of the columns are those of `setOutputCols`, by default LABEL__output.
        """
        return super().transform(df, params)

    def _predicted(self, df: Any, predict: Callable[[list[Any]], list[Any]]) -> Any:
        """Add the columns with predictions.

        ``predict`` is called in Spark tasks with an array of shape ``[rows, ...]`` for each feature, and returns an
        array for each label.
        """
        import pandas
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql.functions import col, pandas_udf, round

        features, outputs = self.getFeatureColumns(), self.getOutputCols()
        _need(df, features)
        inputs = [_numeric(df, name) for name in features]
        sizes = self._sizes(df.select(*inputs).limit(1).collect(), predict)

        def batches(parts: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
            for part in parts:
                # for a single column, Spark passes no tuple
                columns = part if isinstance(part, tuple) else (part,)
                given = [np.stack([np.asarray(each) for each in column]) for column in columns]
                found = [_flat(each) for each in predict(given)]
                yield pandas.Series(
                    [[row.tolist() for row in rows] for rows in zip(*found, strict=True)]
                )

        batches.__annotations__ = {
            "parts": Iterator[tuple[pandas.Series, ...]],
            "return": Iterator[pandas.Series],
        }
        udf = pandas_udf(batches, returnType="array<array<double>>")
        done = df.withColumn(PREDICTIONS, udf(*inputs))
        kinds = self._get_metadata() or {}
        for number, (name, label) in enumerate(zip(outputs, self.getLabelColumns(), strict=True)):
            found, kind = col(PREDICTIONS)[number], kinds.get(label, "")
            if sizes[number] == 1 and kind in SCALARS:
                found = found[0] if kind in ("float", "double") else round(found[0])
                done = done.withColumn(name, found.cast(kind))
            else:
                done = done.withColumn(name, array_to_vector(found))
        return done.drop(PREDICTIONS)

    def _sizes(self, rows: list[Any], predict: Callable[[list[Any]], list[Any]]) -> list[int]:
        """Return the number of values that the model predicts for each label.

        The numbers are determined by a prediction for the first row.
        """
        if not rows:
            return [0] * len(self.getOutputCols())
        found = predict([np.asarray([value]) for value in rows[0]])
        if len(found) != len(self.getOutputCols()):
            raise Invalid(
                f"the model has {len(found)} outputs, but there are {len(self.getOutputCols())} label columns: pass"
                " one label column for each output"
            )
        return [_flat(each).shape[1] for each in found]

    def write(self) -> MLWriter:
        return ParamsWriter(self)

    @classmethod
    def read(cls) -> MLReader:
        return ParamsReader(cls)


class ParamsWriter(MLWriter):
    """Writer of an estimator or a model, which saves its pickled parameters in the format of pyspark.ml."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        values = {
            param.name: base64.b64encode(cloudpickle.dumps(value)).decode()
            for param, value in self.instance._paramMap.items()
            if param.name not in UNSAVED
        }
        DefaultParamsWriter.saveMetadata(self.instance, path, self.sc, paramMap=values)


class ParamsReader(MLReader):
    """Loader of the files that `ParamsWriter` has saved. The files are unpickled, so load only trusted files."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        values = metadata["paramMap"].items()
        instance.setParams(
            **{name: cloudpickle.loads(base64.b64decode(text)) for name, text in values}
        )
        return instance


def save(url: str, options: dict[str, Any], content: bytes) -> None:
    """Write a checkpoint.

    If the filesystem can rename files, readers see the previous checkpoint until the new one is complete.
    """
    fs, path = url_to_fs(url, **options)
    fs.makedirs(fs._parent(path), exist_ok=True)
    with fs.open(f"{path}.new", "wb") as file:
        file.write(content)
    fs.mv(f"{path}.new", path)


def _need(df: Any, columns: Iterable[str]) -> None:
    missing = {*columns} - {*df.columns}
    if missing:
        raise Invalid(
            f"the DataFrame has no column {', '.join(sorted(missing))}: pass some of its columns"
            f" {', '.join(df.columns)}"
        )


def _kind(df: Any, name: str) -> str:
    """Return the type of a column, as Spark writes it in schemas, for example ``array<float>``."""
    return str(df.schema[name].dataType.simpleString())


def _numeric(df: Any, name: str) -> Any:
    """Return a column expression that contains numbers or lists of numbers.

    Raises:
        Invalid: the column has another type.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql.functions import col

    kind, column = _kind(df, name), col(name)
    if kind == "vector":
        return vector_to_array(column, "float32").alias(name)
    if kind == "boolean":
        return column.cast("int").alias(name)
    if kind.startswith("decimal"):
        return column.cast("double").alias(name)
    if kind in SCALARS or kind.startswith("array<"):
        return column
    raise Invalid(f"column {name} has type {kind}: convert it to numbers, a vector or an array")


def _flat(values: Any) -> Any:
    """Reshape an array to ``[rows, values]``."""
    return np.asarray(values, dtype=np.float64).reshape(len(values), -1)
