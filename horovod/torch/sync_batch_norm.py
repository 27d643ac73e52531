"""SyncBatchNorm, under Horovod's module name."""

from elastic.api.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
