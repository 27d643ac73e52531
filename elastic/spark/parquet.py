"""Reader of an estimator's Parquet data in the workers, one row group at a time.

This module imports pyarrow at first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fsspec.core import url_to_fs

from elastic.data.sharded_files import ShardedFiles
from elastic.errors import Invalid


@dataclass(frozen=True)
class ParquetData:
    """Parquet dataset. For each row group, ``groups`` contains the file, the index in the file, and the number of rows.

    Only the columns in ``columns`` are read. A sample is a tuple with an array or scalar for each column, in this
    order.
    """

    url: str
    options: Mapping[str, Any]
    columns: Sequence[str]
    groups: Sequence[tuple[str, int, int]]

    @property
    def rows(self) -> int:
        return sum(length for _, _, length in self.groups)

    def dataset(self) -> ShardedFiles:
        """Return the data as a dataset for `elastic.data.DataLoader`."""
        return ShardedFiles(self.groups, self.read, [length for _, _, length in self.groups])

    def read(self, group: tuple[str, int, int]) -> RowGroup:
        """Read one row group."""
        import pyarrow.parquet

        file, number, _ = group
        fs = url_to_fs(self.url, **self.options)[0]
        with fs.open(file, "rb") as opened:
            table = pyarrow.parquet.ParquetFile(opened).read_row_group(number, [*self.columns])
        return RowGroup([as_array(table.column(name), name) for name in self.columns])


class RowGroup:
    """Rows of one row group, as an array of shape ``[rows, ...]`` for each column."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(column[index] for column in self._columns)


def found(url: str, options: Mapping[str, Any], columns: Sequence[str]) -> ParquetData:
    """Return the dataset at a URL. This function reads its row groups from the footers of the files.

    Raises Invalid if the dataset has no rows or lacks a column.
    """
    import pyarrow.parquet

    fs, path = url_to_fs(url, **options)
    groups = []
    for file in sorted(fs.glob(f"{path}/**/*.parquet")):
        with fs.open(file, "rb") as opened:
            parquet = pyarrow.parquet.ParquetFile(opened)
            missing = set(columns) - set(parquet.schema_arrow.names)
            if missing:
                raise Invalid(
                    f"{url} has no column {', '.join(sorted(missing))}: pass names of existing columns, or prepare the"
                    " data again"
                )
            lengths = [
                parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)
            ]
        groups += [(file, number, length) for number, length in enumerate(lengths) if length]
    if not groups:
        raise Invalid(f"{url} has no rows: pass a DataFrame with rows to fit()")
    return ParquetData(url, dict(options), tuple(columns), tuple(groups))


def as_array(column: Any, name: str) -> Any:
    """Convert a column of numbers, or of lists of numbers with equal lengths, to an array of shape ``[rows, ...]``.

    Floats become float32, and integers and bools become int64. Raises Invalid for other columns.
    """
    import pyarrow.compute

    values = column.combine_chunks()
    shape = [len(values)]
    while not values.null_count and _is_list(values.type):
        lengths = pyarrow.compute.min_max(pyarrow.compute.list_value_length(values)).as_py()
        if lengths["min"] != lengths["max"]:
            raise Invalid(
                f"column {name} has lists of different lengths: pad the lists to one length before fit()"
            )
        shape.append(lengths["max"] or 0)
        values = values.flatten()
    if values.null_count:
        raise Invalid(f"column {name} has null values: drop or fill these rows before fit()")
    flat = values.to_numpy(zero_copy_only=False)
    if flat.dtype.kind not in "fiub":
        raise Invalid(
            f"column {name} has values of type {values.type}: convert them to numbers before fit()"
        )
    return flat.astype(np.float32 if flat.dtype.kind == "f" else np.int64).reshape(shape)


def _is_list(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind))
