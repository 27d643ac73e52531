"""Parquet data of estimators: row groups, types and shapes."""

from __future__ import annotations

import numpy as np
import pytest

from elastic.errors import Invalid
from elastic.spark import parquet
from harness.golden import raises

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def column(values, kind):
    return pa.chunked_array([pa.array(values, kind)])


@pytest.mark.parametrize(
    ("values", "kind", "shape", "dtype"),
    [
        ([1, 2, 3], pa.int32(), (3,), np.int64),
        ([1.5, 2.5], pa.float64(), (2,), np.float32),
        ([True, False], pa.bool_(), (2,), np.int64),
        ([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32()), (2, 2), np.float32),
        ([[[1], [2]], [[3], [4]], [[5], [6]]], pa.list_(pa.list_(pa.int64())), (3, 2, 1), np.int64),
    ],
)
def test_numbers_and_lists_become_arrays(values, kind, shape, dtype):
    found = parquet.as_array(column(values, kind), "x")
    assert (found.shape, found.dtype) == (shape, dtype)
    assert found.tolist() == values


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([[1.0], [2.0, 3.0]], pa.list_(pa.float32())),
        ([[1.0], [2.0, 3.0, 4.0]], pa.list_(pa.float32())),
        ([1, None], pa.int64()),
        ([[1, None]], pa.list_(pa.int64())),
        (["a"], pa.string()),
    ],
    ids=["lengths", "lengths that add up", "null", "null in a list", "text"],
)
def test_values_that_are_no_numbers_are_refused(values, kind):
    with raises(Invalid):
        parquet.as_array(column(values, kind), "x")


def written(folder, parts):
    for number, (rows, group) in enumerate(parts):
        table = pa.table({"x": [[float(each)] for each in rows], "y": list(rows)})
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=group)
    return folder.as_uri()


def test_samples_are_the_rows_of_all_row_groups(tmp_path):
    url = written(tmp_path, [(range(5), 2), (range(5, 8), 3)])
    data = parquet.found(url, {}, ["x", "y"])
    assert [length for _, _, length in data.groups] == [2, 2, 1, 3]
    assert data.rows == 8
    dataset = data.dataset()
    assert sorted(int(dataset[index][1]) for index in range(8)) == [*range(8)]
    order = dataset.epoch_order(0, 1)
    assert sorted(order.tolist()) == [*range(8)]


def test_column_that_is_missing_is_named(tmp_path):
    with raises(Invalid, str(tmp_path)):
        parquet.found(written(tmp_path, [(range(2), 2)]), {}, ["x", "z"])


def test_empty_data_are_refused(tmp_path):
    with raises(Invalid, str(tmp_path)):
        parquet.found(tmp_path.as_uri(), {}, ["x"])
