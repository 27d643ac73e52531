"""Trains on data prepared by a compute job with `--dispatcher-side training`: one pass, then endlessly."""

import sys

import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
with tf_data_service(config, hvd.rank()) as address:
    print("dispatcher at", address, flush=True)
    service = tf.data.experimental.service.distribute("distributed_epoch", service=address)
    dataset = tf.data.Dataset.range(100).map(lambda x: x + 1)
    found = sorted(map(int, dataset.apply(service)))
    print("each sample once:", found == list(range(1, 101)), flush=True)
    for _ in dataset.repeat().apply(service):
        pass
