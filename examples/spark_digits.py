"""Train on a DataFrame of Spark with Horovod's estimator, on handwritten digits.

    python examples/spark_digits.py                                   # two slots of this machine
    python examples/spark_digits.py --master 'local-cluster[3,1,1024]' --workers 3

The data are scikit-learn's 1,797 images of 8 x 8. If an executor is killed during the training, the others continue.
The script prints the accuracy on images that were not trained on, and exits with 1 if it is below --target.
"""

from __future__ import annotations

import argparse
import sys
import tempfile

import torch
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--master", default="local[2]", help="of Spark")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--target", type=float, default=0.9, help="accuracy to reach")


def right(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == label).float().mean()


def main() -> int:
    args = parser.parse_args()
    spark = SparkSession.builder.master(args.master).getOrCreate()
    images, labels = load_digits(return_X_y=True)
    rows = [
        (Vectors.dense(image / 16), int(label)) for image, label in zip(images, labels, strict=True)
    ]
    train, test = spark.createDataFrame(rows, ["pixels", "digit"]).randomSplit([0.8, 0.2], seed=1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    with tempfile.TemporaryDirectory() as folder:
        estimator = TorchEstimator(
            num_proc=args.workers,
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
            loss=torch.nn.functional.cross_entropy,
            metrics=[right],
            feature_cols=["pixels"],
            label_cols=["digit"],
            epochs=args.epochs,
            store=Store.create(folder),
        )
        found = estimator.fit(train).transform(test).select("digit", "digit__output").collect()
    correct = sum(int(row.digit__output.toArray().argmax()) == row.digit for row in found)
    accuracy = correct / len(found)
    print(f"accuracy {accuracy:.3f} on {len(found)} images")
    spark.stop()
    return int(accuracy < args.target)


if __name__ == "__main__":
    sys.exit(main())
