"""Parameters of estimators and their models. They follow pyspark.ml and have Horovod's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark import keyword_only
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasOutputCols

from elastic.errors import Invalid

_bool, _int, _text = TypeConverters.toBoolean, TypeConverters.toInt, TypeConverters.toString
_texts, _floats = TypeConverters.toListString, TypeConverters.toListFloat
# for each parameter, the suffix of its accessors' names and its type converter
Given = Mapping[str, tuple[str, Any]]

OF_ESTIMATORS: Given = {
    "num_proc": ("NumProc", None),
    "model": ("Model", None),
    "backend": ("Backend", None),
    "store": ("Store", None),
    "optimizer": ("Optimizer", None),
    "loss": ("Loss", None),
    "loss_weights": ("LossWeights", _floats),
    "sample_weight_col": ("SampleWeightCol", _text),
    "metrics": ("Metrics", None),
    "feature_cols": ("FeatureCols", _texts),
    "label_cols": ("LabelCols", _texts),
    "validation": ("Validation", None),
    "gradient_compression": ("GradientCompression", None),
    "compress_sparse_cols": ("CompressSparseCols", _bool),
    "batch_size": ("BatchSize", _int),
    "val_batch_size": ("ValBatchSize", _int),
    "epochs": ("Epochs", _int),
    "verbose": ("Verbose", _int),
    "callbacks": ("Callbacks", None),
    "random_seed": ("RandomSeed", _int),
    "shuffle_buffer_size": ("ShufflingBufferSize", _int),
    "shuffle": ("Shuffle", _bool),
    "partitions_per_process": ("PartitionsPerProcess", _int),
    "run_id": ("RunId", _text),
    "train_steps_per_epoch": ("TrainStepsPerEpoch", _int),
    "validation_steps_per_epoch": ("ValidationStepsPerEpoch", _int),
    "transformation_fn": ("TransformationFn", None),
    "transformation_edit_fields": ("TransformationEditFields", None),
    "transformation_removed_fields": ("TransformationRemovedFields", None),
    "train_reader_num_workers": ("TrainReaderNumWorker", None),
    "val_reader_num_workers": ("ValReaderNumWorker", None),
    "reader_pool_type": ("ReaderPoolType", None),
    "label_shapes": ("LabelShapes", None),
    "inmemory_cache_all": ("InMemoryCacheAll", _bool),
    "use_gpu": ("UseGpu", _bool),
    "mp_start_method": ("MpStartMethod", None),
}
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(OF_ESTIMATORS),
    "metrics": [],
    "compress_sparse_cols": False,
    "batch_size": 32,
    "epochs": 1,
    "verbose": 1,
    "callbacks": [],
    "shuffle": True,
    "partitions_per_process": 10,
    "train_reader_num_workers": 2,
    "val_reader_num_workers": 2,
    "reader_pool_type": "thread",
    "inmemory_cache_all": False,
    "use_gpu": True,
}
OF_MODELS: Given = {
    "history": ("History", None),
    "model": ("Model", None),
    "feature_columns": ("FeatureColumns", None),
    "label_columns": ("LabelColumns", None),
    "run_id": ("RunId", _text),
    "_metadata": ("Metadata", None),
}
# Parameters that are not supported, and their alternatives.
REFUSED = {
    "transformation_fn": "transform the DataFrame with Spark before fit()",
    "transformation_edit_fields": "transform the DataFrame with Spark before fit()",
    "transformation_removed_fields": "drop the columns before fit()",
}
LEAST = {
    "batch_size": 1,
    "val_batch_size": 1,
    "epochs": 1,
    "train_steps_per_epoch": 1,
    "validation_steps_per_epoch": 1,
    "partitions_per_process": 1,
}


def declare(cls: type, given: Given) -> None:
    """Add parameters to a class, with ``setName`` and ``getName`` for each."""

    def add(name: str, title: str) -> None:
        def put(self: Any, value: Any) -> Any:
            return self._set(**{name: value})

        def get(self: Any) -> Any:
            return self.getOrDefault(getattr(self, name))

        for accessor, verb in ((put, "set"), (get, "get")):
            accessor.__name__ = f"{verb}{title}"
            if not hasattr(cls, accessor.__name__):
                setattr(cls, accessor.__name__, accessor)

    for name, (title, converter) in given.items():
        setattr(
            cls, name, Param(Params._dummy(), name, name.strip("_").replace("_", " "), converter)
        )
        add(name, title)


class EstimatorParams(Params):
    """Parameters of all estimators. None stands for the default value."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**DEFAULTS)

    @keyword_only
    def setParams(self, **kwargs: Any) -> Any:
        """Set several parameters."""
        return self._set(**kwargs)

    def _check_params(self) -> None:
        """Raise Invalid for the first invalid parameter. Called before anything is written or started."""
        value = {name: self.getOrDefault(getattr(self, name)) for name in OF_ESTIMATORS}
        for name, instead in REFUSED.items():
            if value[name]:
                raise Invalid(f"{name} is not supported: {instead}")
        for name in ("model", "store", "feature_cols", "label_cols"):
            if not value[name]:
                raise Invalid(f"{name} is missing: pass it to the estimator")
        for name, least in LEAST.items():
            if value[name] is not None and value[name] < least:
                raise Invalid(f"{name} is {value[name]}: pass {least} or more")
        if value["backend"] is not None and value["num_proc"] is not None:
            raise Invalid("backend and num_proc are both set: pass num_proc only to the backend")
        check_validation(value["validation"])


declare(EstimatorParams, OF_ESTIMATORS)


class ModelParams(HasOutputCols):
    """Parameters of all models."""

    @keyword_only
    def setParams(self, **kwargs: Any) -> Any:
        """Set several parameters."""
        return self._set(**kwargs)

    def setOutputCols(self, value: list[str]) -> Any:
        """Set the names of the columns with predictions."""
        return self._set(outputCols=value)

    def _get_metadata(self) -> Any:
        return self.getOrDefault(self._metadata)


declare(ModelParams, OF_MODELS)
ModelParams.setLabelColoumns = ModelParams.setLabelColumns  # alias with Horovod's spelling


def check_validation(given: Any) -> None:
    """Raise Invalid unless the value is None, a fraction of the rows (0 <= fraction < 1) or the name of a column."""
    if given is None or (isinstance(given, str) and given):
        return
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given < 1:
        raise Invalid(f"validation is {given!r}: pass a share of 0 to 1, or the name of a column")


__all__ = ["EstimatorParams", "ModelParams"]
