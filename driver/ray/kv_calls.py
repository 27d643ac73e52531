"""The calls of Ray's key-value store. Imported only where Ray is used; all of them may block.

Tried on Ray 2.60: they give up after the timeout or, where the head's process is gone, within a second of it, and raise
RpcError ("Deadline Exceeded", "Timed out while waiting for GCS to become available."). A call that was given up may
still be carried out. Values of 60 MB pass; one key of a kilobyte takes 0.4 ms. Those of ``_internal_kv_put`` and its
like have no timeout, and wait until Ray ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.experimental import internal_kv

from elastic.driver.ray.cluster import Unanswered

_untyped: Any = internal_kv

NAMESPACE = b"hvd-elastic"
CALL_S = 2.0


class RayKeyValues:
    """Of the cluster that this process is connected to, as `kv.KeyValues` says."""

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
    """The client of the GCS that this process has; what it raises, in our words."""
    gcs = _untyped.internal_kv_get_gcs_client()
    if gcs is None:
        raise RuntimeError("this process is not connected to a Ray cluster")
    try:
        yield gcs
    except (ray.exceptions.RayError, OSError) as error:
        raise Unanswered(f"{type(error).__name__}: {error}".splitlines()[0][:300]) from error
