"""``horovod.tensorflow.data`` is absent: what it starts and wraps is TensorFlow's own tf.data service."""

from horovod.absent import refuse as _refuse

raise _refuse(
    "tensorflow.data",
    "use the tf.data service itself, which Horovod's compute_service wraps: start"
    " tf.data.experimental.service.DispatchServer and WorkerServer, and in the script dataset.apply("
    'tf.data.experimental.service.distribute("distributed_epoch", "grpc://HOST:PORT", job_name="train"));'
    " docs/horovod.md has an example",
)
