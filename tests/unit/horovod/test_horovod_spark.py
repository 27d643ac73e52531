"""Stores and parameters of Horovod's estimators, without a SparkContext."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

import elastic.spark
from elastic.errors import Invalid
from harness.golden import raises

pytest.importorskip("pyspark")

import horovod.spark
from horovod.spark.common import params
from horovod.spark.common.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store
from horovod.spark.task import get_available_devices


def test_store_keeps_data_and_runs_below_its_folder_and_reads_checkpoints(tmp_path):
    store = Store.create(str(tmp_path))
    assert type(store) is FilesystemStore
    assert store.get_train_data_path() == f"{tmp_path.as_uri()}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{tmp_path.as_uri()}/intermediate_val_data.3"
    assert store.get_checkpoint_path("r") == f"{tmp_path.as_uri()}/runs/r"
    assert store.get_logs_path("r") == f"{tmp_path.as_uri()}/runs/r/logs"
    store.fs.makedirs(store.get_localized_path(store.get_run_path("r")))
    store.write_text(f"{store.get_run_path('r')}/a.ckpt", "text")
    assert store.read(f"{store.get_run_path('r')}/a.ckpt") == b"text"
    assert store.get_checkpoints("r") == [str(tmp_path / "runs" / "r" / "a.ckpt")]
    assert not store.is_parquet_dataset(store.get_train_data_path())


def test_store_has_given_folders_and_may_keep_no_runs(tmp_path):
    store = LocalStore(
        str(tmp_path), train_path="/t", save_runs=False, checkpoint_filename="model.pt"
    )
    assert store.get_train_data_path() == "file:///t"
    assert store.get_checkpoint_path("r") is None
    assert store.get_checkpoint_filename() == "model.pt"


def test_store_at_a_url_has_its_paths():
    store = Store.create("memory://bucket/work")
    assert store.get_runs_path() == "memory://bucket/work/runs"
    assert not store.exists(store.get_runs_path())


def test_store_class_is_selected_by_the_prefix_of_the_path():
    assert HDFSStore.matches("hdfs://name/x")
    assert DBFSLocalStore.matches_dbfs("dbfs:/x")
    assert DBFSLocalStore.normalize_path("file:///dbfs/x") == "/dbfs/x"
    assert not DBFSLocalStore.matches_dbfs("dbfs://x")


@pytest.mark.parametrize("run", [horovod.spark.run, horovod.spark.run_elastic])
@pytest.mark.parametrize("given", ["loud", [2], 1.5])
def test_verbosity_that_is_no_whole_number_is_refused(run, given, monkeypatch):
    monkeypatch.setattr(elastic.spark, "active_context", lambda: Mock(defaultParallelism=2))
    with raises(Invalid):
        run(print, verbose=given)


@pytest.mark.parametrize("given", [None, 0.2, 0, "held_out"])
def test_validation_is_a_share_or_a_column(given):
    params.check_validation(given)


@pytest.mark.parametrize("given", [1.0, -0.1, True, "", [0.1]])
def test_invalid_validation_is_refused(given):
    with raises(Invalid):
        params.check_validation(given)


@pytest.mark.parametrize(
    ("seen", "rank", "slots", "devices"),
    [
        ("", "0", "1", []),
        ("3", "0", "1", ["0"]),
        ("0,1", "1", "2", ["1"]),
        ("4,5,6,7", "1", "2", ["2", "3"]),
    ],
)
def test_gpus_of_a_worker_are_numbered_within_its_host(monkeypatch, seen, rank, slots, devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", rank)
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", slots)
    assert get_available_devices() == devices
