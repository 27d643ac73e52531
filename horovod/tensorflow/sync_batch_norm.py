"""``SyncBatchNormalization``, under the path that some scripts import it from."""

from elastic.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
