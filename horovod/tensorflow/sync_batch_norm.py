"""``SyncBatchNormalization``, under Horovod's module name."""

from elastic.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
