"""SyncBatchNorm, at a path that some scripts import."""

from elastic.api.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
