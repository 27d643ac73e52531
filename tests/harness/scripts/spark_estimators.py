"""Estimators of `horovod.spark` on scikit-learn's digits: ``spark_estimators.py MASTER torch|keras PROCESSES FOLDER``.

Prints the accuracy on rows that were not trained on, and the history.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from horovod.spark.common.store import Store

EPOCHS = 12
COMMON: dict[str, Any] = {"feature_cols": ["pixels"], "label_cols": ["digit"], "batch_size": 16}
COMMON |= {"epochs": EPOCHS, "validation": 0.1, "random_seed": 1, "verbose": 1}
COMMON |= {"partitions_per_process": 2}


def with_torch(**given: Any) -> Any:
    import torch

    from horovod.spark.torch import TorchEstimator

    def right(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == label).float().mean()

    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)]
    model = torch.nn.Sequential(*layers)
    return TorchEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=torch.nn.functional.cross_entropy,
        metrics=[right],
        **given,
    )


def with_keras(**given: Any) -> Any:
    import keras

    from horovod.spark.keras import KerasEstimator

    layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu")]
    return KerasEstimator(
        model=keras.Sequential([*layers, keras.layers.Dense(10)]),
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **given,
    )


if __name__ == "__main__":
    master, framework, processes, folder = sys.argv[1:]
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.log.level", "ERROR").getOrCreate()
    images, labels = load_digits(return_X_y=True)
    rows = [
        (Vectors.dense((image / 16).tolist()), int(label), number)
        for number, (image, label) in enumerate(zip(images, labels, strict=True))
    ]
    digits = spark.createDataFrame(rows, ["pixels", "digit", "number"])
    given = {**COMMON, "num_proc": int(processes), "store": Store.create(folder)}
    estimator = (with_torch if framework == "torch" else with_keras)(**given)
    print("fitting", flush=True)
    model = estimator.fit(digits.filter("number % 5 > 0"))
    model.write().overwrite().save(f"{folder}/saved")
    found = type(model).load(f"{folder}/saved").transform(digits.filter("number % 5 = 0"))
    predicted = found.select("digit", "digit__output").collect()
    right = [int(np.argmax(row.digit__output.toArray())) == row.digit for row in predicted]
    print("accuracy", sum(right) / len(right))
    print("history", json.dumps(model.getHistory()))
    spark.stop()
