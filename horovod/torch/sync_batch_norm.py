"""SyncBatchNorm, under a path from which some scripts import it."""

from elastic.api.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
