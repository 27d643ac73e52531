"""Training of an estimator's torch model in one process: history, order, weights of rows, checkpoints."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import elastic
from elastic.errors import Invalid
from elastic.spark import parquet
from elastic.spark.torch_training import TorchTraining
from harness.golden import raises

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def no_world():
    yield
    elastic.shutdown()


@pytest.fixture
def data(tmp_path):
    """Twenty rows of y = 2 x, in row groups of six."""
    xs = [each / 10 for each in range(20)]
    table = pa.table({"x": xs, "y": [2 * x for x in xs], "w": [1.0] * 10 + [0.0] * 10})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=6)

    def found(*columns: str) -> parquet.ParquetData:
        return parquet.found(tmp_path.as_uri(), {}, columns)

    return found


def training(data: Any, saved: list[bytes], **settings: Any) -> TorchTraining:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    usual: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "train": data("x", "y"),
        "validation": None,
        "features": 1,
        "labels": 1,
        "weighted": False,
        "losses": [torch.nn.functional.mse_loss],
        "constructors": [],
        "loss_weights": [1.0],
        "metrics": [],
        "input_shapes": None,
        "label_shapes": None,
        "minibatch": None,
        "compression": None,
        "processes": 1,
        "batch_size": 8,
        "val_batch_size": 8,
        "epochs": 3,
        "steps": None,
        "val_steps": None,
        "shuffle": True,
        "seed": 3,
        "use_gpu": False,
        "verbose": 0,
        "save": saved.append,
    }
    return TorchTraining(**usual | settings)


def test_loss_falls_and_each_epoch_has_a_checkpoint(data):
    saved: list[bytes] = []
    history = training(data, saved, epochs=20, validation=data("x", "y"))()
    losses = [entry["train"]["loss"] for entry in history]
    assert [entry["epoch"] for entry in history] == [*range(20)]
    assert losses[-1] < losses[0] / 10
    assert history[-1]["validation"]["loss"] < 0.1
    assert len(saved) == 20


def test_learning_rate_is_scaled_in_the_training_and_not_in_the_checkpoint(data):
    saved: list[bytes] = []
    job = training(data, saved, processes=2, epochs=1)
    job()
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    content = torch.load(io.BytesIO(saved[0]), weights_only=True)
    assert content["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.05)


def test_mean_of_a_metric_counts_each_row_once(data):
    def mean(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return label.mean()

    history = training(data, [], metrics=[[mean]], epochs=2)()
    for entry in history:
        assert entry["train"]["all_metrics"] == [[pytest.approx(1.9)]]


def test_steps_of_an_epoch_may_be_limited(data):
    def count(output: torch.Tensor, label: torch.Tensor) -> float:
        counted.append(len(label))
        return 0.0

    counted: list[int] = []
    training(data, [], metrics=[[count]], steps=2, epochs=2)()
    assert counted == [8, 8] * 2


def test_rows_of_weight_zero_are_ignored(data):
    saved: list[bytes] = []
    job = training(
        data,
        saved,
        train=data("x", "y", "w"),
        weighted=True,
        shuffle=False,
        epochs=1,
        batch_size=20,
    )
    history = job()
    xs = torch.arange(10).reshape(-1, 1) / 10
    torch.manual_seed(0)
    first = torch.nn.Linear(1, 1)
    expected = float(((first(xs) - 2 * xs).detach() ** 2).sum() / 20)
    assert history[0]["train"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_loss_without_reduction_cannot_be_weighted(data):
    job = training(
        data, [], train=data("x", "y", "w"), weighted=True, losses=[lambda a, b: (a - b).sum()]
    )
    with raises(Invalid):
        job()


def test_custom_step_gets_horovods_arguments(data):
    def step(model, optimizer, transform, loss_fn, inputs, labels, weights):
        optimizer.zero_grad()
        outputs, labels = transform(model(*inputs), labels)
        loss = loss_fn(outputs, labels, weights)
        loss.backward()
        optimizer.step()
        return outputs, loss

    own = training(data, [], minibatch=step)()
    elastic.shutdown()
    assert own == training(data, [])()
