"""Stores, in which estimators keep Parquet data and checkpoints.

A store is a folder or a URL of any filesystem that fsspec supports.
"""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from typing import Any

from fsspec.core import split_protocol, url_to_fs

from elastic.errors import Invalid


class Store:
    """Interface of the stores. `create` returns a store for a path."""

    storage_options: dict[str, Any] | None = None

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether the path contains a Parquet dataset."""
        raise NotImplementedError

    def get_parquet_dataset(self, path: str) -> Any:
        """Return the `pyarrow.parquet.ParquetDataset` at the path."""
        raise NotImplementedError

    def get_train_data_path(self, idx: Any = None) -> str:
        raise NotImplementedError

    def get_val_data_path(self, idx: Any = None) -> str:
        raise NotImplementedError

    def get_test_data_path(self, idx: Any = None) -> str:
        raise NotImplementedError

    def saving_runs(self) -> bool:
        """Return whether the store keeps the checkpoints of runs."""
        raise NotImplementedError

    def get_runs_path(self) -> str:
        raise NotImplementedError

    def get_run_path(self, run_id: str) -> str:
        raise NotImplementedError

    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return the folder of a run's checkpoint, or None if runs are not kept."""
        raise NotImplementedError

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        raise NotImplementedError

    def get_logs_path(self, run_id: str) -> str | None:
        raise NotImplementedError

    def get_checkpoint_filename(self) -> str:
        raise NotImplementedError

    def get_logs_subdir(self) -> str:
        raise NotImplementedError

    def exists(self, path: str) -> bool:
        raise NotImplementedError

    def read(self, path: str) -> bytes:
        raise NotImplementedError

    def write_text(self, path: str, text: str) -> None:
        raise NotImplementedError

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Create a store in this folder or at this URL."""
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **kwargs)
        if DBFSLocalStore.matches_dbfs(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)


class FilesystemStore(Store):
    """Store in a folder that the driver and all executors share, or at an fsspec URL.

    Args:
        prefix_path: folder or URL.
        train_path, val_path, test_path, runs_path: folders or URLs that replace those below ``prefix_path``.
        save_runs: whether to keep the checkpoints of runs.
        storage_options: options for the fsspec filesystem, for example credentials.
        checkpoint_filename: name of the checkpoint file. Default: ``checkpoint``.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        if not isinstance(prefix_path, str) or not prefix_path:
            raise Invalid(f"prefix_path is {prefix_path!r}: pass a folder or a URL")
        self.storage_options = storage_options
        self.prefix_path = self.get_full_path(prefix_path)
        given = {"train_data": train_path, "val_data": val_path, "test_data": test_path}
        self._data = {
            name: self.get_full_path(path or self._below(f"intermediate_{name}"))
            for name, path in given.items()
        }
        self._runs_path = self.get_full_path(runs_path or self._below("runs"))
        self._save_runs = save_runs
        self.checkpoint_filename = checkpoint_filename or "checkpoint"

    @property
    def fs(self) -> Any:
        """The fsspec filesystem of the store."""
        return url_to_fs(self.prefix_path, **(self.storage_options or {}))[0]

    def get_filesystem(self) -> Any:
        return self.fs

    def get_full_path(self, path: str) -> str:
        """Return a path as a URL."""
        if split_protocol(path)[0] is not None:
            return path
        return Path(os.path.abspath(path)).as_uri()

    def get_localized_path(self, path: str) -> str:
        """Return a URL as a path in `fs`."""
        return str(self.fs._strip_protocol(path))

    def is_parquet_dataset(self, path: str) -> bool:
        return bool(
            self.exists(path) and self.fs.glob(f"{self.get_localized_path(path)}/*.parquet")
        )

    def get_parquet_dataset(self, path: str) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetDataset(self.get_localized_path(path), filesystem=self.fs)

    def get_train_data_path(self, idx: Any = None) -> str:
        return self._indexed("train_data", idx)

    def get_val_data_path(self, idx: Any = None) -> str:
        return self._indexed("val_data", idx)

    def get_test_data_path(self, idx: Any = None) -> str:
        return self._indexed("test_data", idx)

    def saving_runs(self) -> bool:
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str | None:
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        folder = self.get_localized_path(self.get_run_path(run_id))
        return sorted(name for name in self.fs.ls(folder, detail=False) if name.endswith(suffix))

    def get_logs_path(self, run_id: str) -> str | None:
        run = self.get_checkpoint_path(run_id)
        return None if run is None else posixpath.join(run, self.get_logs_subdir())

    def get_checkpoint_filename(self) -> str:
        return self.checkpoint_filename

    def get_logs_subdir(self) -> str:
        return "logs"

    def exists(self, path: str) -> bool:
        return bool(self.fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        with self.fs.open(self.get_localized_path(path), "rb") as file:
            content: bytes = file.read()
            return content

    def write_text(self, path: str, text: str) -> None:
        with self.fs.open(self.get_localized_path(path), "w") as file:
            file.write(text)

    @classmethod
    def matches(cls, path: str) -> bool:
        return True

    def _below(self, name: str) -> str:
        return posixpath.join(self.prefix_path, name)

    def _indexed(self, name: str, idx: Any) -> str:
        return self._data[name] if idx is None else f"{self._data[name]}.{idx}"


AbstractFilesystemStore = FilesystemStore


class LocalStore(FilesystemStore):
    """Old name of `FilesystemStore`."""


class HDFSStore(FilesystemStore):
    """Store in HDFS, accessed through pyarrow, which needs libhdfs. Not tested."""

    FS_PREFIX = "hdfs://"

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: dict[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            raise Invalid(f"driver is {driver!r}, but pyarrow supports only 'libhdfs': omit driver")
        given: dict[str, Any] = {"host": host, "port": port, "user": user}
        given |= {"kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        options = {name: value for name, value in given.items() if value is not None}
        kwargs["storage_options"] = {**(kwargs.get("storage_options") or {}), **options}
        if not self.matches(prefix_path):
            prefix_path = f"{self.FS_PREFIX}{prefix_path}"
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        return isinstance(path, str) and path.startswith(cls.FS_PREFIX)


class DBFSLocalStore(FilesystemStore):
    """Store in Databricks DBFS, accessed through the folder ``/dbfs``. Not tested."""

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **kwargs)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        return isinstance(path, str) and cls._rest(path) is not None

    @classmethod
    def normalize_path(cls, path: str) -> str:
        """Return the path below ``/dbfs``.

        Raises:
            Invalid: (a ValueError) the path is not in DBFS.
        """
        rest = cls._rest(path)
        if rest is None:
            raise Invalid(f"{path!r} is not in DBFS: pass dbfs:/... or /dbfs/...")
        return f"/dbfs/{rest}"

    @staticmethod
    def _rest(path: str) -> str | None:
        for prefix in ("file:///dbfs/", "file:/dbfs/", "/dbfs/", "dbfs:/"):
            if path.startswith(prefix) and not path.startswith("dbfs://"):
                return path.removeprefix(prefix)
        return None


__all__ = [
    "AbstractFilesystemStore",
    "DBFSLocalStore",
    "FilesystemStore",
    "HDFSStore",
    "LocalStore",
    "Store",
]
