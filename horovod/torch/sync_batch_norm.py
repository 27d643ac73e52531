"""SyncBatchNorm, under the path that some scripts import it from."""

from elastic.api.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
