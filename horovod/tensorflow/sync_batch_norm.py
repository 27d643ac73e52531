"""``SyncBatchNormalization``, under a path from which some scripts import it."""

from elastic.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
