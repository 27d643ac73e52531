"""Calls to Ray's key-value store. Imported only if Ray is used. All calls may block.

As tested with Ray 2.60, a call fails with RpcError after its timeout ("Deadline Exceeded"), or within a second after
the exit of the head process ("Timed out while waiting for GCS to become available."). An operation whose call timed out
may still be performed. Values of 60 MB work. A call for a key of one kilobyte takes 0.4 ms. ``_internal_kv_put`` and
similar functions have no timeout, and wait until Ray ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.experimental import internal_kv

from elastic.driver.ray.cluster import RayUnavailable

_untyped: Any = internal_kv

NAMESPACE = b"hvd-elastic"
CALL_S = 2.0


class RayKV:
    """Implementation of `kv.KVStore` for the cluster to which this process is connected."""

    def put(self, key: str, value: bytes) -> None:
        with _answering() as gcs:
            gcs.internal_kv_put(key.encode(), value, True, NAMESPACE, timeout=CALL_S)

    def create(self, key: str, value: bytes) -> bool:
        with _answering() as gcs:
            added = gcs.internal_kv_put(key.encode(), value, False, NAMESPACE, timeout=CALL_S)
            return bool(added)

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        with _answering() as gcs:
            names = [key.encode() for key in keys]
            found = gcs.internal_kv_multi_get(names, NAMESPACE, timeout=CALL_S)
            return {key.decode(): value for key, value in found.items()}

    def keys(self, prefix: str) -> list[str]:
        with _answering() as gcs:
            found = gcs.internal_kv_keys(prefix.encode(), NAMESPACE, timeout=CALL_S)
            return [key.decode() for key in found]

    def remove(self, prefix: str) -> None:
        with _answering() as gcs:
            gcs.internal_kv_del(prefix.encode(), True, NAMESPACE, timeout=CALL_S)


@contextlib.contextmanager
def _answering() -> Iterator[Any]:
    """Context manager that yields this process's GCS client and converts its errors to RayUnavailable."""
    gcs = _untyped.internal_kv_get_gcs_client()
    if gcs is None:
        raise RuntimeError("this process is not connected to a Ray cluster: call ray.init() first")
    try:
        yield gcs
    except (ray.exceptions.RayError, OSError) as error:
        raise RayUnavailable(f"{type(error).__name__}: {error}".splitlines()[0][:300]) from error
