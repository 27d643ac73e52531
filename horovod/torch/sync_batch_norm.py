"""SyncBatchNorm, under the path that some scripts import it from."""

from __future__ import annotations

from elastic.api.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
