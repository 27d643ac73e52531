"""``SyncBatchNormalization``, at a path that some scripts import."""

from elastic.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
